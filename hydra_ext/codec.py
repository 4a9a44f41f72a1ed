"""Compresses tensors within an error bound: every decompressed number is at most the bound away from its original.

    >>> import torch
    >>> from hydra_ext import codec
    >>> activation = torch.relu(torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)))
    >>> packed = codec.compress(activation, error_bound=0.01)
    >>> packed
    Packed(shape=(64, 1024), dtype=torch.float32, error_bound=0.01, 39954 bytes, 6.6 times smaller)
    >>> bool((codec.decompress(packed) - activation).abs().max() <= 0.01)
    True

A number becomes an integer, the nearest multiple of twice the bound. Each block of 32 integers is written in the
shortest of three forms: bit planes of their magnitudes; bit planes of their differences from the smallest; or a mask
of the integers that are not zero, and these packed. The fixed-length encoding by blocks is that of cuSZp (Huang et al.,
SC 2023). COMET (Jin et al., VLDB 2022, arXiv:2011.09017) showed that a network may be trained with such activations.

The stream of bytes is the same from every machine, instruction set and number of threads. NaN, infinities, -0.0 and
numbers that are too large for the bound come back bit for bit: their block of 32 is kept as it is.
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
"""Dtypes that can be compressed."""

# to_bytes() writes before the stream, little-endian: magic, version, number of dimensions; size and stride of each.
_MAGIC, _VERSION = b"HYCT", 1
_HEAD = struct.Struct("<4sHH")
_DIMENSION = struct.Struct("<qq")
# Bytes of a stream's header (csrc/codec/codec.h) but for the counts of numbers and bytes.
_HOW = (slice(0, 8), slice(24, 48))
_MOST = 2**63 - 1  # torch counts in int64
_MOST_DIMENSIONS = 2**16 - 1  # _HEAD has a uint16
_MOST_THREADS = 2**31 - 1  # a pool counts in int32


@dataclass(frozen=True, eq=False, repr=False)
class Packed:
    """A compressed tensor, as :func:`compress` returns it. Immutable; it can be copied.

    For a file use :meth:`to_bytes` and :meth:`from_bytes`. ``torch.save`` writes it too, but only
    ``torch.load(..., weights_only=False)`` reads such a file. That runs code from the file: use it for your own files.

    Attributes:
        shape: Shape of the tensor.
        stride: Strides of the decompressed tensor.
        dtype: Dtype of the tensor.
        error_bound: Largest error of a number: the bound that was asked for, rounded down to fp32.
        keep_signs: Whether positive numbers stay positive, zeros zero and negative numbers negative.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    error_bound: float
    keep_signs: bool
    _stream: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the compressed tensor takes."""
        return self._stream.nbytes

    @property
    def ratio(self) -> float:
        """Bytes of the tensor divided by :attr:`nbytes`."""
        return self.shape.numel() * self.dtype.itemsize / self.nbytes

    def to_bytes(self) -> bytes:
        """Bytes for a file or another process. :meth:`from_bytes` reads them on any machine."""
        head = _HEAD.pack(_MAGIC, _VERSION, len(self.shape))
        dimensions = [_DIMENSION.pack(*each) for each in zip(self.shape, self.stride, strict=True)]
        return b"".join([head, *dimensions, self._stream.cpu().numpy().tobytes()])

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Packed:
        """Reads a copy of the bytes that :meth:`to_bytes` returned, onto the CPU.

        Raises:
            InvalidArgument: ``data`` is not bytes.
            DamagedStream: The bytes are cut off, or have headers that :meth:`to_bytes` does not write. Damage inside
                the stream is found by :func:`decompress`, if at all.
        """
        view = _bytes_of(data)
        if len(view) < _HEAD.size:
            raise DamagedStream(f"not a compressed tensor: {len(view)} bytes, less than a header's")
        magic, version, dimensions = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise DamagedStream("not a compressed tensor: it does not begin as one")
        if version != _VERSION:
            raise DamagedStream(f"a compressed tensor of version {version}; this hydra_ext reads version {_VERSION}")
        begin = _HEAD.size + dimensions * _DIMENSION.size
        if len(view) <= begin:
            raise DamagedStream(f"not a whole compressed tensor: {len(view)} bytes, {dimensions} dimensions")
        pairs = list(_DIMENSION.iter_unpack(view[_HEAD.size : begin]))
        shape, stride = tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs)
        # Checked in Python, whose integers do not overflow: empty_strided() would allocate too little.
        negative = any(number < 0 for pair in pairs for number in pair)
        if negative or math.prod(filter(None, shape)) > _MOST or not _is_dense(shape, stride):
            raise DamagedStream(f"not a compressed tensor: no tensor of shape {shape} has strides {stride}")
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
    """Compresses a tensor so that the error of each decompressed number is at most ``error_bound``.

    The interpreter lock is released. Other threads must not write to the tensor meanwhile. A tensor on a GPU is
    compressed there, and the call waits for it.

    Args:
        tensor: Tensor of any shape, of float32, bfloat16 or float16. If it is dense in any order of dimensions
            (transposed, channels last), the decompressed tensor has its strides. Otherwise (expanded, every second
            column) it is contiguous. Gradients do not flow through it.
        error_bound: Largest difference between a number and the decompressed one, in the tensor's own units. 0
            compresses zeros only. For 16-bit types twice the bound is rounded down to a power of two.
        keep_signs: Whether positive numbers stay positive, zeros zero and negative numbers negative, as the backward of
            a ReLU needs. Takes one more bit for each number that is not zero.
        fast: Whether to try only the first of the three encodings. It compresses a sixth to a half faster; the stream
            is longer if many numbers are zero or alike.
        threads: Number of CPU threads; ``None`` takes as many as torch computes with. The bytes are the same.

    Raises:
        InvalidArgument: An argument is not of the type or value described above. The tensor may have another type,
            layout or device, no memory of its own, or more than 65,535 dimensions.
        InvalidBound: The bound is negative or not finite.
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
    # Unwritten pages of the room take no memory, but without a copy the tensor would keep the whole room.
    return _packed(numbers.shape, numbers.stride(), room[:used].clone())


