"""The header of a safetensors file: https://huggingface.co/docs/safetensors. Eight bytes of its length, then JSON.

Written from names, types and shapes that are known ahead; read with more suspicion than any library has.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hydra_ext.checkpoint import strict_json
from hydra_ext.construction.weight_files import DTYPES

LONGEST = 100_000_000  # bytes; what safetensors itself reads
_MOST_DIMENSIONS = 64  # of a tensor of torch's
_LENGTH = struct.Struct("<Q")
_METADATA = {"format": "pt"}  # without it, some loaders refuse the file

CODES = {dtype: code for code, dtype in DTYPES.items()}


class BadHeader(ValueError):
    """The message says why, and names the tensor if it is about one."""

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass(frozen=True)
class Span:
    """Where one tensor lies in its file.

    Attributes:
        dtype: as safetensors names it.
        begin, end: bytes from the file's beginning.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __post_init__(self) -> None:
        """
        Raises:
            BadHeader: the bytes are not as many as the shape takes.
        """
        if self.dtype not in DTYPES:
            raise BadHeader(f"there is no type {self.dtype!r:.40}")
        if len(self.shape) > _MOST_DIMENSIONS or not all(is_count(size) for size in self.shape):
            raise BadHeader(f"{repr(self.shape)[:80]} is no shape")
        if math.prod(size for size in self.shape if size) >= 2**63:
            raise BadHeader(f"no tensor has the shape {list(self.shape)}")
        needed = DTYPES[self.dtype].itemsize * math.prod(self.shape)
        if not (is_count(self.begin) and is_count(self.end) and self.end - self.begin == needed):
            raise BadHeader(
                f"{self.dtype} of shape {list(self.shape)} takes {needed} bytes, not [{self.begin}, {self.end})"
            )

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def make(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, Span]]:
    """The header of a file that holds these tensors one after another, and where they lie then."""
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


LENGTH_BYTES = _LENGTH.size


def text_bytes(prefix: bytes | bytearray, file_bytes: int) -> int:
    """How long the header's text is, from the first bytes of a file so long.

    Raises:
        BadHeader: the file cannot hold it.
    """
    if len(prefix) < _LENGTH.size:
        raise BadHeader("it ends within the length of its header")
    length = int(_LENGTH.unpack(prefix)[0])
    if length > LONGEST or length > file_bytes - _LENGTH.size:
        raise BadHeader(f"its header is said to be of {length} bytes, in a file of {file_bytes}")
    return length


def parse(text: bytes | bytearray, file_bytes: int) -> dict[str, Span]:
    """Where the tensors of a file so long lie, in their order there.

    Raises:
        BadHeader: it is not well formed, or tensors overlap, leave holes, or do not end where the file does.
    """
    try:
        entries = strict_json.read(text)
    except strict_json.NotStrict as error:
        raise BadHeader(f"its header cannot be read: {error}") from error
    if not isinstance(entries, dict) or text[:1] != b"{":
        raise BadHeader("its header is no table")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader("its metadata are no texts")
    base = _LENGTH.size + len(text)
    spans = {name: _span(name, entry, base) for name, entry in entries.items()}
    ordered = dict(sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)))
    offset = base
    for name, span in ordered.items():
        if span.begin != offset:
            raise BadHeader(f"it begins at byte {span.begin}, and what is before it ends at {offset}", name)
        offset = span.end
    if offset != file_bytes:
        raise BadHeader(f"its tensors end at byte {offset}, and the file has {file_bytes}")
    return ordered


def _span(name: str, entry: Any, base: int) -> Span:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadHeader("its entry has other parts than dtype, shape and data_offsets", name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise BadHeader("its shape or its data_offsets is no list", name)
    if not isinstance(entry["dtype"], str) or not all(map(is_count, offsets)):
        raise BadHeader("its type is no text, or its data_offsets are no numbers", name)
    try:
        return Span(entry["dtype"], tuple(shape), base + offsets[0], base + offsets[1])
    except BadHeader as error:
        raise BadHeader(str(error), name) from error
