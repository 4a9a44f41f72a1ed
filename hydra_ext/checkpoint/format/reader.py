"""Reads a checkpoint, and trusts nothing in it before it has been checked.

No file is mapped, no link is followed, and no more memory is taken than the files fill. Opened files stay open, so they
can be read to their ends even if a saver removes them meanwhile.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hydra_ext.checkpoint.format import checksum, header
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.files import Files, is_regular, read_all
from hydra_ext.checkpoint.format.header import DTYPES
from hydra_ext.checkpoint.format.manifest import Manifest, TensorRecord
from hydra_ext.checkpoint.format.tensors import bytes_of, empty
from hydra_ext.errors import CheckpointError, CheckpointRemoved, CheckpointUnavailable, TooManyFiles

_PIECE = 4 * 2**20  # bytes that are read at once for a checksum


class Reader:
    """One open checkpoint.

    Attributes:
        path: Path of its folder.
        manifest: The checkpoint's manifest.
    """

    def __init__(self, path: Path, manifest: Manifest, files: Files, folder: int) -> None:
        self.path = path
        self.manifest = manifest
        self._files = files
        self._folder = folder
        self._open: dict[str, int] = {}  # by name

    def close(self) -> None:
        """Closes the files that were opened. The folder stays open."""
        while self._open:
            with suppress(OSError):
                self._files.close(self._open.popitem()[1])

    def hold(self, sections: tuple[str, ...], only: Mapping[str, Collection[str]] | None = None) -> None:
        """Opens all files that :meth:`check` and then :meth:`read` will use. Damage is reported by those methods.

        Raises:
            CheckpointRemoved: The checkpoint was removed.
            TooManyFiles: This process, or the machine, may not have so many files open.
        """
        texts = [name for name, record in self.manifest.files.items() if record.checksum is not None]
        for name in [*texts, *(name for name, _, _ in self._wanted(sections, only))]:
            try:
                self._file(name)
            except CheckpointUnavailable:
                raise
            except CheckpointError:
                continue

    # ---- checking ---------------------------------------------------------------------------------------------------

    def check(self, sections: tuple[str, ...], only: Mapping[str, Collection[str]] | None = None) -> None:
        """Reads every byte of these sections, and all texts.

        Args:
            only: Names of the tensors to check, by section; the headers of their files are checked, too. None checks
                all tensors.

        Raises:
            CheckpointError: A byte is not as it was written.
        """
        for error in self.faults(sections, only):
            raise error

    def faults(
        self, sections: tuple[str, ...], only: Mapping[str, Collection[str]] | None = None
    ) -> Iterator[CheckpointError]:
        """Yields every fault that :meth:`check` looks for.

        Raises:
            CheckpointUnavailable: A file that was not held cannot be opened.
        """
        for name, record in self.manifest.files.items():
            if record.checksum is not None:
                yield from self._faults_of_text(name, record.checksum)
        for name, tensors, wanted in self._wanted(sections, only):
            yield from self._faults_of_file(name, tensors, wanted)

    def _wanted(
        self, sections: tuple[str, ...], only: Mapping[str, Collection[str]] | None
    ) -> Iterator[tuple[str, dict[str, TensorRecord], dict[str, TensorRecord]]]:
        """Yields files of tensors, each with all its tensors, and with those that are wanted."""
        for name, tensors in self._by_file(sections).items():
            section = _section_of(name)
            wanted = tensors if only is None else {each: tensors[each] for each in tensors if each in only[section]}
            if wanted or only is None:
                yield name, tensors, wanted

    def _by_file(self, sections: tuple[str, ...]) -> dict[str, dict[str, TensorRecord]]:
        """Tensors by file, in the order of their bytes."""
        files: dict[str, dict[str, TensorRecord]] = {
            name: {}
            for name, record in self.manifest.files.items()
            if record.checksum is None and _section_of(name) in sections
        }
        for section in sections:
            records = self.manifest.tensors.get(section, {})
            for name, record in sorted(records.items(), key=lambda item: (item[1].file, item[1].span.begin)):
                files[record.file][name] = record
        return files

    def _faults_of_text(self, name: str, expected: str) -> Iterator[CheckpointError]:
        try:
            file = self._file(name)
            if self._sum(file, name, None, 0, self.manifest.files[name].nbytes) != expected:
                yield CheckpointError(f"{self.path / name}: {_DIFFERS}", file=self.path / name)
        except CheckpointUnavailable:
            raise
        except CheckpointError as error:
            yield error

    def _faults_of_file(
        self, name: str, tensors: dict[str, TensorRecord], wanted: Mapping[str, TensorRecord]
    ) -> Iterator[CheckpointError]:
        try:
            file = self._file(name)
            self._check_header(file, name, tensors)
            for tensor, record in wanted.items():
                if self._sum(file, name, tensor, record.span.begin, record.span.end) != record.checksum:
                    yield self._damaged(name, tensor, _DIFFERS)
        except CheckpointUnavailable:
            raise
        except CheckpointError as error:
            yield error

    def _check_header(self, file: int, name: str, tensors: dict[str, TensorRecord]) -> None:
        described = {tensor: (DTYPES[record.span.dtype], record.span.shape) for tensor, record in tensors.items()}
        expected, spans = header.make(described)
        for tensor, record in tensors.items():
            if spans[tensor] != record.span:
                raise self._damaged(name, tensor, "it does not begin where the tensor or header before it ends")
        end = max((span.end for span in spans.values()), default=len(expected))
        if end != self.manifest.files[name].nbytes:
            raise self._damaged(name, None, f"its tensors end at byte {end}, but the file does not")
        found = bytearray(len(expected))
        self._fill(file, name, None, memoryview(found), 0)
        if found != expected:
            raise self._damaged(name, None, "its header is not the one that was written")

    def _sum(self, file: int, name: str, tensor: str | None, begin: int, end: int) -> str:
        summed = checksum.EMPTY
        piece = memoryview(bytearray(min(_PIECE, end - begin)))
        while begin < end:
            wanted = piece[: min(len(piece), end - begin)]
            self._fill(file, name, tensor, wanted, begin)
            summed = checksum.follow(summed, wanted)
            begin += len(wanted)
        return summed

    def described(self, section: str, name: str) -> Tensor:
        """A tensor on meta, of a saved tensor's type and shape. Raises KeyError if there is no such tensor."""
        span = self.manifest.tensors[section][name].span
        return torch.empty(span.shape, dtype=DTYPES[span.dtype], device="meta")

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, section: str, name: str) -> Tensor:
        """Reads a tensor into new memory on the host.

        Raises:
            CheckpointError: Its bytes are not as they were written.
        """
        record = self.manifest.tensors[section][name]
        file = self._file(record.file)
        tensor = empty(DTYPES[record.span.dtype], record.span.shape)
        data = bytes_of(tensor)
        self._fill(file, record.file, name, data, record.span.begin)
        if checksum.of(data) != record.checksum:
            raise self._damaged(record.file, name, _DIFFERS)
        return tensor

    def _file(self, name: str) -> int:
        """The descriptor of a file, which is opened if it is not open, and stays open. Checks the file's size."""
        path = self.path / name
        if name not in self._open:
            try:
                self._open[name] = self._files.open(name, inside=self._folder)
            except OSError as error:
                raise self._why_not_open(path, error) from error
        size, expected = self._size(self._open[name], path), self.manifest.files[name].nbytes
        if size != expected:
            raise CheckpointError(f"{path} has {size} bytes, and had {expected} when it was written", file=path)
        return self._open[name]

    def _why_not_open(self, path: Path, error: OSError) -> CheckpointError:
        if isinstance(error, FileNotFoundError) and self._is_removed():
            return CheckpointRemoved(self.path)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return TooManyFiles(
                f"{path} cannot be opened: {error.strerror}. The {len(self.manifest.files)} files of a checkpoint are "
                "open at once while it is read: raise the limit (ulimit -Hn)",
                file=path,
            )
        return CheckpointError(f"{path} cannot be opened: {error.strerror}", file=path)

    def _is_removed(self) -> bool:
        """Whether the checkpoint was removed. A removal first renames the manifest, and never renames it back."""
        try:
            return manifests.NAME not in self._files.names(self._folder)
        except OSError:
            return False

    def _size(self, file: int, path: Path) -> int:
        try:
            status = self._files.status(file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", file=path) from error
        if not is_regular(status):
            raise CheckpointError(f"{path} is not a regular file", file=path)
        return status.st_size

    def _fill(self, file: int, name: str, tensor: str | None, into: memoryview, begin: int) -> None:
        try:
            count = read_all(self._files, file, into, begin)
        except OSError as error:
            raise self._damaged(name, tensor, f"it cannot be read: {error.strerror}") from error
        if count != len(into):
            raise self._damaged(name, tensor, f"the file ends at byte {begin + count}")

    def _damaged(self, name: str, tensor: str | None, why: str) -> CheckpointError:
        file = self.path / name
        about = "" if tensor is None else f" {tensor!r:.200}:"
        return CheckpointError(f"{file}:{about} {why}", file=file, tensor=tensor)


def _section_of(file: str) -> str:
    return file.partition(".")[0].partition("-")[0]


_DIFFERS = "its bytes are not those that were written: the checksum differs"
