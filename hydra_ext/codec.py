"""Tensors compressed within an error bound, and back: every number that comes back is at most the bound away.

    >>> import torch
    >>> from hydra_ext import codec
    >>> activation = torch.relu(torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)))
    >>> packed = codec.compress(activation, error_bound=0.01)
    >>> packed
    Packed(shape=(64, 1024), dtype=torch.float32, error_bound=0.01, 39954 bytes, 6.6 times smaller)
    >>> bool((codec.decompress(packed) - activation).abs().max() <= 0.01)
    True

That activations may be kept so while a network trains is due to COMET (Jin et al., VLDB 2022, arXiv:2011.09017). A
number becomes an integer, the nearest multiple of twice the bound. 32 of them at a time are written as bit planes of
their magnitudes, as bit planes of what they have beyond the smallest, or as a mask of which are not zero and the packed
others, whichever is shortest; block-wise encoding with fixed lengths is that of cuSZp (Huang et al., SC 2023).

The stream of bytes is the same from every machine, instruction set and number of threads. NaN, infinities, -0.0 and
what is too large for the bound come back bit for bit: their block of 32 is kept as it is.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hydra_ext import _C, _build_info
from hydra_ext.errors import DamagedStream, InvalidArgument, InvalidBound

__all__ = ["DTYPES", "Packed", "compress", "decompress"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be compressed."""

# What to_bytes() puts before the stream, little-endian: magic, version, number of dimensions; size and stride of each.
_MAGIC, _VERSION = b"HYCT", 1
_HEAD = struct.Struct("<4sHH")
_DIMENSION = struct.Struct("<qq")
# Of a stream's header (csrc/codec/codec.h), all but the counts of numbers and bytes.
_HOW = (slice(0, 8), slice(24, 48))
_MOST = 2**63 - 1  # what torch counts in
_MOST_DIMENSIONS = 2**16 - 1  # what _HEAD counts in
_MOST_THREADS = 2**31 - 1  # what a pool counts in


@dataclass(frozen=True, eq=False, repr=False)
class Packed:
    """A compressed tensor: what :func:`compress` returns. Immutable; it can be copied.

    For a file use :meth:`to_bytes` and :meth:`from_bytes`. ``torch.save`` writes it too, but what it writes is read by
    ``torch.load(..., weights_only=False)`` only, which runs what a file says: for files of your own.

    Attributes:
        shape: the tensor's.
        stride: that of the tensor that comes back.
        dtype: the tensor's.
        error_bound: no number is further off: what was asked for, rounded down to fp32.
        keep_signs: whether what is positive, zero or negative comes back so.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    error_bound: float
    keep_signs: bool
    _stream: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._stream.nbytes

    @property
    def ratio(self) -> float:
        """The tensor's bytes over these."""
        return self.shape.numel() * self.dtype.itemsize / self.nbytes

    def to_bytes(self) -> bytes:
        """For a file or another process: :meth:`from_bytes` reads it on any machine."""
        head = _HEAD.pack(_MAGIC, _VERSION, len(self.shape))
        dimensions = [_DIMENSION.pack(*each) for each in zip(self.shape, self.stride, strict=True)]
        return b"".join([head, *dimensions, self._stream.cpu().numpy().tobytes()])

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Packed:
        """What :meth:`to_bytes` has written, for the CPU; takes a copy.

        Raises:
            InvalidArgument: it is no bytes.
            DamagedStream: it is not that: it is cut off, or its headers say what :meth:`to_bytes` does not. What is
                wrong inside the stream only :func:`decompress` finds, as far as it can be found.
        """
        view = _bytes_of(data)
        if len(view) < _HEAD.size:
            raise DamagedStream(f"not a compressed tensor: {len(view)} bytes, less than a header's")
        magic, version, dimensions = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise DamagedStream("not a compressed tensor: it does not begin as one")
        if version != _VERSION:
            raise DamagedStream(f"a compressed tensor of version {version}; this one reads version {_VERSION}")
        begin = _HEAD.size + dimensions * _DIMENSION.size
        if len(view) <= begin:
            raise DamagedStream(f"not a whole compressed tensor: {len(view)} bytes, {dimensions} dimensions")
        pairs = list(_DIMENSION.iter_unpack(view[_HEAD.size : begin]))
        shape, stride = tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs)
        # In Python, whose integers do not overflow: empty_strided() would take less than it writes to.
        negative = any(number < 0 for pair in pairs for number in pair)
        if negative or math.prod(filter(None, shape)) > _MOST or not _is_dense(shape, stride):
            raise DamagedStream(f"not a compressed tensor: shape {shape} with strides {stride} cannot be")
        packed = _packed(torch.Size(shape), stride, torch.frombuffer(bytearray(view[begin:]), dtype=torch.uint8))
        _check_how(packed)
        return packed

    def __repr__(self) -> str:
        return (
            f"Packed(shape={tuple(self.shape)}, dtype={self.dtype}, error_bound={self.error_bound:.6g}, "
            f"{self.nbytes} bytes, {self.ratio:.1f} times smaller)"
        )


