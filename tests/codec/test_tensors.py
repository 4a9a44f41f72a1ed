"""What comes back is within the bound, with the same shape and strides; special numbers are bit for bit themselves."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
import sys
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import hydra_ext
from hydra_ext import _C, codec
from hydra_ext.errors import InvalidArgument, InvalidBound
from support.stash.compressed import BITS, assert_kept

pytestmark = pytest.mark.every_case

SPECIAL = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3e38, -1e30]
BOUNDS = [0.0, 1e-30, 1e-6, 1e-3, 0.01, 0.1, 0.7, 3.0, 1e5, 1e300]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any shape, type and layout, with numbers of any size, some of them special."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    dtype = draw(st.sampled_from(codec.DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
    if draw(st.booleans()):
        tensor = tensor.relu()
    if tensor.numel() > 0:
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
    tensor = tensor.to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for dimension in range(tensor.dim()):
        way = draw(st.sampled_from(["whole", "whole", "step", "narrow", "expand"]))
        if way == "step":
            tensor = tensor[(slice(None),) * dimension + (slice(None, None, 2),)]
        elif way == "narrow" and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 1, tensor.size(dimension) - 1)
        elif way == "expand" and tensor.size(dimension) == 1:
            tensor = tensor.expand(*tensor.shape[:dimension], 3, *tensor.shape[dimension + 1 :])
    return tensor


@settings(deadline=None)
@given(tensors(), st.sampled_from(BOUNDS), st.booleans(), st.booleans(), st.integers(1, 3))
def test_any_tensor_comes_back_within_the_bound(
    tensor: torch.Tensor, error_bound: float, keep_signs: bool, fast: bool, threads: int
) -> None:
    before = tensor.clone()
    packed = codec.compress(tensor, error_bound=error_bound, keep_signs=keep_signs, fast=fast, threads=threads)
    assert tensor.view(BITS[tensor.dtype]).equal(before.view(BITS[tensor.dtype])), "the tensor was written to"
    assert packed.error_bound <= error_bound
    assert (packed.shape, packed.dtype, packed.keep_signs) == (tensor.shape, tensor.dtype, keep_signs)
    again = codec.Packed.from_bytes(packed.to_bytes())
    for one in (packed, again):
        assert_kept(tensor, codec.decompress(one, threads=threads), one)


LAYOUTS: dict[str, Any] = {
    "contiguous": lambda: torch.randn(4, 5, 6),
    "transposed": lambda: torch.randn(40, 50).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "a dimension of one": lambda: torch.randn(7, 5).as_strided((7, 1, 5), (5, 1234, 1)),
    "no dimensions": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "empty inside": lambda: torch.empty(3, 0, 2),
}
APART: dict[str, Any] = {
    "expanded": lambda: torch.randn(5, 1).expand(5, 7),
    "every second": lambda: torch.randn(10, 10)[:, ::2],
    "a window": lambda: torch.randn(10, 10)[2:5, 2:5],
    "overlapping": lambda: torch.randn(10).unfold(0, 4, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_dense_tensors_come_back(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    packed = codec.Packed.from_bytes(codec.compress(tensor).to_bytes())
    assert codec.decompress(packed).stride() == tensor.stride() == packed.stride


@pytest.mark.parametrize("layout", APART)
def test_other_tensors_come_back_contiguous(layout: str) -> None:
    tensor = APART[layout]()
    back = codec.decompress(codec.compress(tensor))
    assert back.is_contiguous()
    assert_kept(tensor, back, codec.compress(tensor))


@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_every_pattern_of_sixteen_bits_is_kept(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    numbers = patterns.view(dtype) if dtype.itemsize == 2 else patterns.view(torch.bfloat16).float()
    shuffled = numbers[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    for error_bound in (1e-30, 1e-4, 0.01, 0.1, 3.0, 7e4):
        for keep_signs in (False, True):
            for tensor in (numbers, shuffled):
                packed = codec.compress(tensor, error_bound=error_bound, keep_signs=keep_signs)
                assert_kept(tensor, codec.decompress(packed), packed)


def test_it_is_small() -> None:
    generator = torch.Generator().manual_seed(0)
    activation = torch.randn(1000, 1000, generator=generator)
    dense = codec.compress(activation, error_bound=0.1)
    sparse = codec.compress(activation.relu(), error_bound=0.1)
    assert 5.5 < dense.ratio < 6.5
    assert 10 < sparse.ratio < 11
    assert codec.compress(torch.zeros(10**6)).ratio > 100
    assert sparse._stream.untyped_storage().nbytes() == sparse.nbytes
    assert sparse.nbytes == len(sparse.to_bytes()) - len(codec.compress(torch.zeros(0, 0)).to_bytes()) + 48
    assert codec.compress(activation.relu(), error_bound=0.1, fast=True).nbytes > sparse.nbytes


def test_signs_are_kept_where_asked() -> None:
    tensor = torch.tensor([1e-9, -1e-9, 0.0, 0.4, -0.4, 7.0])
    assert codec.decompress(codec.compress(tensor, error_bound=1.0)).sign().tolist() == [0, 0, 0, 0, 0, 1]
    kept = codec.decompress(codec.compress(tensor, error_bound=1.0, keep_signs=True))
    assert kept.sign().tolist() == tensor.sign().tolist()


def test_a_bound_is_never_rounded_up() -> None:
    """1e-3 in fp32 is more than 1e-3."""
    packed = codec.compress(torch.randn(10), error_bound=1e-3)
    assert 0.999_999e-3 < packed.error_bound < 1e-3 < float(torch.tensor(1e-3))
    assert codec.compress(torch.randn(10), error_bound=0.5).error_bound == 0.5


def test_gradients_do_not_flow() -> None:
    back = codec.decompress(codec.compress(torch.randn(4, requires_grad=True)))
    assert not back.requires_grad


def test_views_that_are_negated_lazily_are_taken_as_they_read() -> None:
    tensor = torch._neg_view(torch.randn(8))
    assert_kept(tensor, codec.decompress(codec.compress(tensor)), codec.compress(tensor))


def test_a_packed_tensor_can_be_copied_and_saved() -> None:
    tensor = torch.randn(30, 40).t()
    packed = codec.compress(tensor, error_bound=0.1)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for one in (copy.copy(packed), copy.deepcopy(packed), torch.load(file, weights_only=False)):
        assert codec.decompress(one).equal(codec.decompress(packed))
        assert repr(one) == repr(packed)
    with pytest.raises(AttributeError):
        packed.error_bound = 1.0  # type: ignore[misc]


def test_other_threads_run_meanwhile() -> None:
    numbers = torch.randn(2**23)
    stream = torch.zeros(_C.codec.most_bytes(numbers), dtype=torch.uint8)
    how: dict[str, Any] = {"pool": _C.ThreadPool(1), "instructions": _C.InstructionSet.PORTABLE}
    turns, found = [0], []

    def work() -> None:
        before = turns[0]
        used = _C.codec.compress(numbers, stream, error_bound=0.1, keep_signs=False, fast=False, **how)
        between = turns[0]
        _C.codec.decompress(stream[:used], numbers, **how)
        found.extend([between - before, turns[0] - between])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # threads take turns only where one lets the interpreter go
    try:
        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive():
            turns[0] += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert min(found) > 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "list"),
        (torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(3, dtype=torch.int32), "int32"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_be_compressed_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        codec.compress(value)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(64)


def given_back() -> torch.Tensor:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT_MEMORY: dict[str, Any] = {
    "an image of bytes": lambda: hydra_ext.tiled.image(torch.zeros(3, 8, 8, dtype=torch.uint8)),
    "zeros that were not made": lambda: torch._efficientzerotensor((64,)),
    "fake": fake,
    "given back": given_back,
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_tensors_without_memory_are_refused(kind: str) -> None:
    tensor = WITHOUT_MEMORY[kind]()
    with pytest.raises(InvalidArgument, match="memory"):
        codec.compress(tensor)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_what_transformations_hand_out_is_refused(transform: Any) -> None:
    def compressed(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(InvalidArgument, match="memory"):
            codec.compress(tensor)
        return tensor.sum()

    transform(compressed)(torch.randn(4, 4))


def test_parameters_are_compressed_as_tensors() -> None:
    parameter = torch.nn.Parameter(torch.randn(50))
    assert_kept(parameter.detach(), codec.decompress(codec.compress(parameter)), codec.compress(parameter))


def test_arguments_that_make_no_sense_are_refused() -> None:
    for bound in (-1e-3, float("nan"), float("inf")):
        with pytest.raises(InvalidBound):
            codec.compress(torch.zeros(3), error_bound=bound)
    with pytest.raises(InvalidArgument, match="error_bound='much'"):
        codec.compress(torch.zeros(3), error_bound="much")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="threads=0"):
        codec.compress(torch.zeros(3), threads=0)
    with pytest.raises(InvalidArgument, match="bytes"):
        codec.decompress(b"HYCT")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"threads": threads}, InvalidArgument) for threads in ("2", 2.0, True, -1, 10**30)),
        *(({name: value}, InvalidArgument) for name in ("keep_signs", "fast") for value in ("no", 1, None)),
        *(({"error_bound": bound}, InvalidArgument) for bound in ("0.1", b"1", None, 1j, torch.ones(2))),
        ({"error_bound": 10**400}, InvalidBound),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_of_another_type_are_refused_by_name(options: dict[str, Any], error: type[Exception]) -> None:
    (name,) = options
    with pytest.raises(error, match=name):
        codec.compress(torch.zeros(3), **options)
    if name == "threads":
        with pytest.raises(error, match=name):
            codec.decompress(codec.compress(torch.zeros(3)), **options)


@pytest.mark.parametrize("value", ["HYCT", None, 5, [72, 89]])
def test_what_is_no_bytes_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"to_bytes\(\)"):
        codec.Packed.from_bytes(value)


def test_bytes_in_any_buffer_are_read() -> None:
    packed = codec.compress(torch.randn(50))
    stream = packed.to_bytes()
    apart = memoryview(bytes(byte for pair in zip(stream, stream, strict=True) for byte in pair))[::2]
    for buffer in (bytearray(stream), memoryview(stream), apart, torch.frombuffer(bytearray(stream), dtype=torch.int8)):
        again = codec.Packed.from_bytes(buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer)
        assert codec.decompress(again).equal(codec.decompress(packed))


def test_more_dimensions_than_the_format_holds_are_refused() -> None:
    packed = codec.compress(torch.randn([1] * 65_535))
    assert codec.Packed.from_bytes(packed.to_bytes()).shape == packed.shape
    with pytest.raises(InvalidArgument, match="65536 dimensions"):
        codec.compress(torch.randn([1] * 65_536))


def test_torch_save_is_said_to_need_trust_and_to_bytes_does_not() -> None:
    packed, file = codec.compress(torch.randn(50)), io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(file)
    assert "to_bytes" in (codec.Packed.__doc__ or "")


def test_all_instruction_sets_write_and_read_the_same() -> None:
    numbers = torch.randn(40_000, generator=torch.Generator().manual_seed(3)).relu()
    pool = _C.ThreadPool(1)
    streams, found = [], []
    for instructions in _C.codec.supported_instruction_sets():
        stream = torch.zeros(_C.codec.most_bytes(numbers), dtype=torch.uint8)
        how: dict[str, Any] = {"pool": pool, "instructions": instructions}
        used = _C.codec.compress(numbers, stream, error_bound=0.02, keep_signs=False, fast=False, **how)
        streams.append(stream[:used])
        found.append(torch.empty_like(numbers))
        _C.codec.decompress(stream[:used], found[-1], **how)
    assert all(stream.equal(streams[0]) for stream in streams)
    assert all(one.equal(found[0]) for one in found)


def test_it_is_there_by_name_and_does_what_its_example_says() -> None:
    assert hydra_ext.codec is codec
    found = doctest.testmod(codec)
    assert found.attempted > 0
    assert found.failed == 0
