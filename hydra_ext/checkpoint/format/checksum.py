"""The checksum of checkpoints. No other module depends on the choice of algorithm."""

from __future__ import annotations

import re
import zlib

NAME = "crc32"
EMPTY = "00000000"
"""The checksum of no bytes."""

_FORM = re.compile(r"[0-9a-f]{8}")


def follow(before: str, data: bytes | memoryview) -> str:
    """The checksum of the bytes whose checksum is ``before``, followed by ``data``."""
    return f"{zlib.crc32(data, int(before, 16)):08x}"


def of(data: bytes | memoryview) -> str:
    return follow(EMPTY, data)


def is_one(text: object) -> bool:
    return isinstance(text, str) and _FORM.fullmatch(text) is not None
