"""Tensors as they come and go: by name, one after another, from whatever has them."""

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
    """A tensor that is to be written.

    Attributes:
        name: its own, unique in its section.
        fetch: gives it when its turn has come; nothing is kept of it afterwards.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]

    @staticmethod
    def of(name: str, tensor: Tensor) -> Entry:
        """
        Raises:
            UnsupportedState: no file can hold it.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            kind = f"{tensor.layout}" if tensor.layout != torch.strided else f"{tensor.dtype} on {tensor.device}"
            raise UnsupportedState(f"'{name}' is {kind}: a checkpoint holds dense tensors that have their bytes")
        if tensor.dtype not in CODES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
            raise UnsupportedState(f"'{name}' is {tensor.dtype}: a checkpoint holds {known}")
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Of the elements in their order: the tensor's own memory where they lie so on the host, else that of a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.reshape(-1).view(torch.uint8).numpy().data


def empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """To be filled through :func:`bytes_of`."""
    return torch.empty(shape, dtype=dtype, device="cpu")
