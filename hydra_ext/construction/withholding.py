"""Runs a model's constructor with the memory of one parameter.

While a :class:`Withholding` is active, a parameter that is not *kept* loses its memory as soon as an operation touches
another parameter. It gets memory again, with arbitrary contents, when an operation needs it. Every operation runs on
real memory. So initialisers of any kind (rejection loops, QR, masks) see the numbers that they made, and the random
numbers are those of the ordinary constructor. Only numbers that are read *after* another parameter was touched are
lost.

Such reads are noticed. Numbers that were computed from lost ones are *unknown*, and so are numbers computed from
these. In a parameter that is not asked for, unknown numbers do no harm. If they would decide a branch, a shape, a
buffer or a kept parameter, :class:`Missing` names the parameters that have to be kept, and the constructor is run
again with these.

Memory is tracked by storage, so that views, ``.data`` and parameters made from others are covered. Memory that was
allocated before the run is never freed. Only one thread is watched.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.construction.operations import (
    DECIDING,
    NEW,
    ROOM_ELEMENTS,
    SHAPE_ONLY,
    give_back,
    may_be_given_back,
    only_result,
    operands_of,
    overwrites,
    storage_of,
)
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import is_gone, weak

# Functions that return a tensor's address, or read its memory without an operation.
_RAW = frozenset(
    (
        *(Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage),
        *(Tensor.share_memory_, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__),
    )
)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Missing(BaseException):
    """Lost numbers are needed. Not an Exception, since constructors catch those.

    Attributes:
        parameters: Numbers of the parameters that have to be kept, in the order in which they were made.
    """

    def __init__(self, parameters: Iterable[int]) -> None:
        super().__init__("lost numbers are needed")
        self.parameters = frozenset(parameters)


@dataclass(eq=False)
class Memory:
    """One storage. Parameters are numbered in the order in which they were made.

    Attributes:
        storage: The storage, with its memory or without.
        nbytes: Its size while it has memory.
        parameters: Numbers of the parameters that lie in it.
        withheld: Whether its memory may be freed.
        unknown: Parameters that would have to be kept so that its numbers are right; empty if they are.
    """

    storage: torch.UntypedStorage
    nbytes: int
    parameters: set[int] = field(default_factory=set)
    withheld: bool = False
    unknown: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        return self.storage.nbytes() < self.nbytes


class Withholding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context around one run of the constructor.

    Args:
        kept: Numbers of the parameters that keep their memory.
        draw: Whether to run operations that only write to memory that will be freed. If not, their random numbers are
            not drawn, and an operation that reads such memory, even at once, raises Missing.
    """

    def __init__(self, kept: frozenset[int], *, draw: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[nn.Parameter] = []
        self._number: dict[int, int] = {}  # by id(); `made` keeps the objects alive
        self.missing: set[int] = set()
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._kept = kept
        self._draw = draw
        self._known: dict[int, Memory] = {}
        self._there: list[Memory] = []
        self._born: dict[int, StorageWeakRef] = {}
        self._purge_at = 4096
        self._emptied: list[tuple[StorageWeakRef, int]] = []
        self._contexts = ExitStack()

    def __enter__(self) -> Withholding:
        with ExitStack() as entered:
            entered.enter_context(_CreationWatch(self))
            entered.enter_context(_RawAccess(self))
            super().__enter__()  # type: ignore[no-untyped-call]
            self._contexts = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._contexts.close()

    # ---- for the two other watches, and after the run -------------------------------------------------------------
    def memory(self, tensor: Tensor) -> Memory | None:
        """The tracked memory that ``tensor`` lies in, or None."""
        storage = storage_of(tensor)
        return None if storage is None else self._known.get(storage._cdata)

    def memories(self) -> Iterable[Memory]:
        return self._known.values()

    def was_born(self, storage: torch.UntypedStorage) -> bool:
        """Whether an operation of this run made the storage."""
        known = self._born.get(storage._cdata)
        return known is not None and not is_gone(known)

    def forget(self) -> None:
        """Drops every tensor."""
        self._emptied += [(weak(one.storage), one.nbytes) for one in self._known.values() if one.is_empty]
        self.made.clear()
        self._number.clear()
        self._known.clear()
        self._there.clear()

    def abandon(self) -> None:
        """Drops every tensor. Storages without memory that have another owner get memory with arbitrary contents.

        Code that reads such a tensor (through a traceback, or a list outside the model) must not find a null address.
        """
        self.forget()
        for storage, nbytes in self._emptied:
            held = None if is_gone(storage) else torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if held is not None:
                held.resize_(nbytes)
        self._emptied.clear()

    def note_parameter(self, parameter: nn.Parameter) -> None:
        number = self._number[id(parameter)] = len(self.made)
        self.made.append(parameter)
        self._settle(number, parameter)

    def note_data_set(self, tensor: Tensor, before: Memory | None) -> None:
        """Notes that ``tensor.data`` was assigned to. The tensor lay in ``before``."""
        number = self._number.get(id(tensor))
        if number is None:
            return
        if before is not None and before is not self.memory(tensor):
            before.parameters.discard(number)
            if not before.parameters and not before.unknown:
                self._release(before)
        self._settle(number, self.made[number])

    def note_raw_access(self, tensor: Tensor) -> None:
        """Notes that the tensor's address is known outside: its memory stays from now on."""
        memory = self.memory(tensor)
        if memory is None:
            return
        self._use([memory], reading=[memory])
        if memory.unknown:
            self._miss(memory.unknown)
        memory.withheld = False

    # ---- every operation -----------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None:
            self.generators.setdefault(id(generator), (generator, generator.get_state()))
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.rpartition("::")[2] if hasattr(func, "_schema") else ""
        operands = [] if name in SHAPE_ONLY else list(operands_of(func, args, kwargs))
        known = [(memory, tensor, written) for tensor, written in operands if (memory := self.memory(tensor))]
        if not known:
            if name in NEW and args and math.prod(args[0]) >= ROOM_ELEMENTS:
                self._use([], reading=[])
            result = func(*args, **kwargs)
            self._note_births(func, operands, result)
            return result
        writing = [(memory, tensor) for memory, tensor, written in known if written]
        if not self._draw and (skipped := only_result(func, operands)) is not None and self._lose(writing):
            return skipped
        overwritten = [memory for memory, tensor in writing if overwrites(func, name, tensor, memory.nbytes)]
        reading = [memory for memory, _, written in known if not (written and memory in overwritten)]
        if getattr(func, "is_view", False):
            reading = []
        self._use([memory for memory, _, _ in known], reading=reading)
        sources = set().union(*(memory.unknown for memory in reading))
        if sources and any(tag in getattr(func, "tags", ()) for tag in DECIDING):
            self._miss(sources)
        result = func(*args, **kwargs)
        born = self._note_births(func, operands, result)
        for memory, _ in writing:
            memory.nbytes = max(memory.nbytes, memory.storage.nbytes())  # resize_()
        for memory in overwritten:
            memory.unknown.clear()
        if sources:
            self._spread(sources, [tensor for tensor, written in operands if written], born)
        return result

    def _lose(self, writing: list[tuple[Memory, Tensor]]) -> bool:
        """Marks all written memory as lost, if all of it may be lost. Returns whether it did."""
        if not writing or not all(memory.withheld for memory, _ in writing):
            return False
        for memory, _ in writing:
            memory.unknown |= memory.parameters
        return True

    def _use(self, memories: list[Memory], *, reading: list[Memory]) -> None:
        for memory in [there for there in self._there if there not in memories]:
            if memory.withheld and may_be_given_back(memory.storage):
                give_back(memory.storage)
                memory.unknown |= memory.parameters
            self._there.remove(memory)
        for memory in memories:
            if memory.withheld and memory not in self._there:
                if memory.is_empty:
                    memory.storage.resize_(memory.nbytes)
                    if memory in reading:
                        # Zeros are the same in every run, and never NaN. An operation would be dispatched to us again.
                        ctypes.memset(memory.storage.data_ptr(), 0, memory.nbytes)
                self._there.append(memory)

    def _spread(self, sources: set[int], written: list[Tensor], born: list[torch.UntypedStorage]) -> None:
        """Marks memory that was written or made from unknown numbers as unknown."""
        for storage in born:
            memory = self._know(storage)
            memory.withheld = True
            memory.unknown |= sources
            self._there.append(memory)
        for tensor in written:
            if (changed := storage_of(tensor)) is not None:
                self._know(changed).unknown |= sources

    def _note_births(self, func: Any, operands: list[tuple[Tensor, bool]], result: Any) -> list[torch.UntypedStorage]:
        """Notes and returns the storages that this operation has made."""
        if getattr(func, "is_view", False) and "lift_fresh" not in str(func):
            return []
        before = {storage._cdata for tensor, _ in operands if (storage := storage_of(tensor)) is not None}
        born = []
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and (storage._cdata not in before or "lift_fresh" in str(func)):
                self._born[storage._cdata] = weak(storage)
                born.append(storage)
        if len(self._born) > self._purge_at:
            self._born = {key: known for key, known in self._born.items() if not is_gone(known)}
            self._purge_at = 2 * len(self._born) + 4096
        return born

    def _release(self, memory: Memory) -> None:
        """Stops tracking the memory. It is freed with the last tensor that lies in it."""
        self._known.pop(memory.storage._cdata, None)
        self._there = [there for there in self._there if there is not memory]

    def _know(self, storage: torch.UntypedStorage) -> Memory:
        memory = self._known.get(storage._cdata)
        if memory is None:
            memory = self._known[storage._cdata] = Memory(storage, storage.nbytes())
        return memory

    def _settle(self, number: int, parameter: nn.Parameter) -> None:
        """Tracks the storage that a parameter lies in from now on."""
        storage = storage_of(parameter)
        if (
            storage is None
            or parameter.device.type != "cpu"
            or (storage.nbytes() == 0 and self.memory(parameter) is None)
        ):
            return
        memory = self._know(storage)
        memory.parameters.add(number)
        memory.withheld = not (memory.parameters & self._kept) and self.was_born(storage) and may_be_given_back(storage)
        if not memory.withheld and memory.is_empty:
            memory.storage.resize_(memory.nbytes)
        self._use([memory], reading=[])

    def _miss(self, sources: set[int]) -> None:
        self.missing |= sources
        raise Missing(sources)


class _CreationWatch(AbstractContextManager[None]):
    """Notes every parameter that this thread makes, including deep copies of parameters."""

    def __init__(self, withholding: Withholding) -> None:
        self._withholding = withholding
        self._original = nn.Parameter.__dict__["__new__"]

    def __enter__(self) -> None:
        original, withholding, thread = self._original.__func__, self._withholding, threading.get_ident()

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            parameter = original(cls, *args, **kwargs)
            if threading.get_ident() == thread:
                with torch._C.DisableTorchFunction():
                    withholding.note_parameter(parameter)
            return parameter

        nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]

    def __exit__(self, *error: Any) -> None:
        nn.Parameter.__new__ = self._original  # type: ignore[method-assign]


class _RawAccess(TorchFunctionMode):
    """Notes calls that read or replace a tensor's memory without an operation."""

    def __init__(self, withholding: Withholding) -> None:
        super().__init__()
        self._withholding = withholding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RAW:
            with torch._C.DisableTorchFunction():
                self._withholding.note_raw_access(args[0])
        if func != _SET_DATA:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            before = self._withholding.memory(args[0])
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._withholding.note_data_set(args[0], before)
        return result
