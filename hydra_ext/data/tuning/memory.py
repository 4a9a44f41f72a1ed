"""Memory that a pipeline's processes take together, as the system counts it.

Counted is each process's part of anonymous pages, of shared memory and of libraries. Pages of other files, such as
mapped datasets, are not: they would fill any limit, and the system drops them when it needs room. The exact count takes
milliseconds for each process. So it is asked for seldom. In between a cheap count says how many pages a process has
mapped since. What that does not see are pages of the server that a worker copies because it writes to them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra_ext.data.workers.processes import Workshop
from hydra_ext.errors import StateError

_SHARE = 0.01  # of the time, for exact counts


@dataclass(frozen=True)
class Taken:
    """Bytes of one process.

    Attributes:
        proportional: Of its anonymous pages, with its part of those that it has in common with others.
        own: Of anonymous pages that only it has.
        shared: Its part of shared memory.
        mapped: Of all its anonymous pages.
    """

    proportional: int
    own: int
    shared: int
    mapped: int


class Account:
    """Looks at a pipeline's memory. Used by one thread."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._taken: dict[int, Taken] = {}  # when it was counted last
        self._left = 0  # what processes that have ended had in common with others, who now have more of it
        self._due = 0.0  # when all are to be counted again
        self._libraries = 0  # bytes: hardly more with more workers, since they have them in common
        self._libraries_due = 0.0
        self._most: dict[str, int] = {}  # bytes of one worker's own, by stage

    def begin(self) -> None:
        """Now that processes have begun, all is counted anew: before, they had not loaded their libraries."""
        self._due = self._libraries_due = 0.0

    def processes(self) -> int:
        """Bytes of the processes' own memory, by a cheap count for most of the time."""
        alive = self._workshop.processes
        if time.perf_counter() >= self._due:
            return self.count()
        for process in [each for each in self._taken if each not in alive]:
            gone = self._taken.pop(process)
            self._left += gone.proportional - gone.own
        total = self._left + self._libraries
        for process in alive:
            if process not in self._taken:
                taken = counted(process)
                # What it has in common with others is in their count until all are counted again.
                self._taken[process] = Taken(taken.own, taken.own, taken.shared, taken.mapped)
            taken = self._taken[process]
            grown = max(0, mapped(process) - taken.mapped)
            self._note(process, taken.own + grown)
            total += taken.proportional + grown
        return total

    def count(self) -> int:
        """Bytes of the processes' own memory, exactly."""
        begun = time.perf_counter()
        self._taken = {process: counted(process) for process in self._workshop.processes}
        self._left = 0
        for process, taken in self._taken.items():
            self._note(process, taken.own)
        ended = time.perf_counter()
        self._due = ended + (ended - begun) / _SHARE
        if ended >= self._libraries_due:
            self._libraries = sum(map(libraries, self._taken))
            counted_at = time.perf_counter()
            self._libraries_due = counted_at + (counted_at - ended) / _SHARE
        return self._libraries + sum(taken.proportional for taken in self._taken.values())

    def shared(self) -> int:
        """Bytes of shared memory: what is allocated for results, or more if processes share something else."""
        return max(self._workshop.region.allocated, sum(taken.shared for taken in self._taken.values()))

    def own(self, stage: str) -> int:
        """The most bytes that one worker of a stage had for itself; of any stage where it has had none."""
        return self._most.get(stage, max(self._most.values(), default=0))

    def _note(self, process: int, own: int) -> None:
        stage = self._workshop.workers.get(process)
        if stage is not None:  # the server's memory is not a worker's
            self._most[stage] = max(self._most.get(stage, 0), own)


def expect_counted() -> None:
    """
    Raises:
        StateError: This system does not tell what processes take.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        raise StateError(
            "this system has no /proc/self/smaps_rollup, so the memory of workers cannot be limited: give num_workers="
        )


def counted(process: int) -> Taken:
    """Nothing of a process that has ended."""
    found = _kilobytes(process, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "Private_Dirty"))
    # Dirty pages of its own are anonymous ones, or of shared memory that no other process has touched.
    own = min(found["Private_Dirty"], found["Pss_Anon"])
    return Taken(proportional=found["Pss_Anon"], own=own, shared=found["Pss_Shmem"], mapped=mapped(process))


def libraries(process: int) -> int:
    """Bytes of a process's part of files that it executes."""
    executed, parts = set(), dict[str, float]()
    file, sizes = "", dict[str, int]()
    for line in _lines(process, "smaps"):
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss", "Anonymous"):
            sizes[name] = 1024 * int(rest.split()[0])
            if name == "Anonymous" and sizes["Rss"]:  # the last of the three; pages that were written to are anonymous
                parts[file] = parts.get(file, 0.0) + sizes["Pss"] * (1 - sizes["Anonymous"] / sizes["Rss"])
        elif "-" in name:  # the line that begins a mapping: addresses, permissions, offset, device, inode, file
            words = line.split(maxsplit=5)
            file = words[5] if len(words) == 6 and words[5].startswith("/") else ""
            if "x" in words[1]:
                executed.add(file)
    return int(sum(part for file, part in parts.items() if file and file in executed))


def mapped(process: int) -> int:
    """Bytes of a process's anonymous pages: a cheap count."""
    return _kilobytes(process, "status", ("RssAnon",))["RssAnon"]


def _kilobytes(process: int, file: str, names: tuple[str, ...]) -> dict[str, int]:
    """Figures that the system gives in units of 1024 bytes, in bytes."""
    found = dict.fromkeys(names, 0)
    for line in _lines(process, file):
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = 1024 * int(rest.split()[0])
    return found


def _lines(process: int, file: str) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return Path(f"/proc/{process}/{file}").read_text().splitlines()
    return []
