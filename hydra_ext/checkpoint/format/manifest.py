"""The manifest: the contents of a checkpoint and their places, with checksums of everything, its own included.

It is one line of JSON, ``{"crc32":"...","checkpoint":{...}}``. The checksum is that of the inner object's bytes. Facts
that the files show themselves, such as their sizes, are repeated, so that a reader can compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra_ext.checkpoint.format import checksum, strict_json
from hydra_ext.checkpoint.format.header import BadSpan, Span, is_count

NAME = "manifest.json"
UNFINISHED = "manifest.json.unfinished"
"""The manifest's name until it is whole. It marks a folder as ours, and as not yet, or no longer, a checkpoint."""

SECTIONS = ("model", "optimizer", "training")
VERSION = 1
LONGEST = 100_000_000  # bytes

TENSOR_FILE = re.compile(rf"({'|'.join(SECTIONS)})(-\d{{5,9}}-of-\d{{5,9}})?\.safetensors")
TEXT_FILES = ("model.safetensors.index.json", "config.json", "generation_config.json")

_START = re.compile(rb'\{"%s":"([0-9a-f]{1,64})","checkpoint":' % checksum.NAME.encode())
_END = b"}\n"


class BadManifest(ValueError):
    """A manifest is damaged or not ours; the message says why."""


@dataclass(frozen=True)
class FileRecord:
    """A file of the checkpoint.

    Attributes:
        checksum: Checksum of a text; None for a file of tensors, which have checksums of their own.
    """

    nbytes: int
    checksum: str | None = None


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: its file, its place in the file, and the checksum of its bytes."""

    file: str
    span: Span
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        serial: Number of the checkpoint in its folder. The newest has the highest.
        step: Number of optimizer steps when it was saved.
        older: Names of the checkpoints' folders that existed when it was made.
        files: Files by name.
        tensors: Tensors by section and name.
        ties: Groups of names that stand for one tensor, which is stored under the first of them.
        content: Everything else, as JSON.
    """

    serial: int
    step: int
    older: tuple[str, ...]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, TensorRecord]]
    ties: tuple[tuple[str, ...], ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(record.nbytes for record in self.files.values())

    def write(self) -> bytes:
        body = {
            "version": VERSION,
            "serial": self.serial,
            "step": self.step,
            "older": list(self.older),
            "files": {name: {"bytes": file.nbytes, checksum.NAME: file.checksum} for name, file in self.files.items()},
            "tensors": {
                section: {name: _written(record) for name, record in records.items()}
                for section, records in self.tensors.items()
            },
            "ties": [list(names) for names in self.ties],
            "content": dict(self.content),
        }
        inner = strict_json.write(body)
        return b'{"%s":"%s","checkpoint":' % (checksum.NAME.encode(), checksum.of(inner).encode()) + inner + _END


@dataclass(frozen=True)
class Share:
    """One writer's part of a manifest, where several ranks write.

    Attributes:
        files: Files of tensors.
        tensors: Tensors in them, by section and name.
    """

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, TensorRecord]]

    def as_json(self) -> dict[str, Any]:
        return {
            "files": {name: file.nbytes for name, file in self.files.items()},
            "tensors": {
                section: {name: _written(record) for name, record in records.items()}
                for section, records in self.tensors.items()
            },
        }

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Share:
        files = {name: FileRecord(nbytes) for name, nbytes in value["files"].items()}
        tensors = {
            section: {name: _tensor(section, name, entry, files) for name, entry in entries.items()}
            for section, entries in value["tensors"].items()
        }
        return Share(files, tensors)


def _written(record: TensorRecord) -> dict[str, Any]:
    return {
        "file": record.file,
        "bytes": [record.span.begin, record.span.end],
        "dtype": record.span.dtype,
        "shape": list(record.span.shape),
        checksum.NAME: record.checksum,
    }


