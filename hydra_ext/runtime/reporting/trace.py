"""The trace of a run: the work of lanes, compute and the optimizer, as a Chrome trace-event file.

Such files open in https://ui.perfetto.dev and in chrome://tracing. There is a row for each lane, each thread that
computes, the optimizer, and the steps. A counter shows device bytes by class, and the rest of the budget.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, TextIO

from torch import nn

import hydra_ext._build_info as build
from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import TraceFileError
from hydra_ext.runtime.reporting.figures import StepMeter

logger = logging.getLogger(__name__)

_ROOM = 200_000  # entries; 20 MiB

Event = dict[str, Any]
_Kind, _Row = _C.ActivityKind, _C.ActivityRow

_STEPS, _COMPUTE, _OPTIMIZER = 1, 2, 5
_ROWS = {_STEPS: "steps", _COMPUTE: "compute", 3: "host to device", 4: "device to host", _OPTIMIZER: "optimizer"}
_ROW_OF = {_Row.COMPUTE: _COMPUTE, _Row.TO_DEVICE: 3, _Row.TO_HOST: 4, _Row.OPTIMIZER: _OPTIMIZER}
_WAITS = {
    _Kind.WAIT_FOR_WEIGHTS: "waits for weights",
    _Kind.WAIT_FOR_FAULT: "waits for a fault",
    _Kind.WAIT_FOR_ROOM: "waits for room",
    _Kind.WAIT_FOR_GRADIENTS: "waits for gradients",
    _Kind.WAIT_FOR_TRANSFERS: "waits for transfers",
    _Kind.WAIT_FOR_UPDATE: "waits for the update",
}
_HOST_WORK = {_Row.TO_DEVICE: "made ready", _Row.TO_HOST: "added"}
_CLASSES = ("weights", "gradients", "activations", "buffers", "optimizer state")


class TracedRun(Protocol):
    """The run that a trace records."""

    budget: int
    model: nn.Module
    layout: Layout
    core: _C.PagedModel
    meter: StepMeter

    def sync(self) -> None: ...


class Trace:
    """Records while its context is open, and writes the file on leaving it, also after an error."""

    def __init__(self, run: TracedRun, path: str | os.PathLike[str]) -> None:
        self._run = run
        self._path = os.fspath(path)
        self._file: TextIO | None = None
        self._steps: list[Event] = []

    def __enter__(self) -> None:
        self._run.core.memory.backend.activity.start(_ROOM)
        try:
            self._file = open(self._path, "w", encoding="utf-8")
        except BaseException as error:  # re-raised
            self._run.core.memory.backend.activity.stop()
            if isinstance(error, OSError):
                raise self._failure(error) from error
            raise
        self._steps.clear()
        self._run.meter.observer = self
        self._run.meter.begin()

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._run.meter.observer = None
        try:
            self._run.sync()  # the trace should include the update of the last step
        finally:
            self._write(self._run.core.memory.backend.activity.stop(), failed=error is not None)

    # ---- called by the meter ----------------------------------------------------------------------------------------

    def note_step(self, number: int, begin: int, end: int) -> None:
        self._steps.append(_event(f"step {number}", "step", _STEPS, begin, end))

    def note_update(self, begin: int, end: int) -> None:
        self._steps.append(_event("optimizer.step()", "update", _OPTIMIZER, begin, end))

    def note_data(self, begin: int, end: int) -> None:
        self._steps.append(_event("waits for data", "wait", _COMPUTE, begin, end))

    # ---- the file ---------------------------------------------------------------------------------------------------

    def _failure(self, error: OSError) -> TraceFileError:
        return TraceFileError(
            f"the trace cannot be written to '{self._path}': {error.strerror or error}; give run.trace() a path in a "
            "folder that exists and may be written to"
        )

    def _write(self, record: _C.ActivityRecord, *, failed: bool) -> None:
        if record.dropped:
            logger.warning(
                "the trace has room for %d entries; %d later ones are not in it: trace fewer steps",
                _ROOM,
                record.dropped,
            )
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                self._write_to(file, record)
        except OSError as error:
            if not failed:
                raise self._failure(error) from error
            logger.warning("%s", self._failure(error))  # the body has raised an error already

    def _write_to(self, file: TextIO, record: _C.ActivityRecord) -> None:
        about = {
            "hydra_ext": build.VERSION,
            "device": self._run.core.memory.backend.name,
            "budget_bytes": self._run.budget,
            "dropped_events": record.dropped,
        }
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
        separator = ""
        for event in self._events(record):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")

    def _events(self, record: _C.ActivityRecord) -> Iterator[Event]:
        names = [block.name for block in self._run.layout.blocks]
        activities = record.activities
        threads = max((activity.thread for activity in activities), default=0)
        yield from _metadata(type(self._run.model).__name__, threads)
        rows: dict[int, list[Event]] = {}
        for activity in activities:
            rows.setdefault(_row(activity), []).append(_event_of(activity, names))
        for event in self._steps:
            rows.setdefault(event["tid"], []).append(event)
        for events in rows.values():
            for event in _nested(events):
                event["ts"], event["dur"] = (event["ts"] - record.begin) / 1e3, event["dur"] / 1e3
                yield event
        for moment in record.memory:
            left = self._run.budget - sum(moment.bytes)
            held = dict(zip(_CLASSES, moment.bytes, strict=True))
            yield {
                "name": "device bytes",
                "ph": "C",
                "pid": os.getpid(),
                "ts": (moment.time - record.begin) / 1e3,
                "args": {**held, "left of the budget": left},
            }


def _row(activity: _C.Activity) -> int:
    """The row of an activity. Additional threads that compute have rows of their own, after the others."""
    return len(_ROWS) + activity.thread if activity.thread else _ROW_OF[activity.row]


def _metadata(model: str, threads: int) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": f"hydra_ext: {model}"}}
    further = {len(_ROWS) + thread: f"compute, thread {thread + 1}" for thread in range(1, threads + 1)}
    for row, name in {**_ROWS, **further}.items():
        common = {"ph": "M", "pid": os.getpid(), "tid": row}
        yield {"name": "thread_name", **common, "args": {"name": name}}
        yield {"name": "thread_sort_index", **common, "args": {"sort_index": row}}


def _event(name: str, category: str, row: int, begin: int, end: int) -> Event:
    """A complete event, with times in nanoseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": os.getpid(),
        "tid": row,
        "ts": begin,
        "dur": end - begin,
        "args": {},
    }


