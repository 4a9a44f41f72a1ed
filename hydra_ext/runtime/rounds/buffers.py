"""Buffers as they were before a round that has to be run another way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.activations.module_state import may_have_changed


@dataclass(frozen=True)
class _Noted:
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


class ModelBuffers:
    """Copies on the host of all the buffers of a model; of large ones anew only if they have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._noted: list[_Noted] = []

    def note(self) -> None:
        _C.suspend_charging()
        known = {id(noted.buffer): noted for noted in self._noted}
        self._noted = []
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                old = known.get(id(buffer))
                kept = old is not None and not may_have_changed(buffer, old.version)
                value = old.value if old is not None and kept else buffer.detach().to("cpu", copy=True)
                self._noted.append(_Noted(module, name, buffer, buffer._version, value))

    def restore(self) -> None:
        with torch.no_grad():
            for noted in self._noted:
                noted.module._buffers[noted.name] = noted.buffer
                if may_have_changed(noted.buffer, noted.version):
                    noted.buffer.copy_(noted.value)