def compress(
    tensor: torch.Tensor,
    *,
    error_bound: float = 1e-3,
    keep_signs: bool = False,
    fast: bool = False,
    threads: int | None = None,
) -> Packed:
    """Compresses a tensor so that no number comes back further off than ``error_bound``.

    Other threads of Python run meanwhile, and must not write to the tensor. A tensor on a GPU is compressed there, and
    waited for.

    Args:
        tensor: of any shape, float32, bfloat16 or float16. Where its numbers lie side by side in memory, in whatever
            order of dimensions (transposed, channels last), it comes back with the same strides; otherwise (expanded,
            every second column) contiguous. Gradients do not flow through it.
        error_bound: largest difference between a number and what comes back, in the tensor's own units. 0 compresses
            zeros only. For 16-bit types twice the bound is rounded down to a power of two.
        keep_signs: what is positive, zero or negative comes back so, as the backward of a ReLU needs it; takes one
            more bit of those numbers that are not zero.
        fast: only the first of the three encodings: a sixth to a half faster to compress, and longer where many numbers
            are zero, or alike.
        threads: how many of the CPU's compress; ``None``: as many as torch computes with. The bytes are the same.

    Raises:
        InvalidArgument: no tensor, or one of another type, layout or device, without memory of its own, or of more than
            65,535 dimensions; or another argument that is not as said above.
        InvalidBound: a bound that is negative or not finite.
    """
    numbers = _dense(_checked(tensor))
    bound = _bound_of(error_bound)
    for name, value in (("keep_signs", keep_signs), ("fast", fast)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name}={value!r}: give True or False")
    room = torch.empty(_C.codec.most_bytes(numbers), dtype=torch.uint8, device=numbers.device)
    how: dict[str, Any] = {"error_bound": bound, "keep_signs": keep_signs, "fast": fast}
    if numbers.is_cuda:
        used = _on_cuda("compress")(numbers, room, **how)
    else:
        used = _C.codec.compress(numbers, room, **how, pool=_pool(threads))
    # Pages of the room that were not written to take no memory, but the room would be kept.
    return _packed(numbers.shape, numbers.stride(), room[:used].clone())


def decompress(packed: Packed, *, threads: int | None = None) -> torch.Tensor:
    """The tensor again, where it was and with the strides of :func:`compress`; it needs no gradient.

    Args:
        packed: from :func:`compress` or :meth:`Packed.from_bytes`. It can be used again.
        threads: how many decompress; ``None``: as many as torch computes with.

    Raises:
        InvalidArgument: it is no such thing, or ``threads`` is no positive whole number.
        DamagedStream: the stream is cut off, or its parts do not fit each other. What memory is taken before that is
            noticed is in proportion to the number of bytes given, at most 128 times as much. There is no checksum:
            altered numbers in a stream that fits are not noticed.
    """
    if not isinstance(packed, Packed):
        raise InvalidArgument(f"decompress() was given a {type(packed).__name__}: give what compress() has returned")
    _check(packed)
    stream = packed._stream
    numbers = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=stream.device)
    if stream.is_cuda:
        _on_cuda("decompress")(stream, numbers)
    else:
        _C.codec.decompress(stream, numbers, pool=_pool(threads))
    return numbers


