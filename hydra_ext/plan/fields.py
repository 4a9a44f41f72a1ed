"""The entries of a problem, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hydra_ext.errors import PlanError


class Fields:
    """A mapping that a problem, or a part of it, is given as.

    Every method but :meth:`has` raises :class:`~hydra_ext.errors.PlanError` if the entry is missing, or is not what the
    method reads.

    Args:
        values: The mapping.
        name: What messages call it, such as ``"problem"`` or ``"nodes[3]"``.
    """

    def __init__(self, values: object, name: str) -> None:
        if not isinstance(values, Mapping):
            raise PlanError(f"{name} is {_shown(values)}: give a mapping of names to values")
        self._values = values
        self._name = name

    def value(self, key: str) -> object:
        """The entry as it is."""
        if key not in self._values:
            raise PlanError(f"{self._name} has no '{key}': add it; there are {_listed(self._values)}")
        return self._values[key]

    def has(self, key: str) -> bool:
        """Whether there is an entry, and it is not null."""
        return self._values.get(key) is not None

    def amount(self, key: str) -> float:
        """A finite number of at least 0, such as a time or bytes."""
        return amount(self.value(key), f"{self._name}['{key}']")

    def positive(self, key: str) -> float:
        """A finite number above 0, such as the bytes per second of a link."""
        found = self.amount(key)
        if found == 0:
            raise PlanError(f"{self._name}['{key}'] is {_shown(self.value(key))}: give a number above 0")
        return found

    def count(self, key: str) -> int:
        """A whole number of at least 1."""
        return count(self.value(key), f"{self._name}['{key}']")

    def size(self, key: str) -> int:
        """A whole number of at least 0."""
        return size(self.value(key), f"{self._name}['{key}']")

    def flag(self, key: str) -> bool:
        """True or false."""
        found = self.value(key)
        if not isinstance(found, bool):
            raise PlanError(f"{self._name}['{key}'] is {_shown(found)}: give true or false")
        return found

    def text(self, key: str) -> str:
        """A text."""
        found = self.value(key)
        if not isinstance(found, str):
            raise PlanError(f"{self._name}['{key}'] is {_shown(found)}: give a text")
        return found

    def identity(self, key: str) -> int | str:
        """What plans call a node: a whole number or a text."""
        return identity(self.value(key), f"{self._name}['{key}']")

    def items(self, key: str) -> Sequence[object]:
        """A list."""
        return items(self.value(key), f"{self._name}['{key}']")

    def fields(self, key: str) -> Fields:
        """A mapping inside."""
        return Fields(self.value(key), f"{self._name}['{key}']")


def amount(value: object, name: str) -> float:
    """Reads a finite number of at least 0 that messages call ``name``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{name} is {_shown(value)}: give a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or found < 0:
        raise PlanError(f"{name} is {_shown(value)}: give a finite number of at least 0")
    return found


def count(value: object, name: str) -> int:
    """Reads a whole number from 1 to 2^31 - 1 that messages call ``name``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise PlanError(f"{name} is {_shown(value)}: give a whole number from 1 to {2**31 - 1}")
    return value


def size(value: object, name: str) -> int:
    """Reads a whole number from 0 to 2^60 - 1 that messages call ``name``. It may be written as a float."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**60:
        raise PlanError(f"{name} is {_shown(value)}: give a whole number from 0 to 2^60 - 1")
    return number


def identity(value: object, name: str) -> int | str:
    """Reads what plans call a node, and messages call ``name``."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(f"{name} is {_shown(value)}: give a whole number or a text")
    return value


def items(value: object, name: str) -> Sequence[object]:
    """Reads a list that messages call ``name``."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise PlanError(f"{name} is {_shown(value)}: give a list")
    return value


def _shown(value: object) -> str:
    if isinstance(value, int | float | str | None):
        text = "a very large number" if isinstance(value, int) and abs(value) >= 10**20 else repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"a {type(value).__name__}"


def _listed(values: Mapping[object, object]) -> str:
    names = [f"'{key}'" for key in values][:12]
    return ", ".join(names) if names else "no entries"
