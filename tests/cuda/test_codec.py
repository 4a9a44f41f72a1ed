"""The GPU writes and reads the streams of the CPU, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hydra_ext import codec
from hydra_ext.errors import DamagedStream
from support.gpu import EMULATED
from support.stash.compressed import assert_kept

SHAPES = [(), (0,), (1,), (31,), (32,), (33,), (1024,), (32 * 1024 + 1,), (3, 70_001), (2, 64, 56, 56)]
PART = 48  # a stream's header


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def contents(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    normal = torch.randn(shape)
    special = normal.clone()
    special.view(-1)[::97] = -0.0
    special.view(-1)[5::331] = float("nan")
    special.view(-1)[7::331] = float("inf")
    smooth = torch.linspace(-5, 5, max(normal.numel(), 1))[: normal.numel()].view(shape)
    every = {"normal": normal, "relu": normal.relu(), "offset": normal / 8 + 40, "special": special, "smooth": smooth}
    return {name: tensor.to(dtype) for name, tensor in every.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_streams_are_the_same_both_ways(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bounds, modes = (0.0, 1e-6, 0.01, 0.3, 1e5), ((False, False), (False, True), (True, False))
    for row, (name, tensor) in enumerate(contents(shape, dtype).items()):
        for column, error_bound in enumerate(bounds):
            for depth, (keep_signs, fast) in enumerate(modes):
                if EMULATED and tensor.numel() > 10_000 and (row + column + depth) % 5 > 0:
                    continue  # each bound with each mode and each content, not all three together
                how = {"error_bound": error_bound, "keep_signs": keep_signs, "fast": fast}
                here, there = codec.compress(tensor, **how), codec.compress(tensor.cuda(), **how)
                assert there.to_bytes() == here.to_bytes(), (name, how)
                back = codec.decompress(there)
                assert back.is_cuda
                assert_kept(tensor, back.cpu(), here)
                assert bits(back.cpu()).equal(bits(codec.decompress(here))), (name, how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_sixteen_bits_alone_in_its_block(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    alone = torch.zeros(2**16, 32, dtype=torch.int16)
    alone[torch.arange(2**16), torch.arange(2**16) % 32] = patterns
    for tensor in (patterns.view(dtype), alone.view(dtype)):
        for error_bound in (1e-4, 3.0) if EMULATED else (1e-30, 1e-4, 0.01, 0.1, 3.0, 7e4):
            here = codec.compress(tensor, error_bound=error_bound)
            there = codec.compress(tensor.cuda(), error_bound=error_bound)
            assert there.to_bytes() == here.to_bytes()
            assert_kept(tensor, codec.decompress(there).cpu(), here)


def test_random_patterns_of_fp32() -> None:
    generator = torch.Generator().manual_seed(4)
    count = 2**18 if EMULATED else 2**24
    numbers = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int32)
    alone = torch.zeros(count // 32, 32, dtype=torch.int32)
    alone[:, 3] = numbers[: count // 32]
    for tensor in (numbers.view(torch.float32), alone.view(torch.float32)):
        for error_bound in (1e-30, 1e-3, 10.0):
            here = codec.compress(tensor, error_bound=error_bound)
            assert codec.compress(tensor.cuda(), error_bound=error_bound).to_bytes() == here.to_bytes()


def test_other_strides_come_back() -> None:
    tensor = torch.randn(2, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    assert codec.decompress(codec.compress(tensor)).stride() == tensor.stride()


def test_damaged_streams_are_refused_where_the_cpu_refuses_them() -> None:
    tensor = torch.randn(100_000).relu()
    whole = codec.compress(tensor, error_bound=0.02)
    random = torch.Generator().manual_seed(6)
    refused = 0
    for turn in range(40 if EMULATED else 100):
        # Every second flip is near the beginning, where lengths are: numbers that are altered are not noticed.
        at = int(torch.randint(PART, PART + 1000 if turn % 2 else whole._stream.numel(), (), generator=random))
        stream = whole._stream.clone()
        stream[at] ^= 1 << int(torch.randint(8, (), generator=random))
        here, there = replace(whole, _stream=stream), replace(whole, _stream=stream.cuda())
        try:
            expected = codec.decompress(here)
        except DamagedStream:
            refused += 1
            with pytest.raises(DamagedStream):
                codec.decompress(there)
        else:
            assert bits(codec.decompress(there).cpu()).equal(bits(expected))
        torch.cuda.synchronize()
    assert refused > 10
