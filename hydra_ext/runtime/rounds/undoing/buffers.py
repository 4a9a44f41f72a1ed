"""Notes of buffers, to restore them when a round is undone and to detect writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.state import numbers
from hydra_ext.state.numbers import has_plain_numbers, may_have_changed, version_of


@dataclass(frozen=True)
class NotedBuffer:
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


class ModelBuffers:
    """Host copies of all buffers of models. A copy is reused unless its buffer may have changed."""

    def __init__(self) -> None:
        self._latest: Sequence[NotedBuffer] = ()

    def note(self, models: Sequence[nn.Module]) -> Sequence[NotedBuffer]:
        """Notes all buffers as they are now."""
        _C.suspend_charging()
        known = {id(noted.buffer): noted for noted in self._latest}
        found: list[NotedBuffer] = []
        for module in (module for model in models for module in model.modules()):
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                old = known.get(id(buffer))
                kept = old is not None and not may_have_changed(buffer, old.version)
                value = old.value if old is not None and kept else numbers.on_host(buffer)
                found.append(NotedBuffer(module, name, buffer, version_of(buffer), value))
        self._latest = found
        return found


def note(modules: Iterable[nn.Module]) -> list[NotedBuffer]:
    """Notes the buffers of these modules, without those of modules inside them."""
    found = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    return [
        NotedBuffer(module, name, buffer, version_of(buffer), numbers.on_host(buffer))
        for module, name, buffer in found
        if buffer is not None
    ]


def differs(noted: NotedBuffer) -> bool:
    """Whether the buffer was replaced, or has other numbers than noted."""
    if noted.module._buffers.get(noted.name) is not noted.buffer:
        return True
    return may_have_changed(noted.buffer, noted.version) and numbers.differ(noted.buffer, noted.value)


def written(before: Sequence[NotedBuffer], after: Sequence[NotedBuffer]) -> list[NotedBuffer]:
    """The buffers of ``after`` that were replaced, or have other numbers than in ``before``."""
    known = {(id(noted.module), noted.name): noted for noted in before}
    found = []
    for noted in after:
        old = known.get((id(noted.module), noted.name))
        if old is not None and _is_another(old, noted):
            found.append(noted)
    return found


def _is_another(old: NotedBuffer, new: NotedBuffer) -> bool:
    if old.buffer is not new.buffer:
        return True
    if not has_plain_numbers(new.buffer):
        return old.version != new.version
    return numbers.differ(old.value, new.value)


def restore(noted: Sequence[NotedBuffer]) -> None:
    for one in noted:
        one.module._buffers[one.name] = one.buffer
        if may_have_changed(one.buffer, one.version):
            numbers.put(one.buffer, one.value)
