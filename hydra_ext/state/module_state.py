"""What modules hold beside parameters, at one moment: buffers, attributes, and all that attributes lead to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError
from hydra_ext.state.contents import (
    ARRAY,
    ATTRIBUTES,
    CLASS,
    ITERATOR,
    LEAVES,
    MAPPING,
    OF_EVERY_MODULE,
    SET,
    SOURCE,
    Kind,
    comparable,
    mapped_tuple,
    remove_attribute,
    set_attribute,
    stamp_of_array,
    walk,
)
from hydra_ext.state.layout import copied
from hydra_ext.state.numbers import version_of

Place = tuple[int, str, str]  # the identity of an owner; ATTRIBUTE, BUFFER or CONTENT; name of attribute or buffer
ATTRIBUTE, BUFFER, CONTENT, _OWNER = "attribute", "buffer", "content", "owner"

# Forward hooks are state: code that hooks itself in at the first forward notes that in an attribute.
_HOOKS = {name for name in OF_EVERY_MODULE if name.startswith(("_forward_hooks", "_forward_pre_hooks"))}
_OF_TORCH = OF_EVERY_MODULE - {"training"} - _HOOKS


class Entry(NamedTuple):
    """An attribute or buffer, or the content of a container, array or source.

    Attributes:
        owner: Module, object or class with the attribute; or the container, array or source itself.
        value: Value of the attribute or buffer; or the content as its kind has saved it.
        stamp: A value that is equal for two entries of one place if nothing was set or written to between them.
        kind: Kind of the content; None for an attribute or buffer.
    """

    owner: Any
    value: Any
    stamp: Any
    kind: Kind | None = None


class ModuleState:
    """What modules hold at one moment."""

    def __init__(self, roots: Sequence[nn.Module], entries: Mapping[Place, Entry]) -> None:
        self._roots = roots
        self.entries = dict(entries)

    @staticmethod
    def now(roots: Sequence[nn.Module]) -> ModuleState:
        entries: dict[Place, Entry] = {}
        walk(roots, lambda owner, kind: [each for each in _note(owner, kind, entries) if type(each) not in LEAVES])
        return ModuleState(roots, entries)

    def put(self, current: ModuleState | None = None) -> None:
        """Makes the modules hold this state again.

        Args:
            current: Their present state, if the caller has it.
        """
        current = current or ModuleState.now(self._roots)
        for place in current.entries.keys() - self.entries.keys():
            if (place[0], _OWNER, "") in self.entries:
                _remove(current.entries[place].owner, *place[1:])
        for place, entry in self.entries.items():
            there = current.entries.get(place)
            if entry.kind is not None:
                entry.kind.put(entry.owner, entry.kind.mapped(entry.value, _found))
            elif there is None or there.value is not entry.value:
                _set(entry.owner, *place[1:], _found(entry.value))

    def changed_since(self, before: ModuleState) -> list[Place]:
        """Places where something was set, written to, added or removed."""
        places = self.entries.keys() | before.entries.keys()
        mine, other = self.entries.get, before.entries.get
        return [place for place in places if _stamp_of(mine(place)) != _stamp_of(other(place))]

    def take(self, place: Place, other: ModuleState) -> None:
        """Takes the other state's entry of a place. Drops the own one if the other has none."""
        if place in other.entries:
            self.entries[place] = other.entries[place]
        else:
            self.entries.pop(place, None)

    def copied(self, places: Collection[Place] | None = None, *, apart: Callable[[Tensor], bool]) -> ModuleState:
        """This state with copies of the tensors in these places, or in all of them.

        A tensor in several places has one copy.

        Args:
            apart: Whether a tensor is not to be copied.
        """
        copy = Copies(apart)
        return ModuleState(
            self._roots,
            {
                place: copy.of(entry) if places is None or place in places else entry
                for place, entry in self.entries.items()
            },
        )