def _event_of(activity: _C.Activity, names: Sequence[str]) -> Event:
    kind = activity.kind
    number = f"{activity.pass_kind.name.lower()} {activity.pass_number}"
    block = names[activity.block] if activity.block >= 0 else None
    subject = activity.part or block or ""
    if kind == _Kind.PASS:
        name, category = number, "pass"
    elif kind in _WAITS:
        name, category = _WAITS[kind], "wait"
    elif kind == _Kind.HOST_WORK:
        name, category = f"{subject}: {_HOST_WORK[activity.row]}", "host"
    else:
        name, category = subject, kind.name.lower()
    event = _event(name, category, _row(activity), activity.begin, activity.end)
    if block is not None:
        event["args"]["block"] = block
    if activity.bytes:
        event["args"]["bytes"] = activity.bytes
    if activity.pass_number:
        event["args"]["pass"] = number
    if activity.continued:
        event["args"]["continued"] = True
    return event


def _nested(events: Iterable[Event]) -> Iterator[Event]:
    """The events in order of time. An event that would end after the one around it is cut to end with it.

    Other threads cause such overlaps, which trace viewers do not accept in one row.
    """
    ends: list[int] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if ends:
            event["dur"] = min(event["dur"], ends[-1] - event["ts"])
        ends.append(event["ts"] + event["dur"])
        yield event
