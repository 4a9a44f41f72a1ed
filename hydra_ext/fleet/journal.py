"""The journal of a fleet: what it was asked and what it has decided, one line each, safe on the disk.

A line is the checksum of the rest, a space, and a JSON object. A process that is killed may leave a part of a line at
the end, which is cut off when the fleet resumes. Damage elsewhere is an error.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra_ext.errors import FleetInUse, JournalError

NAME = "journal.jsonl"
VERSION = 1  # of the entries


class Journal:
    """The open journal of a fleet's folder, which no other process has open.

    Args:
        folder: Folder of the fleet; made if it is new.

    Attributes:
        entries: What it held when it was opened.

    Raises:
        FleetInUse: Another process runs a fleet there.
        JournalError: The journal is damaged.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FleetInUse(
                    f"another process runs a fleet in {folder}: wait for it, or give this one a folder of its own"
                ) from error
            self.entries = self._read()
        except BaseException:  # re-raised: the file has no other owner yet
            os.close(self._file)
            raise

    def write(self, event: str, **more: Any) -> None:
        """Adds an entry, which is on the disk on return.

        Raises:
            JournalError: It could not be written. The journal is as before.
        """
        text = json.dumps({"event": event, **more}, separators=(",", ":")).encode()
        size = os.fstat(self._file).st_size
        try:
            write_whole(self._file, b"%08x %s\n" % (zlib.crc32(text), text))
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise JournalError(
                f"{self.path} cannot be written: {error}. Make room, and call resume()", file=self.path
            ) from error

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    def _read(self) -> list[Mapping[str, Any]]:
        text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.ftruncate(self._file, len(whole))
        return _entries(self.path, whole)


def read_only(folder: Path) -> list[Mapping[str, Any]]:
    """The whole entries of a journal that a fleet may be writing.

    Raises:
        JournalError: There is none, or it is damaged.
    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{folder} holds no fleet: {error}", file=path) from error
    return _entries(path, text[: text.rfind(b"\n") + 1])


def write_whole(descriptor: int, data: bytes) -> None:
    """Writes all of it: a disk that gets full takes a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def _entries(path: Path, text: bytes) -> list[Mapping[str, Any]]:
    return [_entry(path, number, line) for number, line in enumerate(text.splitlines(), 1)]


def _entry(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    checksum, _, text = line.partition(b" ")
    try:
        entry = json.loads(text) if int(checksum, 16) == zlib.crc32(text) else None
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        raise JournalError(
            f"line {number} of {path} is damaged: restore the file, or start a new fleet with the same jobs in another "
            "folder; hydra_ext.load_model reads the checkpoints of the jobs",
            file=path,
        )
    return entry
