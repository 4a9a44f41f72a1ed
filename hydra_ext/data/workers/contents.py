"""Objects as bytes, with the memory of their tensors and arrays beside them: it is copied once, into shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_SMALL = 4096  # bytes: below, a buffer travels with the rest


class _Pickler(pickle.Pickler):
    """Leaves the memory of dense tensors out, as numpy does for arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested:
            return NotImplemented
        if not value.numel():
            return NotImplemented
        if value.untyped_storage().nbytes() < value.numel() * value.element_size():  # expanded
            return NotImplemented
        order = sorted(range(value.dim()), key=value.stride, reverse=True)  # as the elements lie, of channels_last, too
        inverse = [order.index(dimension) for dimension in range(value.dim())]
        lying = value.permute(order).contiguous()
        # One element counts as contiguous whatever its stride is, and a view as bytes asks for a stride of 1.
        flat = lying.as_strided((lying.numel(),), (1,)).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), value.dtype, tuple(lying.shape), inverse)


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape).permute(order)


def whole(value: Any) -> bytes:
    """An object's bytes, with the memory of its tensors and arrays."""
    return _dumped(value, None)


def dumped(value: Any) -> tuple[bytes, list[memoryview]]:
    """An object's bytes, and the memory that they refer to. The memory is the object's own."""
    buffers: list[memoryview] = []

    def travels_along(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < _SMALL:
            return True
        buffers.append(raw)
        return False

    return _dumped(value, travels_along), buffers


def _dumped(value: Any, travels_along: Callable[[pickle.PickleBuffer], bool] | None) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=travels_along).dump(value)
    return stream.getvalue()


def loaded(data: bytes, buffers: Sequence[Any] = ()) -> Any:
    """The object. Its tensors and arrays lie in the buffers, which live as long as they do."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - from our own workers, by a pipe that only they have


def offsets(sizes: Sequence[int], alignment: int = 64) -> tuple[list[int], int]:
    """Where buffers of these sizes lie one after the other, and the bytes of all."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // alignment) * alignment
    return found, end
