"""Notes of tensors and buffers, with their numbers on the host, to restore them when a round is undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.runtime import engine
from hydra_ext.state import numbers
from hydra_ext.state.memory import WeakPlace
from hydra_ext.state.numbers import has_plain_numbers, is_small, may_have_changed, version_of


@dataclass(frozen=True)
class NotedTensor:
    """A tensor's version, place and numbers.

    Its memory is not kept alive: code that gives a tensor new memory in each forward relies on the old one being freed.

    Attributes:
        value: The numbers on the host; None if only the version and the place were noted.
    """

    tensor: Tensor
    version: int
    place: WeakPlace
    value: Tensor | None

    @staticmethod
    def of(tensor: Tensor) -> NotedTensor:
        return NotedTensor(tensor, version_of(tensor), WeakPlace.of(tensor), numbers.on_host(tensor))

    @staticmethod
    def without_numbers(tensor: Tensor) -> NotedTensor:
        return NotedTensor(tensor, version_of(tensor), WeakPlace.of(tensor), None)

    def differs(self) -> bool:
        """Whether it has other numbers, or lies elsewhere. Of large tensors and odd ones the version tells."""
        if not self.place.is_of(self.tensor):
            return True
        if self.value is None:
            return version_of(self.tensor) != self.version
        return may_have_changed(self.tensor, self.version) and numbers.differ(self.tensor, self.value)

    def is_written(self) -> bool:
        """Whether it was written to, perhaps with the same numbers, as far as the version or small numbers tell."""
        return version_of(self.tensor) != self.version or self.differs()

    def restore(self) -> None:
        with _C.Uncharged():
            self.place.take(self.tensor)
        # A write through `.data` changes no version, so plain numbers are compared.
        known = has_plain_numbers(self.tensor) or version_of(self.tensor) != self.version
        if self.value is not None and known:
            numbers.put(self.tensor, self.value)


class LatestCopies:
    """Notes of tensors. The copy of a large tensor is used again if its numbers are the same by their digest.

    A version does not tell: writes through ``.data`` leave it as it is. Reading a tensor where it lies is faster than a
    copy to the host, and needs no memory.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[NotedTensor, _C.SavedDigest | None]] = {}
        self._found: dict[int, tuple[NotedTensor, _C.SavedDigest | None]] = {}

    def begin(self) -> None:
        """Begins a pass. Copies of tensors that it does not note are dropped in the next one."""
        self._latest, self._found = self._found, {}

    def note(self, tensor: Tensor) -> NotedTensor:
        if is_small(tensor):
            return NotedTensor.of(tensor)
        digest = _digest(tensor)
        before, its_digest = self._latest.get(id(tensor), (None, None))
        noted = None
        if before is not None and before.tensor is tensor and before.value is not None:
            if digest is None or its_digest is None:
                same = before.version == version_of(tensor)
            else:
                same = its_digest.equals(digest)
            if same:
                noted = NotedTensor(tensor, version_of(tensor), WeakPlace.of(tensor), before.value)
        noted = noted or NotedTensor.of(tensor)
        self._found[id(tensor)] = noted, digest
        return noted


def _digest(tensor: Tensor) -> _C.SavedDigest | None:
    """A digest of plain numbers; None for others."""
    digest = _C.SavedDigest([])
    # A row of bytes would count as a library's private data.
    return digest if has_plain_numbers(tensor) and digest.add(tensor.detach().unsqueeze(0)) else None


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
            for name, buffer in _buffers_of(module)
        ]


def note(modules: Iterable[nn.Module]) -> list[NotedBuffer]:
    """Notes the buffers of these modules, without those of modules inside them."""
    return [
        NotedBuffer(module, name, NotedTensor.of(buffer)) for module in modules for name, buffer in _buffers_of(module)
    ]


def _buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of one module, without paged ones: the core notes writes to these as to parameters."""
    for name, buffer in module._buffers.items():
        if buffer is not None and not _C.is_face(buffer) and not engine.holds(buffer):
            yield name, buffer


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
