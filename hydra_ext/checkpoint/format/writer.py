"""Writes tensors into the files of one checkpoint, one after another. It holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hydra_ext.checkpoint.format import checksum, header, strict_json
from hydra_ext.checkpoint.format.files import Files, write_all
from hydra_ext.checkpoint.format.manifest import FileRecord, TensorRecord
from hydra_ext.checkpoint.format.tensors import Entry, bytes_of
from hydra_ext.errors import UnsupportedState

SHARD_BYTES = 2 * 2**30
_PIECE = 16 * 2**20  # bytes that are summed and then written at once, so that memory is read only once
_MANIFEST_BYTES = 4096  # room for the manifest and the file system's own data, without the tensors' entries
_ENTRY_BYTES = 600  # bytes of one tensor's entries in the header, the index and the manifest


@dataclass(frozen=True)
class Shard:
    """A file to be written, with its entries in the order of their bytes."""

    section: str
    file: str
    entries: tuple[Entry, ...]


def plan(section: str, groups: Iterable[Sequence[Entry]]) -> list[Shard]:
    """The files of a section. A group is in one file. Files of several groups have at most ``SHARD_BYTES``.

    Raises:
        UnsupportedState: Two tensors have one name, or a file has too many tensors for one header.
    """
    filled: list[list[Entry]] = []
    size = 0
    for group in groups:
        added = sum(entry.nbytes for entry in group)
        if not filled or size + added > SHARD_BYTES:
            filled.append([])
            size = 0
        filled[-1] += group
        size += added
    filled = [entries for entries in filled if entries]
    _refuse_doubles(section, filled)
    # Some readers need each element at a multiple of its size. So tensors of larger elements come first.
    ordered = [sorted(entries, key=lambda entry: -entry.dtype.itemsize) for entries in filled]
    return numbered([Shard(section, "", tuple(entries)) for entries in ordered], 0, len(ordered))


def numbered(shards: Sequence[Shard], before: int, count: int) -> list[Shard]:
    """Shards of one section with their files' names.

    Args:
        before: Number of the section's files that come before them.
        count: Number of all files of the section.
    """

    def file(section: str, number: int) -> str:
        return f"{section}.safetensors" if count == 1 else f"{section}-{number:05}-of-{count:05}.safetensors"

    return [replace(shard, file=file(shard.section, before + i)) for i, shard in enumerate(shards, 1)]


def _refuse_doubles(section: str, filled: Sequence[Sequence[Entry]]) -> None:
    seen = {"__metadata__"}  # a name that safetensors reserves
    for entries in filled:
        for entry in entries:
            if entry.name in seen:
                raise UnsupportedState(
                    f"'{entry.name}' cannot name a tensor of the {section}, as the name is taken: rename it"
                )
            seen.add(entry.name)
        length = sum(len(entry.name.encode()) + _ENTRY_BYTES // 3 for entry in entries)
        if length > header.LONGEST:
            raise UnsupportedState(
                f"{len(entries)} tensors are too many for one file of the {section}, whose header may have at most "
                f"{header.LONGEST} bytes"
            )


def needed_bytes(shards: Iterable[Shard], texts: Iterable[bytes]) -> int:
    """Upper estimate of the bytes that a checkpoint takes on the disk."""
    tensors = sum(
        entry.nbytes + 3 * len(entry.name.encode()) + _ENTRY_BYTES for shard in shards for entry in shard.entries
    )
    return tensors + sum(map(len, texts)) + _MANIFEST_BYTES


def index(records: Mapping[str, TensorRecord]) -> bytes:
    """The index of tensors by file, in the form that Hugging Face's loaders read."""
    total = sum(record.span.nbytes for record in records.values())
    names = {name: record.file for name, record in records.items()}
    return strict_json.write({"metadata": {"total_size": total}, "weight_map": names}) + b"\n"


class Writer:
    """Writes new files into one folder.

    Attributes:
        files: Records of the files that were written.
        tensors: Records of their tensors, by section and name.
    """

    def __init__(self, files: Files, folder: int) -> None:
        self._files = files
        self._folder = folder
        self.files: dict[str, FileRecord] = {}
        self.tensors: dict[str, dict[str, TensorRecord]] = {}

    def write_shard(self, shard: Shard) -> None:
        """Writes a file of tensors. Returns once every byte of it is safe on the disk.

        Raises:
            UnsupportedState: A tensor has another type or shape than its entry.
        """
        start, spans = header.make({entry.name: (entry.dtype, entry.shape) for entry in shard.entries})
        records = self.tensors.setdefault(shard.section, {})
        with self._made(shard.file) as file:
            write_all(self._files, file, memoryview(start))
            for entry in shard.entries:
                summed = self._write_tensor(file, entry)
                records[entry.name] = TensorRecord(shard.file, spans[entry.name], summed)
        end = max((span.end for span in spans.values()), default=len(start))
        self.files[shard.file] = FileRecord(end)

    def write_text(self, name: str, text: bytes) -> None:
        with self._made(name) as file:
            write_all(self._files, file, memoryview(text))
        self.files[name] = FileRecord(len(text), checksum.of(text))

    def _write_tensor(self, file: int, entry: Entry) -> str:
        tensor = entry.fetch()
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise UnsupportedState(
                f"'{entry.name}' was {entry.dtype} of shape {list(entry.shape)}, and is {tensor.dtype} of shape "
                f"{list(tensor.shape)} now: do not change tensors while they are saved"
            )
        data = bytes_of(tensor)
        summed = checksum.EMPTY
        for begin in range(0, len(data), _PIECE):
            piece = data[begin : begin + _PIECE]
            summed = checksum.follow(summed, piece)
            write_all(self._files, file, piece)
        return summed

    @contextmanager
    def _made(self, name: str) -> Iterator[int]:
        with written(self._files, name, self._folder) as file:
            yield file


@contextmanager
def written(files: Files, name: str, folder: int) -> Iterator[int]:
    """A new file, to be written inside. Afterwards its bytes are safe on the disk."""
    file = files.create(name, inside=folder)
    try:
        yield file
        files.sync(file)
    finally:
        files.close(file)
