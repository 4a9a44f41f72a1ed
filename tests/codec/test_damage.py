"""Bytes that are no compressed tensor are refused by a typed error, and cost no more memory than they justify."""

from __future__ import annotations

import resource
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext import codec
from hydra_ext.errors import DamagedStream

pytestmark = pytest.mark.every_case

HEAD = 8
DIMENSION = 16


def whole(count: int = 5000, seed: int = 0) -> bytes:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    numbers[count // 3 : count // 2] = 0.0
    numbers[0] = float("nan")
    return codec.compress(numbers.view(2, -1), error_bound=0.01).to_bytes()


def read(data: bytes) -> torch.Tensor | None:
    """None where it was refused; any other error is a failure."""
    try:
        return codec.decompress(codec.Packed.from_bytes(data), threads=1)
    except DamagedStream:
        return None


@settings(deadline=None)
@given(st.data())
def test_altered_bytes_are_refused_or_give_a_tensor_of_that_shape(data: st.DataObject) -> None:
    stream = bytearray(whole(data.draw(st.sampled_from([64, 1000, 40_000]))))
    size = len(stream)
    place = st.one_of(st.integers(0, 150), st.integers(0, size - 1)).map(lambda at: min(at, size - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(place)] = data.draw(st.integers(0, 255))
    found = read(bytes(stream))
    assert found is None or found.numel() <= 32 * size


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_what_is_cut_off_is_refused(length: int) -> None:
    stream = whole()
    assert read(stream[: min(length, len(stream) - 1)]) is None


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from([0, 2, 8, 24, 56]))
def test_any_bytes_are_refused(noise: bytes, kept: int) -> None:
    assert read(whole()[:kept] + noise) is None


def test_no_bytes_at_all_are_refused() -> None:
    for nothing in (b"", torch.empty(0, 3).numpy()):
        with pytest.raises(DamagedStream, match="0 bytes"):
            codec.Packed.from_bytes(nothing)


def test_more_bytes_than_there_should_be_are_refused() -> None:
    assert read(whole() + b"\0") is None


@pytest.mark.parametrize(
    "dimensions",
    [
        [(2**62, 1)],
        [(2**40, 2**22), (2**22, 1)],
        [(0, 1), (2**62, 1), (2**62, 1)],
        [(-5000, 1)],
        [(5000, -1)],
        [(5000, 0)],
        [(5000, 2)],
        [(2, 1), (2500, 1)],
        [(2**63 - 1, 1), (2**63 - 1, 2**63 - 1)],
    ],
)
def test_shapes_that_cannot_be_are_refused_before_memory_is_taken(dimensions: list[tuple[int, int]]) -> None:
    stream = whole()
    begin = HEAD + 2 * DIMENSION
    head = struct.pack("<4sHH", b"HYCT", 1, len(dimensions))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read(head + b"".join(struct.pack("<qq", *each) for each in dimensions) + stream[begin:]) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


@pytest.mark.parametrize("dimensions", [[(0, 1), (-5, 1)], [(0, -1)], [(0, 1), (2**62, 1), (2**62, 1)]])
def test_shapes_without_numbers_that_cannot_be_are_refused(dimensions: list[tuple[int, int]]) -> None:
    stream = codec.compress(torch.empty(0)).to_bytes()[HEAD + DIMENSION :]
    head = struct.pack("<4sHH", b"HYCT", 1, len(dimensions))
    assert read(head + b"".join(struct.pack("<qq", *each) for each in dimensions) + stream) is None


def test_a_count_that_the_bytes_cannot_hold_is_refused_before_memory_is_taken() -> None:
    stream = bytearray(whole())
    begin = HEAD + 2 * DIMENSION
    for count in (2**40, 2**62, 2**63 - 1, -1):
        struct.pack_into("<q", stream, begin + 8, count)
        struct.pack_into("<qq", stream, HEAD, abs(count), 1)
        assert read(bytes(stream)) is None


# Of the stream's header: place, format, value.
HEADERS = {
    "bound that is no number": (24, "<f", float("nan")),
    "infinite bound": (24, "<f", float("inf")),
    "negative bound": (24, "<f", -1.0),
    "smaller bound than the step's": (24, "<f", 0.005),
    "step that is no number": (28, "<f", float("nan")),
    "infinite step": (28, "<f", float("inf")),
    "larger step than the bound's": (28, "<f", 1e30),
    "no step": (28, "<f", 0.0),
    "signs kept in another way": (7, "<B", 7),
    "signs kept with another step": (7, "<B", 1),
    "something where nothing is yet": (32, "<Q", 5),
    "something at the end": (40, "<Q", 1 << 63),
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_compress_does_not_write_are_refused(what: str) -> None:
    stream = bytearray(whole())
    place, form, value = HEADERS[what]
    struct.pack_into(form, stream, HEAD + 2 * DIMENSION + place, value)
    with pytest.raises(DamagedStream, match="bound"):
        codec.Packed.from_bytes(stream)


@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
@pytest.mark.parametrize("keep_signs", [False, True])
@pytest.mark.parametrize("bound", [0.0, 1e-45, 1e-38, 1e-3, 0.3, 2.0, 7e4, 3.4e38, 1e300])
def test_headers_of_every_bound_are_read_again(bound: float, keep_signs: bool, dtype: torch.dtype) -> None:
    numbers = torch.linspace(-3, 3, 100).to(dtype)
    packed = codec.compress(numbers, error_bound=bound, keep_signs=keep_signs)
    again = codec.Packed.from_bytes(packed.to_bytes())
    assert repr(again) == repr(packed)
    assert codec.decompress(again).equal(codec.decompress(packed))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(0, b"X", "begin"), (4, b"\2", "version 2"), (HEAD + 2 * DIMENSION + 4, b"\7", "version")],
)
def test_the_message_says_what_is_wrong(place: int, value: bytes, message: str) -> None:
    stream = bytearray(whole())
    stream[place : place + 1] = value
    with pytest.raises(DamagedStream, match=message):
        codec.Packed.from_bytes(stream)