def _bound_of(given: object) -> float:
    """Of numbers only: a text is none, though float() would read it."""
    if isinstance(given, (str, bytes, bytearray)):
        raise InvalidArgument(f"error_bound={given!r}: a number is needed")
    try:
        return float(given)  # type: ignore[arg-type]
    except OverflowError as error:
        raise InvalidBound("error_bound is a number beyond what a float holds, and cannot be a bound") from error
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise InvalidArgument(f"error_bound={given!r}: a number is needed") from error


def _bytes_of(data: object) -> memoryview:
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(
            f"from_bytes() was given a {type(data).__name__}: give the bytes that to_bytes() has returned"
        ) from error
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())


def _on_cuda(verb: str) -> Callable[..., int]:
    """Not in the stubs, which are those of a build without CUDA."""
    found: Callable[..., int] = getattr(_C.codec, f"{verb}_on_cuda")
    return found


def _packed(shape: torch.Size, stride: tuple[int, ...], stream: torch.Tensor) -> Packed:
    header = _C.codec.header(stream)
    packed = Packed(shape, stride, header.dtype, header.error_bound, header.keep_signs, stream)
    _check(packed)
    return packed


def _check(packed: Packed) -> None:
    """Whether stream and shape belong together, before memory is taken for the shape."""
    header, numbers = _C.codec.header(packed._stream), math.prod(packed.shape)
    if (header.count, header.dtype) != (numbers, packed.dtype):
        raise DamagedStream(
            f"not a compressed tensor: a stream of {header.count} numbers of {header.dtype} with the shape "
            f"{tuple(packed.shape)} and {packed.dtype}"
        )


def _check_how(packed: Packed) -> None:
    """Whether the header says of bound, step and signs what :func:`compress` writes for that bound."""
    how: dict[str, Any] = {"error_bound": packed.error_bound, "keep_signs": packed.keep_signs}
    try:
        expected = compress(torch.empty(0, dtype=packed.dtype, device="cpu"), **how, threads=1)
    except InvalidBound as error:
        raise DamagedStream(f"not a compressed tensor: a bound of {packed.error_bound}") from error
    for part in _HOW:
        if not packed._stream[part].equal(expected._stream[part]):
            raise DamagedStream(
                f"not a compressed tensor: its header does not fit a bound of {packed.error_bound} for {packed.dtype}"
            )


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"compress() was given a {type(tensor).__name__}: give a tensor")
    if tensor.dtype not in DTYPES:
        raise InvalidArgument(f"a tensor of {tensor.dtype} cannot be compressed: {', '.join(map(str, DTYPES))} can")
    if tensor.dim() > _MOST_DIMENSIONS:
        raise InvalidArgument(
            f"a tensor of {tensor.dim()} dimensions cannot be compressed: the format holds {_MOST_DIMENSIONS}; flatten "
            "some of them"
        )
    devices = ("cpu", "cuda") if _build_info.CUDA == "ON" else ("cpu",)
    if tensor.layout != torch.strided or tensor.device.type not in devices:
        raise InvalidArgument(
            f"a tensor with layout {tensor.layout} on {tensor.device} cannot be compressed by this build: give a "
            f"strided one on {' or '.join(devices)}"
        )
    if not _has_its_numbers(tensor):
        raise InvalidArgument(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own with its numbers in "
            "it, and cannot be compressed: give a plain tensor made from it"
        )
    return tensor.detach().resolve_neg()


def _has_its_numbers(tensor: torch.Tensor) -> bool:
    """Whether what is read at a tensor's address is the tensor.

    It is not for subclasses that dispatch themselves (fake tensors, images of bytes), for what functorch's
    transformations hand out, and where there is no memory (zeros that were not made, storage given back).
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous()


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether each number has a place of its own and there is none between them."""
    if 0 in shape:
        return True
    side_by_side = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != side_by_side:
            return False
        side_by_side *= size
    return True


def _pool(threads: int | None) -> _C.ThreadPool:
    """As many as torch computes with, unless a number is given."""
    count = torch.get_num_threads() if threads is None else threads
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise InvalidArgument(f"threads={threads!r}: give a whole number from 1 to {_MOST_THREADS}, or None")
    return _pool_of(count)


@functools.cache
def _pool_of(threads: int) -> _C.ThreadPool:
    return _C.ThreadPool(threads)
