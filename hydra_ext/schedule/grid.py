"""A simulated schedule as text: ranks by time."""

from __future__ import annotations

from hydra_ext import _C
from hydra_ext._C import ActionKind, TimedAction
from hydra_ext.schedule.labels import label, shortest, work_by_rank

_FRAMES = {ActionKind.FORWARD: (" ", " "), ActionKind.BACKWARD: ("[", "]"), ActionKind.UPDATE: ("{", "}")}
_IDLE = "."


def draw(core: _C.Schedule, timeline: _C.Timeline, *, column: float | None = None) -> str:
    """One line for every rank. An action shorter than half a column is drawn as a whole one."""
    ranks = work_by_rank(core, timeline)
    seconds = shortest(ranks) if column is None else column
    width = 2 + max((len(label(core, timed.action)) for rank in ranks for timed in rank), default=1)
    rows = [_row(core, rank, seconds, width) for rank in ranks]
    longest = max(map(len, rows))
    idle = _IDLE.center(width)
    missing = [(longest - len(row)) // width for row in rows]
    lines = [
        f"rank {rank:<{len(str(core.ranks - 1))}} |{row}{idle * gap}| {timeline.bubbles[rank]:.0%} idle"
        for rank, (row, gap) in enumerate(zip(rows, missing, strict=True))
    ]
    return "\n".join([_legend(core, seconds), *lines])


def _legend(core: _C.Schedule, seconds: float) -> str:
    chunks = "; a, b, ... are the stages of a rank" if core.ranks < core.stages else ""
    return f"a column is {seconds:g} s; 3 is a forward of microbatch 3, [3] its backward{chunks}"


def _row(core: _C.Schedule, work: list[TimedAction], seconds: float, width: int) -> str:
    cells: list[str] = []
    until = 0
    for timed in work:
        begin = max(round(timed.start / seconds), until)
        end = max(round(timed.end / seconds), begin + 1)
        cells += [_IDLE.center(width)] * (begin - until)
        left, right = _FRAMES[timed.action.kind]
        cells.append(left + label(core, timed.action).center((end - begin) * width - 2) + right)
        until = end
    return "".join(cells)
