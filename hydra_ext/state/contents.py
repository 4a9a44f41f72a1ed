"""The content of single objects: how to save it, restore it in place, and compare it.

Kinds cover containers, attributes, data of classes, numpy arrays, sources of random numbers, and iterators.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hydra_ext.state.foreign import for_each_class, is_foreign, is_of_library
from hydra_ext.state.iterators import is_iterator, parts, position
from hydra_ext.state.randomness import is_of_process, way_of

# Types whose objects hold nothing that can change.
LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
OF_EVERY_MODULE = frozenset(nn.Module().__dict__)  # names of the attributes that nn.Module itself sets
_CODE = {FunctionType, classmethod, staticmethod, property, MemberDescriptorType, GetSetDescriptorType, cached_property}
_COMPARED = 1 << 24  # bytes of the largest array that is compared


@dataclass(frozen=True, eq=False)
class Kind:
    """How to handle the content of one kind of object.

    Attributes:
        save: Returns the content that an object holds now.
        put: Makes an object hold saved content again; writes nothing to a container that holds it already.
        members: The objects in saved content, which may have content of their own.
        mapped: Saved content with a function applied to each member.
    """

    save: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    members: Callable[[Any], Iterable[Any]]
    mapped: Callable[[Any, Callable[[Any], Any]], Any]


def kinds_of(value: Any) -> tuple[Kind, ...]:
    """The kinds of an object's content. A subclass of a container may have two.

    Empty for tensors, and for objects that hold nothing or nothing that can change.
    """
    found = _kinds_of(type(value))
    if found is _CLASSES:
        return () if is_foreign(value) else found
    return found if found not in (_ARRAYS, _SOURCES) or has_state(value) else ()


@for_each_class
def _kinds_of(kind: type) -> tuple[Kind, ...]:
    if issubclass(kind, Tensor) or kind in LEAVES:
        return ()
    if issubclass(kind, type):
        return _CLASSES
    if issubclass(kind, nn.Module):
        return (ATTRIBUTES,)
    if issubclass(kind, np.ndarray):
        return _ARRAYS
    if way_of(kind) is not None:
        return _SOURCES
    for content, kinds in ((MAPPING, dict), (SEQUENCE, (list, deque)), (SET, set), (FIXED, (tuple, frozenset))):
        if issubclass(kind, kinds):
            return (content,) if is_of_library(kind) or not has_attributes(kind) else (content, ATTRIBUTES)
    if is_iterator(kind):
        return (ITERATOR,)
    return (ATTRIBUTES,) if not is_foreign(kind) and has_attributes(kind) else ()


def is_source(value: Any) -> bool:
    return _kinds_of(type(value)) is _SOURCES


def has_state(value: Any) -> bool:
    """Whether it is a writable array, or a source of random numbers.

    The process's global sources do not count, as every microbatch seeds them anew.
    """
    if _kinds_of(type(value)) not in (_ARRAYS, _SOURCES):
        return False
    if isinstance(value, np.ndarray):
        return value.flags.writeable
    return not is_of_process(value)


def comparable(value: Any) -> Any:
    """The content of an array or a source in a form for ``==``; None if it is not compared."""
    if not has_state(value):
        return None
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.nbytes > _COMPARED:
            return None
        return (value.shape, value.dtype.str, value.tobytes())
    return _compared(SOURCE.save(value))


# ---- containers -----------------------------------------------------------------------------------------------------
def _set_dict(held: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Uses the built-in classes' methods: a user's subclass may do more in its own."""
    is_same = len(held) == len(content) and all(map(operator.is_, held.values(), content.values()))
    if is_same and all(map(operator.is_, held, content)):
        return
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    kind.clear(held)
    for key, value in content.items():
        kind.__setitem__(held, key, value)


def _set_list(held: Any, content: list[Any]) -> None:
    if len(held) == len(content) and all(map(operator.is_, held, content)):
        return
    kind: Any = list if isinstance(held, list) else deque
    kind.clear(held)
    kind.extend(held, content)


def _set_set(held: set[Any], content: set[Any]) -> None:
    if held != content:
        set.clear(held)
        set.update(held, content)


MAPPING = Kind(
    dict, _set_dict, lambda saved: saved.values(), lambda saved, to: {key: to(each) for key, each in saved.items()}
)
SEQUENCE = Kind(list, _set_list, lambda saved: saved, lambda saved, to: [to(each) for each in saved])
SET = Kind(set, _set_set, lambda saved: saved, lambda saved, to: {to(each) for each in saved})
FIXED = Kind(lambda value: value, lambda value, saved: None, lambda saved: saved, lambda saved, to: saved)


def mapped_tuple(value: Any, to: Callable[[Any], Any]) -> Any:
    """The tuple with a function applied to each member; the same object if no member changes."""
    return tuple_of(value, [to(each) for each in value])


def tuple_of(original: Any, members: list[Any]) -> Any:
    """A tuple of the same class with these members; the original if they are its own members."""
    if all(map(operator.is_, members, original)):
        return original
    kind: Any = type(original)
    if hasattr(kind, "n_sequence_fields"):  # a struct sequence, as C functions return
        return kind(members)
    made = tuple.__new__(kind, members)  # the constructor of a user's class may take other arguments
    if hasattr(original, "__dict__"):
        made.__dict__.update(original.__dict__)
    return made


# ---- attributes -----------------------------------------------------------------------------------------------------
@for_each_class
def _slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    return {
        name: descriptor
        for base in reversed(kind.__mro__)
        if "__slots__" in base.__dict__
        for name, descriptor in base.__dict__.items()
        if isinstance(descriptor, MemberDescriptorType)
    }


def has_attributes(kind: type) -> bool:
    return getattr(kind, "__dictoffset__", 0) != 0 or bool(_slots_of(kind))


