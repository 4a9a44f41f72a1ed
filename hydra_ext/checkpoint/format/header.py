"""The header of a safetensors file: https://huggingface.co/docs/safetensors. Eight bytes of its length, then JSON.

The header follows from the tensors' names, types and shapes, which the manifest has. Equal tensors have equal headers.
So a file's header is not parsed, but compared with the expected one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hydra_ext.checkpoint.format import strict_json

LONGEST = 100_000_000  # bytes; the limit of safetensors itself
_MOST_DIMENSIONS = 64  # torch's limit for a tensor
_LENGTH = struct.Struct("<Q")
_METADATA = {"format": "pt"}  # without it, some loaders refuse the file

DTYPES = {  # by their names in safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class BadSpan(ValueError):
    """A span is invalid; the message says why."""


@dataclass(frozen=True)
class Span:
    """Where one tensor lies in its file.

    Attributes:
        dtype: Name of the type in safetensors.
        begin, end: Positions in bytes from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __post_init__(self) -> None:
        """
        Raises:
            BadSpan: The type or shape is invalid, or the span has another number of bytes than the shape takes.
        """
        if self.dtype not in DTYPES:
            raise BadSpan(f"there is no type {self.dtype!r:.40}")
        if len(self.shape) > _MOST_DIMENSIONS or not all(is_count(size) for size in self.shape):
            raise BadSpan(f"{repr(self.shape)[:80]} is not a shape")
        if math.prod(size for size in self.shape if size) >= 2**63:
            raise BadSpan(f"no tensor has the shape {list(self.shape)}")
        needed = DTYPES[self.dtype].itemsize * math.prod(self.shape)
        if not (is_count(self.begin) and is_count(self.end) and self.end - self.begin == needed):
            raise BadSpan(
                f"{self.dtype} of shape {list(self.shape)} takes {needed} bytes, not [{self.begin}, {self.end})"
            )

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def make(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, Span]]:
    """The header of a file that holds these tensors one after another, and the span of each."""
    entries: dict[str, Any] = {"__metadata__": _METADATA}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = strict_json.write(entries)
    text += b" " * (-len(text) % 8)
    base = _LENGTH.size + len(text)
    spans = {}
    for name, (dtype, shape) in tensors.items():
        begin, end = entries[name]["data_offsets"]
        spans[name] = Span(CODES[dtype], tuple(shape), base + begin, base + end)
    return _LENGTH.pack(len(text)) + text, spans