def decompress(packed: Packed, *, threads: int | None = None) -> torch.Tensor:
    """Returns the tensor on the device of the stream, with the strides of :func:`compress`. It needs no gradient.

    Args:
        packed: Result of :func:`compress` or :meth:`Packed.from_bytes`. It can be used again.
        threads: Number of CPU threads; ``None`` takes as many as torch computes with.

    Raises:
        InvalidArgument: ``packed`` is not a :class:`Packed`, or ``threads`` is not a positive whole number.
        DamagedStream: The stream is cut off, or its parts do not fit each other. Up to 128 times the stream's bytes
            may be allocated before that is noticed. There is no checksum: altered numbers in a consistent stream are
            not noticed.
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
    """The bound as a float. A text is refused, though float() would read it."""
    if isinstance(given, (str, bytes, bytearray)):
        raise InvalidArgument(f"error_bound={given!r}: give a number")
    try:
        return float(given)  # type: ignore[arg-type]
    except OverflowError as error:
        raise InvalidBound("error_bound is larger than any float: give a smaller number") from error
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise InvalidArgument(f"error_bound={given!r}: give a number") from error


def _bytes_of(data: object) -> memoryview:
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(
            f"from_bytes() was given a {type(data).__name__}: give the bytes that to_bytes() has returned"
        ) from error
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())


def _on_cuda(verb: str) -> Callable[..., int]:
    """A CUDA function by name: the stubs are those of a build without CUDA and lack it."""
    found: Callable[..., int] = getattr(_C.codec, f"{verb}_on_cuda")
    return found


def _packed(shape: torch.Size, stride: tuple[int, ...], stream: torch.Tensor) -> Packed:
    header = _C.codec.header(stream)
    packed = Packed(shape, stride, header.dtype, header.error_bound, header.keep_signs, stream)
    _check(packed)
    return packed


def _check(packed: Packed) -> None:
    """Raises DamagedStream unless the stream's header fits the shape, before memory is allocated for the shape."""
    header, numbers = _C.codec.header(packed._stream), math.prod(packed.shape)
    if (header.count, header.dtype) != (numbers, packed.dtype):
        raise DamagedStream(
            f"not a compressed tensor: a stream of {header.count} numbers of {header.dtype} with the shape "
            f"{tuple(packed.shape)} and {packed.dtype}"
        )


def _check_how(packed: Packed) -> None:
    """Raises DamagedStream unless bound, step and signs in the header are those that :func:`compress` writes."""
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
    """Whether the bytes at a tensor's address are the tensor's numbers.

    They are not for subclasses that dispatch themselves (fake tensors, images of bytes) and for functorch's wrappers.
    Tensors without memory (zeros that were never computed, a storage that was resized to 0) have no such bytes.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous()


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the numbers lie side by side in memory, without overlap or gap."""
    if 0 in shape:
        return True
    side_by_side = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != side_by_side:
            return False
        side_by_side *= size
    return True


def _pool(threads: int | None) -> _C.ThreadPool:
    """A pool of ``threads``, or of as many as torch computes with."""
    count = torch.get_num_threads() if threads is None else threads
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise InvalidArgument(f"threads={threads!r}: give a whole number from 1 to {_MOST_THREADS}, or None")
    return _pool_of(count)


@functools.cache
def _pool_of(threads: int) -> _C.ThreadPool:
    return _C.ThreadPool(threads)
