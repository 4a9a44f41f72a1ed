"""A tensor as it was at one moment, with its numbers on the host, so that it can be restored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hydra_ext import _C
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
