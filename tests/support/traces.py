"""A trace file, read back and taken apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
ROWS = ("steps", "compute", "host to device", "device to host", "optimizer")


@dataclass
class TraceFile:
    """The contents of a trace: its processes and threads, and its events by kind."""

    about: dict[str, Any]
    rows: dict[str, int]
    events: list[Event]
    counters: list[Event]

    def row(self, name: str, category: str | None = None) -> list[Event]:
        """Returns the events of a row, in the order of their beginnings."""
        found = [event for event in self.events if event["tid"] == self.rows[name]]
        found = [event for event in found if category is None or event["cat"] == category]
        return sorted(found, key=lambda event: (begin(event), -end(event)))


def read(path: Path) -> TraceFile:
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    named = [event for event in events if event["ph"] == "M" and event["name"] == "thread_name"]
    return TraceFile(
        about=content["otherData"],
        rows={event["args"]["name"]: event["tid"] for event in named},
        events=[event for event in events if event["ph"] == "X"],
        counters=[event for event in events if event["ph"] == "C"],
    )


def begin(event: Event) -> int:
    """Returns whole nanoseconds, since written microseconds do not add up exactly."""
    return round(event["ts"] * 1000)


def end(event: Event) -> int:
    return begin(event) + round(event["dur"] * 1000)


def overlapping(events: list[Event]) -> list[str]:
    """Returns events that begin before their predecessor has ended."""
    return [f"{a['name']} and {b['name']}" for a, b in pairwise(events) if begin(b) < end(a)]


def misnested(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns spans that begin inside another span and end after it."""
    found, around = [], []
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= first:
            around.pop()
        if around and last > around[-1]:
            found.append((first, last))
        around.append(last)
    return found


def moved(events: list[Event]) -> int:
    return sum(event["args"]["bytes"] for event in events)
