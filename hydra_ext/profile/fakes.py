"""Fake tensors, which have shapes and dtypes and no memory, in place of real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.profile.replacing import Replacements


class Fakes(Replacements):
    """Makes fake tensors on one device.

    Args:
        mode: The FakeTensorMode.
        device: Where the fakes pretend to be.
        param_dtype: Dtype of floating parameters; None for their own.
    """

    def __init__(self, mode: Any, device: torch.device, param_dtype: torch.dtype | None) -> None:
        super().__init__()
        self._mode = mode
        self._device = device
        self._param_dtype = param_dtype

    def tensor_on(self, storage: Any, dtype: torch.dtype, place: tuple[int, torch.Size, tuple[int, ...]]) -> Tensor:
        """A fake on a storage that is there."""
        made = torch.empty(0, dtype=dtype, device=self._device)
        cached, self._mode.cache_enabled = self._mode.cache_enabled, False  # the cache would keep the storage alive
        try:
            return made.set_(storage, *place)
        finally:
            self._mode.cache_enabled = cached

    def make(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            fake: Tensor = self._mode.from_tensor(tensor)
            return fake
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = tensor.dtype
        if is_parameter and self._param_dtype is not None and tensor.is_floating_point():
            dtype = self._param_dtype
        with self._mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self._device)
            if is_parameter:
                return nn.Parameter(made, requires_grad=tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)
