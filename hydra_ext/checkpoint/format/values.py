"""Encodes Python values as JSON, and decodes them with the same bits and types: options, counters, tensors in them.

A value that JSON lacks becomes a table with the key ``"$"``, which names its kind. Decoding calls and imports nothing
by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hydra_ext.checkpoint.format import strict_json
from hydra_ext.checkpoint.format.tensors import Entry
from hydra_ext.errors import UnsupportedState

_TAG = "$"
_DEEPEST = 50
_FLOATS = ("inf", "-inf", "nan")


class BadValue(ValueError):
    """A saved value cannot be decoded or used; the message says why."""


class Encoder:
    """Turns values into JSON.

    Attributes:
        entries: Tensors that were found, each named by its place.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def encode(self, value: object, place: str) -> Any:
        """The value as JSON.

        Args:
            place: Name of the value in messages, and prefix for the names of tensors inside it.

        Raises:
            UnsupportedState: The value is, or contains, an object that no checkpoint can hold.
        """
        return self._encode(value, place, 0)

    def _encode(self, value: object, place: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise UnsupportedState(f"'{place}' is nested too deeply")
        if isinstance(value, Tensor):
            if getattr(type(value), "stands_for", type(value)) not in (Tensor, torch.nn.Parameter):
                raise UnsupportedState(f"'{place}' is a {type(value).__name__}: make it a plain torch.Tensor")
            self.entries.append(Entry.of(place, value))
            return {_TAG: "tensor", "name": place}
        if isinstance(value, torch.dtype):
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_TAG: "float", "name": repr(float(value))}
        if isinstance(value, (list, tuple)):
            items = [self._encode(each, f"{place}/{i}", depth + 1) for i, each in enumerate(value)]
            if type(value) not in (list, tuple):
                raise UnsupportedState(
                    f"'{place}' is a {type(value).__name__}, which no checkpoint can hold: make it a list or a tuple"
                )
            return items if type(value) is list else {_TAG: "tuple", "items": items}
        if type(value) in (dict, Counter):
            return self._table(value, place, depth)  # type: ignore[arg-type]
        reason = strict_json.why_not(value, f"'{place}'")
        if reason:
            raise UnsupportedState(f"{reason}: a checkpoint holds numbers, texts, tensors, and lists and dicts of them")
        return value

    def _table(self, value: dict[Any, Any], place: str, depth: int) -> Any:
        items = [
            (self._encode(key, f"{place}/key", depth + 1), self._encode(each, f"{place}/{key}", depth + 1))
            for key, each in value.items()
        ]
        if type(value) is Counter:
            return {_TAG: "counter", "items": [list(item) for item in items]}
        if any(type(key) is not str for key in value) or _TAG in value:
            return {_TAG: "dict", "items": [list(item) for item in items]}
        return dict(items)


def decode(value: Any, fetch: Callable[[str], Tensor], place: str | None = None) -> Any:
    """The value that :class:`Encoder` has encoded.

    Args:
        fetch: Returns a tensor by its name; raises KeyError if there is no such tensor.
        place: Place that was given to the encoder; tensors must have the names that follow from it. None checks no
            names.

    Raises:
        BadValue: The value is not one that an encoder writes.
    """
    return _Decoder(fetch).decode(value, place, 0)


class _Decoder:
    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        self._fetch = fetch

    def decode(self, value: Any, place: str | None, depth: int) -> Any:
        if depth > 2 * _DEEPEST:
            raise BadValue("a value is nested too deeply")
        if isinstance(value, list):
            return self._items(value, place, depth)
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {key: self.decode(each, _inside(place, key), depth + 1) for key, each in value.items()}
        kind, name, items = value[_TAG], value.get("name"), value.get("items")
        if kind == "tensor" and isinstance(name, str):
            return self._tensor(name, place)
        if kind == "dtype" and isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if kind == "float" and name in _FLOATS:
            return float(name)
        if kind == "tuple" and isinstance(items, list):
            return tuple(self._items(items, place, depth))
        if kind in ("dict", "counter") and isinstance(items, list):
            pairs = self._pairs(items, place, depth)
            return pairs if kind == "dict" else Counter(pairs)
        raise BadValue(f"{repr(value)[:80]} is not an encoded value of a known kind")

    def _tensor(self, name: str, place: str | None) -> Tensor:
        if place is not None and name != place:
            raise BadValue(f"{place!r:.200} stands for the tensor {name!r:.200}, which belongs elsewhere")
        try:
            return self._fetch(name)
        except KeyError as error:
            raise BadValue(f"there is no tensor {name!r:.200}") from error

    def _items(self, items: list[Any], place: str | None, depth: int) -> list[Any]:
        return [self.decode(each, _inside(place, number), depth + 1) for number, each in enumerate(items)]

    def _pairs(self, items: list[Any], place: str | None, depth: int) -> dict[Any, Any]:
        found = {}
        try:
            for key, each in items:
                own = self.decode(key, _inside(place, "key"), depth + 1)
                found[own] = self.decode(each, _inside(place, own), depth + 1)
        except BadValue:
            raise
        except (TypeError, ValueError) as error:  # the items are not pairs, or a key is not hashable
            raise BadValue(f"{repr(items)[:80]} is not a list of keys and values") from error
        return found


def _inside(place: str | None, key: object) -> str | None:
    return None if place is None else f"{place}/{key}"
