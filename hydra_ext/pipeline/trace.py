"""The trace of one rank of a pipeline, as a Chrome trace-event file.

Such files open in https://ui.perfetto.dev and in chrome://tracing. A rank is a process. Its rows are: computation,
waits, updates, updates behind the computation, reductions over ranks, and one row for each of its links.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import hydra_ext._build_info as build
from hydra_ext.errors import TraceFileError
from hydra_ext.pipeline.executor import Timing
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.transfers import ROOM, Reduction, Transfer, UpdateBehind
from hydra_ext.pipeline.tally import WAITS
from hydra_ext.schedule import Action, ActionKind, Schedule
from hydra_ext.schedule.meaning import delay_of, meaning_of

logger = logging.getLogger(__name__)

Event = dict[str, Any]

_COMPUTE, _WAITS, _UPDATES, _BEHIND, _REDUCTIONS = 1, 2, 3, 4, 5
_ROWS = {
    _COMPUTE: "compute",
    _WAITS: "waits",
    _UPDATES: "updates",
    _BEHIND: "updates behind the computation",
    _REDUCTIONS: "reductions",
}
_FIRST_LINK = 6


@dataclass(frozen=True)
class Activity:
    """What a rank has done: each kind in the order of its ends."""

    timings: Sequence[Timing]
    transfers: Sequence[Transfer]
    reductions: Sequence[Reduction]
    behind: Sequence[UpdateBehind]

    def since(self, moment: float) -> Activity:
        """The part that began at this moment or later, in seconds of ``time.perf_counter``."""
        return Activity(
            [each for each in self.timings if each.start >= moment],
            [each for each in self.transfers if each.start >= moment],
            [each for each in self.reductions if each.start >= moment],
            [each for each in self.behind if each.start >= moment],
        )


class PipelineTrace:
    """A context that writes the file on exit, after an error too.

    Args:
        path: The file's path. With several ranks each one's path is made from it.
        activity: Gives the rank's activity; called on exit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        schedule: Schedule,
        topology: Topology,
        activity: Callable[[], Activity],
    ) -> None:
        self._path = path_of_rank(path, topology)
        self._schedule = schedule
        self._topology = topology
        self._activity = activity
        self._file: TextIO | None = None
        self._begin = 0.0

    def __enter__(self) -> None:
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._failure(error) from error
        self._begin = time.perf_counter()

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        known = self._activity()
        if known.timings and len(known.timings) == ROOM and known.timings[0].start >= self._begin:
            logger.warning("the trace has room for the last %d actions: earlier ones are not in it", ROOM)
        try:
            with file:
                json.dump(self._document(known.since(self._begin), error), file)
        except OSError as failure:
            if error is None:
                raise self._failure(failure) from failure
            logger.warning("%s", self._failure(failure))  # not raised: it would replace the body's own error

    def _failure(self, error: OSError) -> TraceFileError:
        return TraceFileError(
            f"the trace cannot be written to '{self._path}': {error.strerror or error}; give pipe.trace() a path in a "
            "folder that exists and may be written to"
        )

    def _document(self, activity: Activity, error: BaseException | None) -> dict[str, Any]:
        about = {
            "hydra_ext": build.VERSION,
            "schedule": self._schedule.text,
            "numbers": meaning_of(delay_of(self._schedule)),
            "rank": self._topology.rank,
        }
        if error is not None:
            about["error"] = f"{type(error).__name__}: {error}"
        return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(self._events(activity))}

    def _events(self, activity: Activity) -> Iterator[Event]:
        links = sorted({(transfer.link, transfer.sent) for transfer in activity.transfers})
        rows = {link: _FIRST_LINK + number for number, (link, _) in enumerate(links)}
        yield from self._metadata({**_ROWS, **{row: link for link, row in rows.items()}})
        clock = _Clock(self._topology.rank)
        for timing in activity.timings:
            yield from self._action(timing, clock)
        for reduction in activity.reductions:
            args = {"batch": reduction.batch}
            yield clock.event("reduction", "reduction", _REDUCTIONS, reduction.start, reduction.end, args)
        for update in activity.behind:
            args = {"stage": update.stage, "batch": update.batch}
            yield clock.event("update", "update", _BEHIND, update.start, update.end, args)
        for transfer in activity.transfers:
            args = {"batch": transfer.batch, "microbatch": transfer.microbatch, "bytes": transfer.nbytes}
            name = f"{transfer.batch}" if transfer.microbatch < 0 else f"{transfer.batch}.{transfer.microbatch}"
            category = "send" if transfer.sent else "receive"
            yield clock.event(name, category, rows[transfer.link], transfer.start, transfer.end, args)

    def _metadata(self, rows: dict[int, str]) -> Iterator[Event]:
        topology = self._topology
        name = f"rank {topology.rank}"
        if topology.replicas > 1:
            name += f" (place {topology.place}, replica {topology.replica})"
        yield {"name": "process_name", "ph": "M", "pid": topology.rank, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": topology.rank, "args": {"sort_index": topology.rank}}
        for row, name in rows.items():
            common = {"ph": "M", "pid": topology.rank, "tid": row}
            yield {"name": "thread_name", **common, "args": {"name": name}}
            yield {"name": "thread_sort_index", **common, "args": {"sort_index": row}}

    def _action(self, timing: Timing, clock: _Clock) -> Iterator[Event]:
        """The events of one action; none for sends and receives, which have their links' rows."""
        action = timing.action
        cause = WAITS.get(action.kind)
        if cause is None:
            return
        args = self._args(action)
        begin = timing.start + timing.waited
        if timing.waited > 0.0:
            yield clock.event(f"waits for {cause}", "wait", _WAITS, timing.start, begin, args)
        row = _UPDATES if action.kind == ActionKind.UPDATE else _COMPUTE
        yield clock.event(action.token, action.kind.name.lower(), row, begin, timing.end, args)

    def _args(self, action: Action) -> dict[str, Any]:
        args = {"stage": action.stage, "batch": action.batch}
        if action.kind != ActionKind.UPDATE:
            args["microbatch"] = action.microbatch
            if action.batch >= 0:
                args["version"] = self._schedule.version_of(action.stage, action.batch)
        return args


class _Clock:
    """Makes a rank's events, at the time of day.

    Times are whole microseconds, so that consecutive events do not overlap.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._offset = time.time() - time.perf_counter()

    def event(self, name: str, category: str, row: int, start: float, end: float, args: dict[str, Any]) -> Event:
        begin = self._microseconds(start)
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": self._rank,
            "tid": row,
            "ts": begin,
            "dur": self._microseconds(end) - begin,
            "args": args,
        }

    def _microseconds(self, moment: float) -> int:
        return int((moment + self._offset) * 1e6)


def path_of_rank(path: str | os.PathLike[str], topology: Topology) -> Path:
    """The path of this rank's file. With several ranks the name has the rank's number in it."""
    plain = Path(path)
    return plain if topology.world == 1 else plain.with_name(f"{plain.stem}.rank{topology.rank}{plain.suffix}")
