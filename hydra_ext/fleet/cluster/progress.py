"""A job's progress file: one JSON object a line, written by the gang's first rank, read by the fleet and by people.

Lines say what happened: ``{"event": "step", "gang": 7, "step": 12, ...}``. Events are opened, step, saved, evaluating,
stopped and done. A process that is killed may leave a part of a line, which readers skip. After a restart steps since
the checkpoint come again, with the same losses: the latest line of a step counts.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ext.fleet.journal import write_whole


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
        write_whole(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")

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


_RECENT = 20  # steps whose seconds tell how fast a job is now


@dataclass
class Track:
    """What a job's progress file says by now.

    Attributes:
        path: Of the file.
        losses: The loss of each step that was made, by the step's number from 1 on.
        step: Steps made.
        saved: Steps of the newest checkpoint.
        is_done: Whether the job has made all its steps.
        evaluation: The result of ``evaluate``.
        seconds: Of the newest gang's latest steps, without its first one, which takes longer.
        gang: That has written last; None before the first record.
        ends: The time of each gang's newest record, by the wall clock, and the steps made by then.
    """

    path: Path
    losses: dict[int, float] = field(default_factory=dict, init=False)
    step: int = field(default=0, init=False)
    saved: int = field(default=0, init=False)
    is_done: bool = field(default=False, init=False)
    evaluation: float | None = field(default=None, init=False)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT), init=False)
    gang: int | None = field(default=None, init=False)
    ends: dict[int, tuple[float, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._reader = ProgressReader(self.path)
        self._is_first = True  # whether the gang has made no step yet

    def read_on(self) -> Track:
        """Reads what has come since. Returns the track itself."""
        for record in self._reader.read():
            self._hear(record)
        return self

    def _hear(self, record: Mapping[str, Any]) -> None:
        happened, self.step, self.gang = record["event"], int(record["step"]), int(record["gang"])
        if happened == "opened":
            self.losses = {step: loss for step, loss in self.losses.items() if step <= self.step}
            self.seconds.clear()
            self._is_first = True
        elif happened == "step":
            self.losses[self.step] = float(record["loss"])
            if not self._is_first:
                self.seconds.append(float(record["seconds"]))
            self._is_first = False
        elif happened in ("saved", "done"):
            self.saved = self.step
        if happened == "done":
            self.is_done, self.evaluation = True, record.get("evaluation")
        self.ends[self.gang] = float(record["time"]), self.step