def parse(data: bytes | bytearray) -> Manifest:
    """Decodes a manifest.

    Raises:
        BadManifest: The bytes are not a manifest of ours, or not those that were written.
    """
    if len(data) > LONGEST:
        raise BadManifest(f"it is longer than {LONGEST} bytes")
    start = _START.match(data)
    if start is None or not data.endswith(_END):
        raise BadManifest("it is cut off, or not the manifest of a checkpoint")
    inner = memoryview(data)[start.end() : len(data) - len(_END)]
    if checksum.of(inner) != start[1].decode():
        raise BadManifest("its bytes are not those that were written: the checksum differs")
    try:
        return _manifest(strict_json.read(inner))
    except (strict_json.NotStrict, BadSpan) as error:
        raise BadManifest(str(error)) from error


def is_foreign(data: bytes | bytearray) -> bool:
    """Whether this is another program's file of the same name.

    Damage hardly turns a manifest of ours into one: if it is cut off, it is not JSON any more. If one of its two keys
    is altered, the other one remains.
    """
    try:
        body = strict_json.read(data)
    except strict_json.NotStrict:
        return False
    return not (isinstance(body, dict) and (checksum.NAME in body or isinstance(body.get("checkpoint"), dict)))


def _manifest(body: Any) -> Manifest:
    body = _table(body, "the manifest")
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise BadManifest(f"it is of version {body.get('version')!r:.40}; this hydra_ext reads version {VERSION}")
    files = {name: _file(name, entry) for name, entry in _table(body.get("files"), "files").items()}
    sections = _table(body.get("tensors"), "tensors")
    if not sections.keys() <= set(SECTIONS):
        raise BadManifest("tensors has unknown sections")
    tensors = {
        section: {name: _tensor(section, name, entry, files) for name, entry in _table(entries, section).items()}
        for section, entries in sections.items()
    }
    ties = tuple(_names(names, "ties") for names in _list(body.get("ties"), "ties"))
    if any(len(names) < 2 or names[0] not in tensors.get("model", {}) for names in ties):
        raise BadManifest("ties has a group of fewer than two names, or of a tensor that does not exist")
    return Manifest(
        serial=_count(body.get("serial"), "serial"),
        step=_count(body.get("step"), "step"),
        older=_names(body.get("older"), "older"),
        files=files,
        tensors=tensors,
        ties=ties,
        content=_table(body.get("content"), "content"),
    )


def _file(name: str, entry: Any) -> FileRecord:
    entry = _table(entry, "files")
    summed = entry.get(checksum.NAME)
    known = summed is None if TENSOR_FILE.fullmatch(name) else name in TEXT_FILES and checksum.is_one(summed)
    if not known:
        raise BadManifest(f"files names {name!r:.80}, which is not a file of a checkpoint")
    return FileRecord(_count(entry.get("bytes"), name), summed)


def _tensor(section: str, name: str, entry: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
    entry = _table(entry, section)
    file, ends, shape = entry.get("file"), entry.get("bytes"), entry.get("shape")
    held = isinstance(file, str) and file in files and TENSOR_FILE.fullmatch(file)
    if not held or held[1] != section:
        raise BadManifest(f"the tensor {name!r:.200} is in {file!r:.80}, which is not a file of its section")
    if not (isinstance(ends, list) and len(ends) == 2 and isinstance(shape, list)):
        raise BadManifest(f"the tensor {name!r:.200} has no span of bytes or no shape")
    summed = entry.get(checksum.NAME)
    if not checksum.is_one(summed) or not isinstance(entry.get("dtype"), str):
        raise BadManifest(f"the tensor {name!r:.200} has no checksum or no type")
    try:
        return TensorRecord(file, Span(entry["dtype"], tuple(shape), ends[0], ends[1]), summed)
    except BadSpan as error:
        raise BadManifest(f"the tensor {name!r:.200}: {error}") from error


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadManifest(f"{what} is not a table")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadManifest(f"{what} is not a list")
    return value


def _names(value: Any, what: str) -> tuple[str, ...]:
    names = _list(value, what)
    if not all(isinstance(name, str) for name in names):
        raise BadManifest(f"{what} has an entry that is not a name")
    return tuple(names)


def _count(value: Any, what: str) -> int:
    if not is_count(value):
        raise BadManifest(f"{what} is not a count")
    return int(value)
