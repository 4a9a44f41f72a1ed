"""What ran, or shall run, on which device and when: the bars of a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_ext.fleet.history import Foreseen, History, JobHistory, Move

Row = tuple[str, int]
"""A node, and the number of a device there."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A job on one device. Times are seconds from the fleet's beginning.

    Attributes:
        text: What the bar stands for, in words.
        failure: Why it ended before its time; None if it did not.
        part: Which part of the row's height it has, from above: jobs that share a device lie one upon the other.
        parts: Into how many the height is divided.
    """

    row: Row
    job: str
    start: float
    end: float
    text: str
    failure: str | None = None
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment of a job on one device.

    Attributes:
        text: What happened, in words.
    """

    row: Row
    job: str
    at: float
    text: str


def planned(past: History) -> list[Bar]:
    """The first plan. A plan has no numbers of devices: each job gets the first ones that are free at its start."""
    if not past.plans:
        return []
    bars: list[Bar] = []
    free_from: dict[Row, float] = {}
    plan, rows_of = past.plans[0], dict[str, list[Row]]()
    first_of = {name: pack[0] for pack in plan.packs for name in pack}
    for name, job in sorted(plan.jobs.items(), key=lambda item: (item[1].start, item[0])):
        text = f"{name}, planned: {job.technique} on {job.devices}, {_times(job.start, job.end)}"
        for row in rows_of.setdefault(first_of.get(name, name), _first_free(job, free_from)):
            free_from[row] = max(job.end, free_from.get(row, 0.0))
            bars.append(Bar(row=row, job=name, start=job.start, end=job.end, text=text))
    return _stacked(bars)


def _stacked(bars: Sequence[Bar]) -> list[Bar]:
    """The bars, of which those that share a row at some time have a part of its height."""
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        start = bar.start + _slack(bar.start)
        beside = [number for number, each in enumerate(found) if each.row == bar.row and each.end > start]
        taken = {found[number].part for number in beside}
        part = next(number for number in range(len(taken) + 1) if number not in taken)
        parts = max([part + 1, *(found[number].parts for number in beside)])
        for number in beside:
            found[number] = replace(found[number], parts=parts)
        found.append(replace(bar, part=part, parts=parts))
    return found


def _first_free(job: Foreseen, free_from: dict[Row, float]) -> list[Row]:
    """The node's first devices that are free when a job starts. There are so many, or it would start later."""
    found: list[Row] = []
    number = 0
    while len(found) < job.devices:
        row = job.node, number
        if free_from.get(row, 0.0) <= job.start + _slack(job.end):
            found.append(row)
        number += 1
    return found


def _slack(seconds: float) -> float:
    """Starts are sums of other jobs' seconds."""
    return 1e-9 * max(1.0, seconds)


def real(past: History) -> list[Bar]:
    """What has run."""
    bars = []
    for name, job in past.jobs.items():
        for stretch in job.stretches:
            text = (
                f"{name}: {stretch.technique} on {len(stretch.devices)}, {_times(stretch.start, stretch.end)}, "
                f"{stretch.steps} steps by its end" + (f"; failed: {stretch.failure}" if stretch.failure else "")
            )
            bars += [
                Bar(
                    row=(stretch.node, device),
                    job=name,
                    start=stretch.start,
                    end=stretch.end,
                    text=text,
                    failure=stretch.failure,
                )
                for device in stretch.devices
            ]
    return _stacked(bars)


def moves(past: History) -> list[Mark]:
    """When jobs were asked to go on in another way, on the devices that they had."""
    return [mark for name, job in past.jobs.items() for move in job.moves for mark in _marks(name, job, move)]


def _marks(name: str, job: JobHistory, move: Move) -> list[Mark]:
    text = f"{name} is asked after {move.at:.4g} s to go on with {move.technique} on {move.devices}"
    stretch = next((each for each in job.stretches if each.start <= move.at <= each.end), None)
    if stretch is None:
        return []
    return [Mark(row=(stretch.node, device), job=name, at=move.at, text=text) for device in stretch.devices]


def rows(past: History, bars: Sequence[Bar]) -> list[Row]:
    """All devices, in order: those of the bars, and those of a fleet on one node that had nothing to do."""
    found = {bar.row for bar in bars}
    nodes = {node for node, _ in found}
    if len(nodes) == 1:
        found |= {(node, device) for node in nodes for device in range(past.devices)}
    return sorted(found)


def _times(start: float, end: float) -> str:
    return f"from {start:.4g} s to {end:.4g} s"
