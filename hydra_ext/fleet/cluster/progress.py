"""A job's progress file: one JSON object a line, written by the gang's first rank, read by the fleet and by people.

Lines say what happened: ``{"event": "opened" | "step" | "saved" | "stopped" | "done", "gang": ..., "step": ..., ...}``.
A process that is killed may leave a part of a line, which readers skip. After a restart steps since the checkpoint come
again, with the same losses: the latest line of a step counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class ProgressWriter:
    """Appends records. Each is one write, so that readers see whole lines."""

    def __init__(self, path: Path, gang: int) -> None:
        self._gang = gang
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # the rest of a line whose writer was killed

    def write(self, event: str, step: int, **more: Any) -> None:
        record = {"event": event, "gang": self._gang, "step": step, **more}
        os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class ProgressReader:
    """Reads on in a progress file, from where it has stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip_to_end(self) -> None:
        """Leaves out what is there already."""
        try:
            self._offset = self._path.stat().st_size
        except FileNotFoundError:
            self._offset = 0

    def read(self) -> Iterator[Mapping[str, Any]]:
        """The records of whole lines that have come since."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            record = _parsed(line)
            if record is not None:
                yield record


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # the rest of a line whose writer was killed
        return None
    known = isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("step"), int)
    return record if known else None


def losses(path: Path) -> dict[int, float]:
    """The loss of each step that was made, by the step's number from 1 on."""
    found = {}
    for record in ProgressReader(path).read():
        if record["event"] == "step":
            found[int(record["step"])] = float(record["loss"])
    return found
