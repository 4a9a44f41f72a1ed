"""What a rehearsal knows about tensors: by their memory, so that it holds for views too, and by the object itself.

Nothing is kept alive: an address is not used again while a weak reference is held to what was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_ext.split.rehearsal.record import Key
from hydra_ext.split.stages.tensors import storage_key

Root = tuple[str, str]  # "parameter", "buffer" or "input", and its name


@dataclass
class Note:
    """About one piece of memory.

    Attributes:
        event: that made it, until the event has handed it out; None for what no event made or wrote.
        tainted: it depends on what an event computed.
        roots: the parameters, buffers and inputs that it was made from, or is.
        values: that lie in it.
        writes: steps at which it was changed in place.
        foreign: it was there before.
        made: step at which it was first seen.
    """

    event: int | None = None
    tainted: bool = False
    roots: frozenset[Root] = frozenset()
    values: list[Key] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    foreign: bool = False
    made: int = 0

    @property
    def state(self) -> set[Root]:
        """The parameter or buffer that this memory is, not what it was computed from."""
        return {root for root in self.roots if root[0] != "input"} if self.foreign else set()


@dataclass(frozen=True)
class MemoryOf:
    """A piece of memory, which this does not keep alive."""

    key: int
    reference: StorageWeakRef


_Content = TypeVar("_Content")


class ByStorage(Generic[_Content]):
    """A mapping from tensors' memory."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef | Tensor, _Content]] = {}

    def get(self, tensor: Tensor) -> _Content | None:
        entry = self._entries.get(storage_key(tensor))
        return entry[1] if entry is not None else None

    def at(self, key: int) -> _Content | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None else None

    def put(self, tensor: Tensor, content: _Content) -> _Content:
        try:
            holder: StorageWeakRef | Tensor = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except RuntimeError:  # it has no storage
            holder = tensor
        self._entries[storage_key(tensor)] = (holder, content)
        return content

    def contents(self) -> Iterator[_Content]:
        return (content for _, content in self._entries.values())

    def alive(self) -> Iterator[tuple[MemoryOf, _Content]]:
        """Memory that is held, but for tensors without storage."""
        self.purge()
        for key, (holder, content) in list(self._entries.items()):
            if isinstance(holder, StorageWeakRef):
                yield MemoryOf(key, holder), content

    def put_at(self, memory: MemoryOf, content: _Content) -> None:
        self._entries[memory.key] = (memory.reference, content)

    def purge(self) -> None:
        """Forgets memory that is held no more."""
        gone = [
            key
            for key, (holder, _) in self._entries.items()
            if isinstance(holder, StorageWeakRef) and holder.expired()  # type: ignore[no-untyped-call]
        ]
        for key in gone:
            del self._entries[key]


class Undo:
    """Memory from before the rehearsal that it has changed."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before_write(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._saved or tensor.is_meta or key == id(tensor):
            return
        storage = tensor.untyped_storage()
        self._saved[key] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        """It is as before, and what it was is still known."""
        for storage, saved in self._saved.values():
            storage.copy_(saved)

    def restore(self) -> None:
        self.put_back()
        self._saved.clear()
