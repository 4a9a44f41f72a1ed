"""A simulated schedule as a Chrome trace-event file, with a process for every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import hydra_ext._build_info as build
from hydra_ext import _C
from hydra_ext._C import ActionKind, TimedAction
from hydra_ext.errors import TraceFileError

_COMPUTE, _REDUCTIONS, _SENDS = 1, 2, 3
_ROWS = {_COMPUTE: "compute", _REDUCTIONS: "reductions", _SENDS: "sends"}
_ROW_OF = {
    ActionKind.FORWARD: _COMPUTE,
    ActionKind.BACKWARD: _COMPUTE,
    ActionKind.UPDATE: _COMPUTE,
    ActionKind.REDUCE: _REDUCTIONS,
    ActionKind.SEND_ACTIVATION: _SENDS,
    ActionKind.SEND_GRADIENT: _SENDS,
}  # receives take no time; begins of updates are instants


def save(core: _C.Schedule, timeline: _C.Timeline, path: str | os.PathLike[str]) -> None:
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"hydra_ext": build.VERSION, "schedule": core.text, "period_seconds": timeline.period},
        "traceEvents": list(_events(core, timeline)),
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except OSError as error:
        raise TraceFileError(
            f"the trace cannot be written to '{os.fspath(path)}': {error.strerror or error}; give a path in a folder "
            "that exists and may be written to"
        ) from error


def _events(core: _C.Schedule, timeline: _C.Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(core.ranks):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for row, name in _ROWS.items():
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
    for number, timed in enumerate(timeline.actions):
        if timed.action.kind == ActionKind.BEGIN_UPDATE:
            yield {**_common(timed, _COMPUTE), "ph": "i", "s": "t", "args": _args(timed)}
        elif timed.action.kind in _ROW_OF:
            yield from _event(core, number, timed)


def _event(core: _C.Schedule, number: int, timed: TimedAction) -> Iterator[dict[str, Any]]:
    action = timed.action
    row = _ROW_OF[action.kind]
    common = _common(timed, row)
    args = _args(timed)
    if row == _SENDS:  # several may be under way at once
        yield {**common, "ph": "b", "id": number, "args": args}
        yield {**common, "ph": "e", "id": number, "ts": timed.end * 1e6}
        return
    if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        args["version"] = core.version_of(action.stage, action.batch)
    yield {**common, "ph": "X", "dur": (timed.end - timed.start) * 1e6, "args": args}


def _common(timed: TimedAction, row: int) -> dict[str, Any]:
    action = timed.action
    return {
        "name": action.token,
        "cat": action.kind.name.lower(),
        "pid": timed.rank,
        "tid": row,
        "ts": timed.start * 1e6,
    }


def _args(timed: TimedAction) -> dict[str, int]:
    action = timed.action
    return {"stage": action.stage, "batch": action.batch, "microbatch": action.microbatch}
