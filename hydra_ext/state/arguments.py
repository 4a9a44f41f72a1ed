"""Arguments of calls: the tensors in them, and copies of them.

Tensors are found in tuples, lists, dictionaries, registered pytrees, mappings and dataclasses, at any depth.
:class:`Arguments` copies objects with their attributes, too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, keystr, tree_flatten_with_path, tree_unflatten

from hydra_ext.state.contents import LEAVES, MAPPING, SEQUENCE, attributes_of, has_attributes, set_attribute, tuple_of
from hydra_ext.state.copies import copied_together, sharing
from hydra_ext.state.foreign import is_foreign
from hydra_ext.state.randomness import way_of
from hydra_ext.tracing import not_traced


# ---- tensors --------------------------------------------------------------------------------------------------------
@not_traced
def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, in order. Attributes of other objects are not searched."""
    if isinstance(value, Tensor):
        yield value
    else:
        for member in _members(value):
            yield from tensors_in(member)


@not_traced
def _members(value: Any) -> Iterable[Any]:
    if type(value) in LEAVES:
        return ()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, deque)):
        return value
    if type(value) in SUPPORTED_NODES:
        return SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    return (opened(value) or {}).values()


@not_traced
def opened(leaf: Any) -> dict[Any, Any] | None:
    """The items of a mapping or dataclass that is not a pytree, such as a tokenizer's ``BatchEncoding``.

    Returns them by key or field name; None for any other object.
    """
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {
            field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)
        }
    return None


def closed(leaf: Any, content: dict[Any, Any]) -> Any:
    """A shallow copy of an opened object with other values for the same keys; an immutable mapping itself."""
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return leaf
    other = copy.copy(leaf)
    for key, value in content.items():
        if isinstance(leaf, Mapping):
            other[key] = value
        else:
            object.__setattr__(other, key, value)  # a dataclass may be frozen
    return other


def own_copy(
    value: Any, noted: Callable[[Tensor, str], None] | None = None, *, only: Collection[int] | None = None
) -> Any:
    """A copy of a value whose tensors have memory of their own, laid out alike.

    A tensor that occurs several times is one tensor in the copy, too. Tensors that share memory share it in the copy.

    Args:
        noted: Called with each copied tensor and its place.
        only: Identities of the tensors to copy; tensors that share memory with them are copied, too. None copies all.
    """
    # A rehearsal, which gives `noted`, has to see a write to all of a tensor as one to its whole storage. So no bytes
    # may lie before the first element.
    aligned = noted is None
    copies: dict[int, Tensor] = {}
    for group in sharing(tensor for _, tensor in named_tensors(value)):
        if only is None or any(id(tensor) in only for tensor in group):
            for tensor, made in zip(group, copied_together(group, aligned=aligned), strict=True):
                copies[id(tensor)] = made.requires_grad_(tensor.requires_grad)

    def own(value: Any, above: str) -> Any:
        leaves, tree = tree_flatten_with_path(value)
        return tree_unflatten([own_leaf(leaf, above + keystr(path)) for path, leaf in leaves], tree)

    def own_leaf(leaf: Any, place: str) -> Any:
        content = None if isinstance(leaf, Tensor) else opened(leaf)
        if content is not None:
            return closed(leaf, {key: own(held, f"{place}[{key!r}]") for key, held in content.items()})
        if not isinstance(leaf, Tensor) or id(leaf) not in copies:
            return leaf
        if noted is not None:
            noted(copies[id(leaf)], place)
        return copies[id(leaf)]

    return own(value, "")


def named_tensors(value: Any, above: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, each with its place as :func:`own_copy` names it."""
    for path, leaf in tree_flatten_with_path(value)[0]:
        place = above + keystr(path)
        if isinstance(leaf, Tensor):
            yield place, leaf
        else:
            for key, held in (opened(leaf) or {}).items():
                yield from named_tensors(held, f"{place}[{key!r}]")


# ---- copies with containers and objects -----------------------------------------------------------------------------
class _Place:
    """Stands for a tensor of the original value, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Arguments:
    """A value without its tensors, with copies of its containers and objects, at any depth.

    The copies share modules, classes, functions, objects of libraries such as locks and handles, and objects that
    cannot be copied.

    Attributes:
        tensors: Tensors of the value, each once. The caller may take them.
        sources: Generators of random numbers in the value, which are shared.
    """

    @not_traced
    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self.sources: list[Any] = []
        found: dict[int, _Place] = {}

        def place(part: Any) -> Any:
            if not isinstance(part, Tensor):
                if way_of(type(part)) is not None:
                    self.sources.append(part)
                return part
            if id(part) not in found:
                found[id(part)] = _Place(len(self.tensors))
                self.tensors.append(part)
            return found[id(part)]

        self._value = _copy(value, place, {})

    @not_traced
    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """A copy of the value with these tensors in their places."""
        return _copy(self._value, lambda part: tensors[part.number] if isinstance(part, _Place) else part, {})


@not_traced
def _copy(value: Any, shared: Callable[[Any], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """A deep copy. ``shared`` gives what takes the place of an object that is not copied."""
    if _is_shared(value):
        if type(value) in SUPPORTED_NODES:
            node = SUPPORTED_NODES[type(value)]
            members, context = node.flatten_fn(value)
            return node.unflatten_fn([_copy(part, shared, known) for part in members], context)
        return shared(value)
    if id(value) in known:
        return known[id(value)][0]
    if isinstance(value, tuple):
        return tuple_of(value, [_copy(part, shared, known) for part in value])
    made = _shallow_copy(value)
    known[id(value)] = (made, value)  # the original is held so that no other object gets its identity
    if made is value:
        return value
    if isinstance(value, (list, deque)):
        SEQUENCE.put(made, [_copy(part, shared, known) for part in made])
    elif isinstance(value, dict):
        MAPPING.put(made, {key: _copy(part, shared, known) for key, part in dict.items(made)})
    for name, part in attributes_of(made).items():
        set_attribute(made, name, _copy(part, shared, known))
    return made


@not_traced
def _shallow_copy(value: Any) -> Any:
    """A shallow copy; the object itself if its class cannot be copied.

    Sharing is safe: if it makes a repetition differ from the first call, the comparison of the two finds that.
    """
    try:
        made = copy.copy(value)
    except (TypeError, ValueError, AttributeError, RuntimeError, copy.Error):
        return value
    return made if type(made) is type(value) else value


@not_traced
def _is_shared(value: Any) -> bool:
    if isinstance(value, (list, dict, set, tuple, deque)):
        return False
    kind = type(value)
    if kind in LEAVES or isinstance(value, (Tensor, _Place, type, ModuleType)) or callable(value):
        return True
    return not has_attributes(kind) or is_foreign(kind) or way_of(kind) is not None
