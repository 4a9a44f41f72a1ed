"""Mappings and dataclasses in a microbatch that torch does not look into (a tokenizer's ``BatchEncoding``)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any


def opened(leaf: Any) -> dict[Any, Any] | None:
    """What such an object holds, by key or field; None for anything else."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {
            field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)
        }
    return None


def closed(leaf: Any, content: dict[Any, Any]) -> Any:
    """An object like the one that was opened, with other content of the same keys; itself if none can be made."""
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return leaf
    other = copy.copy(leaf)
    for key, value in content.items():
        if isinstance(leaf, Mapping):
            other[key] = value
        else:
            object.__setattr__(other, key, value)  # also where it is frozen
    return other