class Copies:
    """Copies entries, with their tensors.

    Args:
        apart: As for :meth:`ModuleState.copied`.
    """

    def __init__(self, apart: Callable[[Tensor], bool]) -> None:
        self._apart = apart
        self._made: dict[int, tuple[Tensor, Any]] = {}

    def of(self, entry: Entry) -> Entry:
        if entry.kind is not None:
            return Entry(entry.owner, entry.kind.mapped(entry.value, self._copy), entry.stamp, entry.kind)
        value = self._copy(entry.value)
        return entry if value is entry.value else Entry(entry.owner, value, _stamp(value))

    def _copy(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return mapped_tuple(value, self._copy)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or self._apart(value):
            return value
        if id(value) not in self._made:
            made = copied(value) if value.grad_fn is None else _Computed(value)
            if isinstance(made, Tensor):
                made.requires_grad_(value.requires_grad)
            self._made[id(value)] = value, made
        return self._made[id(value)][1]


class _Computed:
    """A tensor with a graph. It holds the numbers, but does not keep the graph alive for a mere comparison."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._data = tensor.detach()

    def tensor(self) -> Tensor:
        """The tensor itself; once it has been freed, an equal one whose backward raises."""
        tensor = self._tensor()
        if tensor is not None:
            return tensor
        with torch.enable_grad():
            made: Tensor = _Forgotten.apply(torch.zeros((), device="cpu", requires_grad=True), [self._data])  # type: ignore[no-untyped-call]
        return made


class _Forgotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, tensors: list[Tensor]) -> Tensor:
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise SplitError(
            "a microbatch's loss depends on the graph of a tensor that another microbatch left on a module, and that "
            "graph has been freed: detach() tensors that are left on modules"
        )


def _note(owner: Any, kind: Kind, entries: dict[Place, Entry]) -> Iterable[Any]:
    """Adds the entries of one object; returns its members, which may have entries of their own."""
    number = id(owner)
    if kind is not ATTRIBUTES and kind is not CLASS:
        saved = kind.save(owner)
        entries[number, CONTENT, ""] = Entry(owner, saved, _stamp_of_content(kind, owner, saved), kind)
        return kind.members(saved)
    entries[number, _OWNER, ""] = Entry(owner, None, True)
    if isinstance(owner, nn.Module):
        for name, buffer in owner._buffers.items():
            entries[number, BUFFER, name] = Entry(owner, buffer, _stamp(buffer))
        if isinstance(owner, torch.jit.ScriptModule):
            return owner.children()
        attributes = {name: value for name, value in kind.save(owner).items() if name not in _OF_TORCH}
    else:
        attributes = kind.save(owner)
    for name, value in attributes.items():
        entries[number, ATTRIBUTE, name] = Entry(owner, value, _stamp(value))
    return [*attributes.values(), *(owner.children() if isinstance(owner, nn.Module) else ())]


def _set(owner: Any, what: str, name: str, value: Any) -> None:
    if what == BUFFER:
        owner._buffers[name] = value
    elif what == ATTRIBUTE:
        set_attribute(owner, name, value)


def _remove(owner: Any, what: str, name: str) -> None:
    if what == BUFFER:
        del owner._buffers[name]
    elif what == ATTRIBUTE:
        remove_attribute(owner, name)


def _stamp(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    return (id(value), *map(_stamp, value)) if isinstance(value, tuple) else id(value)


def _stamp_of_content(kind: Kind, owner: Any, saved: Any) -> Any:
    if kind is ARRAY:
        return stamp_of_array(saved)
    if kind is SOURCE:
        return comparable(owner)
    if kind is ITERATOR:
        return saved
    if not saved:
        return ()
    stamps = [_stamp(member) for member in kind.members(saved)]
    if kind is SET:
        return frozenset(stamps)
    return (*map(id, saved), *stamps) if kind is MAPPING else tuple(stamps)


def _stamp_of(entry: Entry | None) -> Any:
    return entry.stamp if entry is not None else None


def _found(value: Any) -> Any:
    """The saved value with each :class:`_Computed` replaced by its tensor."""
    if isinstance(value, tuple):
        return mapped_tuple(value, _found)
    return value.tensor() if isinstance(value, _Computed) else value
