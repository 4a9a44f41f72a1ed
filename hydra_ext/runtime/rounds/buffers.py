"""The model's buffers as they were when a round began, should it have to be run another way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hydra_ext import _C


@dataclass(frozen=True)
class _Noted:
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


class BufferCopies:
    """Copies on the host, made anew only of what has changed since the last time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._noted: list[_Noted] = []

    def note(self) -> None:
        _C.suspend_charging()
        known = {(id(noted.buffer), noted.version): noted.value for noted in self._noted}
        self._noted = []
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    value = known.get((id(buffer), buffer._version))
                    if value is None:
                        value = buffer.detach().to("cpu", copy=True)
                    self._noted.append(_Noted(module, name, buffer, buffer._version, value))

    def restore(self) -> None:
        with torch.no_grad():
            for noted in self._noted:
                noted.module._buffers[noted.name] = noted.buffer
                if noted.buffer._version != noted.version:
                    noted.buffer.copy_(noted.value)
