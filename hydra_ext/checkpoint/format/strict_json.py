"""JSON that says one thing only: no key twice, no number that is none, nothing after it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_DEEPEST = 100
_LARGEST = 10**1000  # Python reads numbers of some thousand digits, and no longer ones


class NotStrict(ValueError):
    """The message says why."""


def read(data: bytes | bytearray | memoryview) -> Any:
    """
    Raises:
        NotStrict: the data are no strict JSON.
    """
    try:
        return json.loads(str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
    except NotStrict:
        raise
    except RecursionError as error:
        raise NotStrict("it is nested too deeply") from error
    except ValueError as error:  # of the text's encoding, its form, or a number of thousands of digits
        raise NotStrict(str(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotStrict(f"the key {twice!r} is there twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise NotStrict(f"{constant} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotStrict(f"{text[:40]} is larger than any number")
    return number


def write(value: Any) -> bytes:
    """Compact. Numbers come back as the same bits."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def why_not(value: object, place: str, depth: int = 0) -> str:
    """Empty if this value comes back from JSON as it was; else what does not, and why."""
    if depth > _DEEPEST:
        return f"{place[:80]}... is nested too deeply"
    if value is None or type(value) is bool:
        return ""
    if type(value) is int:
        return "" if abs(value) < _LARGEST else f"{place} is too large a number"
    if type(value) is str:
        return "" if _is_text(value) else f"{place} has halves of characters"
    if type(value) is float:
        return "" if math.isfinite(value) else f"{place} is {value}"
    if type(value) is list:
        return next(filter(None, (why_not(each, f"{place}[{i}]", depth + 1) for i, each in enumerate(value))), "")
    if type(value) is dict:
        strange = [key for key in value if type(key) is not str or not _is_text(key)]
        if strange:
            return f"{place} has the key {strange[0]!r}, which is no text"
        return next(filter(None, (why_not(each, f"{place}[{key!r}]", depth + 1) for key, each in value.items())), "")
    return f"{place} is a {type(value).__name__}"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
