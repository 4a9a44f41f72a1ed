"""Notes of buffers, to restore them when a round is undone and to detect writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.runtime.rounds.undoing.noted_tensor import LatestCopies, NotedTensor
from hydra_ext.state import numbers
from hydra_ext.state.numbers import has_plain_numbers


@dataclass(frozen=True)
class NotedBuffer:
    module: nn.Module
    name: str
    noted: NotedTensor

    @property
    def buffer(self) -> Tensor:
        return self.noted.tensor


class ModelBuffers:
    """Host copies of all buffers of models."""

    def __init__(self) -> None:
        self._copies = LatestCopies()

    def note(self, models: Sequence[nn.Module]) -> Sequence[NotedBuffer]:
        """Notes all buffers as they are now."""
        _C.suspend_charging()
        self._copies.begin()
        return [
            NotedBuffer(module, name, self._copies.note(buffer))
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]


def note(modules: Iterable[nn.Module]) -> list[NotedBuffer]:
    """Notes the buffers of these modules, without those of modules inside them."""
    return [
        NotedBuffer(module, name, NotedTensor.of(buffer))
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def differs(one: NotedBuffer) -> bool:
    """Whether the buffer was replaced, or has other numbers than noted."""
    return one.module._buffers.get(one.name) is not one.buffer or one.noted.differs()


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
    then, now = old.noted.value, new.noted.value
    if then is None or now is None or not has_plain_numbers(new.buffer):
        return old.noted.version != new.noted.version
    return then is not now and (then.shape != now.shape or numbers.differ(then, now))


def restore(noted: Sequence[NotedBuffer]) -> None:
    for one in noted:
        one.module._buffers[one.name] = one.buffer
        one.noted.restore()
