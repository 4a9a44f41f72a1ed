"""Strict JSON with one meaning: no duplicate keys, no NaN or infinity, nothing after the value."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_DEEPEST = 100
_LARGEST = 10**1000  # Python refuses to read numbers of several thousand digits


class NotStrict(ValueError):
    """Data are not strict JSON; the message says why."""


def read(data: bytes | bytearray | memoryview) -> Any:
    """Decodes strict JSON.

    Raises:
        NotStrict: The data are not strict JSON.
    """
    try:
        return json.loads(str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
    except NotStrict:
        raise
    except RecursionError as error:
        raise NotStrict("it is nested too deeply") from error
    except ValueError as error:  # the encoding or the syntax is wrong, or a number has too many digits
        raise NotStrict(str(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotStrict(f"the key {twice!r} occurs twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise NotStrict(f"{constant} is not a number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotStrict(f"{text[:40]} is larger than any float")
    return number


def write(value: Any) -> bytes:
    """Encodes a value as compact JSON, from which its numbers are read with the same bits."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def why_not(value: object, place: str, depth: int = 0) -> str:
    """The reason why a value does not survive JSON unchanged, with the place of the culprit; empty if it does."""
    if depth > _DEEPEST:
        return f"{place[:80]}... is nested too deeply"
    if value is None or type(value) is bool:
        return ""
    if type(value) is int:
        return "" if abs(value) < _LARGEST else f"{place} is too large a number"
    if type(value) is str:
        return "" if _is_text(value) else f"{place} has halves of characters (lone surrogates)"
    if type(value) is float:
        return "" if math.isfinite(value) else f"{place} is {value}"
    if type(value) is list:
        return next(filter(None, (why_not(each, f"{place}[{i}]", depth + 1) for i, each in enumerate(value))), "")
    if type(value) is dict:
        strange = [key for key in value if type(key) is not str or not _is_text(key)]
        if strange:
            return f"{place} has the key {strange[0]!r}, which is not a text"
        return next(filter(None, (why_not(each, f"{place}[{key!r}]", depth + 1) for key, each in value.items())), "")
    return f"{place} is a {type(value).__name__}"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