def attributes_of(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", ()))
    for name, descriptor in _slots_of(type(value)).items():
        with suppress(AttributeError):  # the slot is not set
            found[name] = descriptor.__get__(value)
    return found


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute, bypassing the ``__setattr__`` of the owner's class."""
    if isinstance(owner, type):
        type.__setattr__(owner, name, value)
        return
    descriptor = _slots_of(type(owner)).get(name)
    if descriptor is None:
        owner.__dict__[name] = value
    else:
        descriptor.__set__(owner, value)


def remove_attribute(owner: Any, name: str) -> None:
    if isinstance(owner, type):
        type.__delattr__(owner, name)
        return
    descriptor = _slots_of(type(owner)).get(name)
    if descriptor is None:
        del owner.__dict__[name]
    else:
        descriptor.__delete__(owner)


def _set_attributes(owner: Any, content: dict[str, Any]) -> None:
    is_class = isinstance(owner, type)
    if not is_class and not _slots_of(type(owner)):
        _set_dict(owner.__dict__, content)
        return
    there = data_of(owner) if is_class else attributes_of(owner)
    for name in there.keys() - content.keys():
        remove_attribute(owner, name)
    for name, value in content.items():
        if name not in there or there[name] is not value:
            set_attribute(owner, name, value)


def data_of(kind: type) -> dict[str, Any]:
    """The attributes of a class without methods, properties, special names and descriptors of hydra_ext."""
    return {
        name: value
        for name, value in vars(kind).items()
        if type(value) not in _CODE and not (name.startswith("__") and name.endswith("__")) and not _is_ours(value)
    }


def _is_ours(value: Any) -> bool:
    """Whether it is a descriptor of hydra_ext, which may be installed and removed at any time."""
    return str(type(value).__module__).startswith("hydra_ext.")


def _members_of_class(saved: dict[str, Any]) -> list[Any]:
    return [value for value in saved.values() if not is_iterator(type(value))]


@for_each_class
def classes_of(kind: type) -> tuple[type, ...]:
    """The user's own classes among a class and its bases."""
    return tuple(base for base in kind.__mro__ if not is_foreign(base))


# The position of a class's iterator, such as one that numbers objects, is not part of its state.
CLASS = Kind(data_of, _set_attributes, _members_of_class, MAPPING.mapped)
ATTRIBUTES = Kind(attributes_of, _set_attributes, MAPPING.members, MAPPING.mapped)


def walk(roots: Iterable[Any], take: Callable[[Any, Kind], Iterable[Any]], apart: Iterable[Any] = ()) -> None:
    """Visits each of these objects and their contents once, at any depth.

    The users' classes of objects with attributes are visited, too.

    Args:
        take: Called with an object and each of its kinds; returns the object's members. It has to keep the object
            alive, so that an identity means one object.
        apart: Objects that are left out, and with them all that only they lead to.
    """
    seen = {*map(id, apart)}
    classes: set[type] = set()
    rest = list(roots)
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for kind in kinds_of(value):
            if kind is ATTRIBUTES and type(value) not in classes:
                classes.add(type(value))
                rest += classes_of(type(value))
            rest += take(value, kind)


# ---- arrays and sources of random numbers ---------------------------------------------------------------------------
def _set_array(held: np.ndarray[Any, Any], content: np.ndarray[Any, Any]) -> None:
    if held.shape != content.shape:
        held.resize(content.shape, refcheck=False)
    np.copyto(held, content)


def stamp_of_array(saved: np.ndarray[Any, Any]) -> Any:
    """A stamp of saved content. Two stamps of one array are equal if nothing was written to it between them."""
    if saved.dtype.hasobject:
        return (saved.shape, *map(id, saved.flat))
    content: Any = saved.reshape(-1).view(np.uint8)
    return (saved.shape, saved.dtype.str, memoryview(content))


def _members_of_array(saved: np.ndarray[Any, Any]) -> Iterable[Any]:
    return saved.flat if saved.dtype == object else ()


def _is_another_array(held: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> bool:
    if held.shape != saved.shape or held.dtype != saved.dtype:
        return True
    if held.dtype.hasobject:
        return not all(map(operator.is_, held.flat, saved.flat))
    return not np.array_equal(_bytes_of(held), _bytes_of(saved))


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


ARRAY = Kind(lambda value: np.array(value), _set_array, _members_of_array, lambda saved, to: saved)


def _save_source(source: Any) -> Any:
    way = way_of(type(source))
    return way[0](source) if way is not None else None


def _set_source(source: Any, state: Any) -> None:
    way = way_of(type(source))
    if way is not None:
        way[1](source, state)


def _compared(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _compared(each)) for name, each in state.items())
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state


SOURCE = Kind(_save_source, _set_source, lambda saved: (), lambda saved, to: saved)
ITERATOR = Kind(position, lambda iterator, saved: None, parts, lambda saved, to: saved)
_ARRAYS, _SOURCES, _CLASSES = (ARRAY,), (SOURCE,), (CLASS,)


def has_changed(kind: Kind, held: Any, saved: Any) -> bool:
    """Whether an object's content differs from what was saved. Members are compared by identity."""
    if kind is FIXED:
        return False
    if kind is ARRAY:
        return _is_another_array(held, saved)
    now = kind.save(held)
    if kind is ITERATOR:
        return bool(now != saved)
    if kind is SOURCE:
        return bool(_compared(now) != _compared(saved))
    if len(now) != len(saved):
        return True
    if kind is SET:
        return {*map(id, now)} != {*map(id, saved)}
    if kind is SEQUENCE:
        return not all(map(operator.is_, now, saved))
    return not (all(map(operator.is_, now, saved)) and all(map(operator.is_, now.values(), saved.values())))
