"""Buffers as they were earlier: before a round that has to be run another way, or before a block ran the first time.

Batch statistics are written without a new version, so that small buffers are taken to have changed always; large ones
are trusted to their version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hydra_ext import _C

_SMALL = 2**20  # bytes


def _may_have_changed(buffer: Tensor, version: int) -> bool:
    return buffer._version != version or buffer.nbytes <= _SMALL


class BlockBuffers:
    """The buffers of one module as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._noted = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]

    def drop_unchanged(self) -> None:
        self._noted = [noted for noted in self._noted if _may_have_changed(noted[0], noted[1])]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The buffers hold what was noted meanwhile, and afterwards what they hold now."""
        now = [(buffer, buffer.detach().clone()) for buffer, _, _ in self._noted]
        for buffer, _, value in self._noted:
            buffer.data.copy_(value)  # no new version: graphs of other microbatches hold the buffer
        try:
            yield
        finally:
            for buffer, value in now:
                buffer.data.copy_(value)


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
                kept = old is not None and not _may_have_changed(buffer, old.version)
                value = old.value if old is not None and kept else buffer.detach().to("cpu", copy=True)
                self._noted.append(_Noted(module, name, buffer, buffer._version, value))

    def restore(self) -> None:
        with torch.no_grad():
            for noted in self._noted:
                noted.module._buffers[noted.name] = noted.buffer
                if _may_have_changed(noted.buffer, noted.version):
                    noted.buffer.copy_(noted.value)
