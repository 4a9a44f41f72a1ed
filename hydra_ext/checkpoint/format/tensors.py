"""Tensors to be written, by name and one after another, and the bytes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ext.checkpoint.format.header import CODES
from hydra_ext.errors import UnsupportedState


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: Name of the tensor, unique in its section.
        fetch: Returns the tensor when it is to be written. The writer keeps no reference afterwards.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]

    @staticmethod
    def of(name: str, tensor: Tensor) -> Entry:
        """The entry of a tensor that exists already.

        Raises:
            UnsupportedState: No file can hold the tensor.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            kind = f"{tensor.layout}" if tensor.layout != torch.strided else f"{tensor.dtype} on {tensor.device}"
            raise UnsupportedState(f"'{name}' is {kind}: a checkpoint holds dense, unquantised tensors with memory")
        if tensor.dtype not in CODES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
            raise UnsupportedState(f"'{name}' is {tensor.dtype}: a checkpoint holds {known}")
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Bytes of the elements in order: the tensor's own memory if it is contiguous on the host, else a copy's."""
    if tensor.numel() == 0:
        return memoryview(b"")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.reshape(-1).view(torch.uint8).numpy().data


def empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A new host tensor, to be filled through :func:`bytes_of`."""
    return torch.empty(shape, dtype=dtype, device="cpu")
