"""Tensors by their memory: mappings by storage, the bytes from before a write, and memory that outlasts a forward.

A mapping does not keep storages alive. Its weak reference keeps a storage's address from being used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from hydra_ext.state.layout import copied
from hydra_ext.state.snapshot import Snapshot


def storage_key(tensor: Tensor) -> int:
    """A key that is equal for tensors that share a storage. A tensor without a storage has a key of its own."""
    try:
        key: int = tensor.untyped_storage()._cdata
        return key
    except RuntimeError:  # it has no storage
        return id(tensor)


def moves_by_rows(tensor: Tensor) -> bool:
    """Whether it stands in a module for a table of which only rows are on the device, and so has no memory."""
    return getattr(type(tensor), "moves_by_rows", False)


def weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A weak reference. While it exists, no other storage gets the same address."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class MemoryOf:
    """A storage by its key, held by a weak reference."""

    key: int
    reference: StorageWeakRef


_Content = TypeVar("_Content")


class ByStorage(Generic[_Content]):
    """A mapping from storages of tensors. It keeps alive only tensors without a storage."""

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
            holder: StorageWeakRef | Tensor = weak(tensor.untyped_storage())
        except RuntimeError:  # it has no storage
            holder = tensor
        self._entries[storage_key(tensor)] = (holder, content)
        return content

    def contents(self) -> Iterator[_Content]:
        return (content for _, content in self._entries.values())

    def alive(self) -> Iterator[tuple[MemoryOf, _Content]]:
        """Entries whose storage is alive; tensors without a storage are left out."""
        self.purge()
        for key, (holder, content) in list(self._entries.items()):
            if isinstance(holder, StorageWeakRef):
                yield MemoryOf(key, holder), content

    def put_at(self, memory: MemoryOf, content: _Content) -> None:
        self._entries[memory.key] = (memory.reference, content)

    def purge(self) -> None:
        """Drops entries whose storage has been freed."""
        gone = [
            key for key, (holder, _) in self._entries.items() if isinstance(holder, StorageWeakRef) and is_gone(holder)
        ]
        for key in gone:
            del self._entries[key]


class Places:
    """The memory that tensors lie in at one moment, and how, so that they can be put back there.

    An assignment to ``.data``, ``set_()`` and ``resize_()`` change that. Numbers are not copied.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._placed = [(tensor, tensor.detach()) for tensor in tensors if _has_place(tensor)]

    def restore(self) -> None:
        for tensor, same in self._placed:
            if _place_of(tensor) != _place_of(same):
                tensor.data = same


@dataclass(frozen=True)
class WeakPlace:
    """The memory that a tensor lies in at one moment, and how. It does not keep the memory alive.

    Attributes:
        memory: Weak reference to the storage.
        where: Storage, offset, sizes and strides; empty for a tensor without such memory.
    """

    memory: StorageWeakRef | None
    where: tuple[Any, ...]

    @staticmethod
    def of(tensor: Tensor) -> WeakPlace:
        if not _has_place(tensor) or storage_key(tensor) == id(tensor):
            return WeakPlace(None, ())
        return WeakPlace(weak(tensor.untyped_storage()), _place_of(tensor))

    def is_of(self, tensor: Tensor) -> bool:
        return not self.where or self.where == _place_of(tensor)

    def take(self, tensor: Tensor) -> None:
        """Puts a tensor that is elsewhere back. If the memory is gone, it gets other memory without its numbers."""
        if self.is_of(tensor) or self.memory is None:
            return
        _, offset, size, stride = self.where
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            tensor.data = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
        else:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage, offset, size, stride)


def _has_place(tensor: Tensor) -> bool:
    return not moves_by_rows(tensor) and tensor.layout is torch.strided and not tensor.is_nested and not is_lazy(tensor)


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    return storage_key(tensor), tensor.storage_offset(), tensor.size(), tensor.stride()


class Undo:
    """Copies of storages from before the first write to each."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before_write(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._saved or tensor.is_meta or key == id(tensor):
            return
        storage = tensor.untyped_storage()
        self._saved[key] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        """Restores the bytes, and keeps the copies."""
        for storage, saved in self._saved.values():
            if storage.nbytes() != saved.nbytes():  # the run has called resize_()
                storage.resize_(saved.nbytes())
            storage.copy_(saved)

    def restore(self) -> None:
        """Restores the bytes, and drops the copies."""
        self.put_back()
        self._saved.clear()


class LastingMemory:
    """The memory of all tensors that modules or other objects hold, at any depth. The next microbatch may write to it.

    Make it when a forward has ended.
    """

    def __init__(self, *holders: Any) -> None:
        self._keys = set(map(storage_key, Snapshot(*holders).tensors))

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor without a graph; a copy if its memory is lasting."""
        return copied(tensor) if storage_key(tensor) in self._keys else tensor.detach()
