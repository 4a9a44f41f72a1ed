"""Memory that a pipeline's processes take together, as the system counts it.

The system's exact count of a process, its proportional set size, takes milliseconds. So it is asked for seldom. In
between a cheap count says how many pages a process has mapped since; pages that it shares are then counted twice. What
it does not see are pages of the server that a worker copies because it writes to them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra_ext.data.workers.processes import Workshop

_SHARE = 0.01  # of the time, for exact counts


@dataclass(frozen=True)
class Taken:
    """Bytes of one process, without the memory that the pipeline's processes share for results.

    Attributes:
        proportional: With its part of the pages that it has in common with others.
        own: Of pages that only it has.
        anonymous: Of pages that are of no file.
        of_files: Of pages of files, such as libraries.
    """

    proportional: int
    own: int
    anonymous: int
    of_files: int


class Account:
    """Looks at a pipeline's memory. Used by one thread."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._taken: dict[int, Taken] = {}  # when it was counted last
        self._left = 0  # what processes that have ended had in common with others, who now have more of it
        self._due = 0.0  # when all are to be counted again
        self._most: dict[str, int] = {}  # bytes of one worker's own, by stage

    def processes(self) -> int:
        """Bytes that the processes take, by a cheap count for most of the time."""
        alive = self._workshop.processes
        if time.perf_counter() >= self._due:
            return self.count()
        for process in [each for each in self._taken if each not in alive]:
            gone = self._taken.pop(process)
            self._left += gone.proportional - gone.own
        total = self._left
        for process in alive:
            if process not in self._taken:
                self._taken[process] = counted(process)
            taken = self._taken[process]
            mapped = _mapped(process)
            grown = max(0, mapped["RssAnon"] - taken.anonymous)
            self._note(process, taken.own + grown)
            total += taken.proportional + grown + max(0, mapped["RssFile"] - taken.of_files)
        return total

    def count(self) -> int:
        """Bytes that the processes take, exactly."""
        begun = time.perf_counter()
        self._taken = {process: counted(process) for process in self._workshop.processes}
        self._left = 0
        for process, taken in self._taken.items():
            self._note(process, taken.own)
        ended = time.perf_counter()
        self._due = ended + (ended - begun) / _SHARE
        return sum(taken.proportional for taken in self._taken.values())

    def results(self) -> int:
        """Bytes for results: what they have, and at least room for the one in use and the next one."""
        return max(self._workshop.region.allocated, 2 * self._workshop.largest)

    def own(self, stage: str) -> int:
        """The most bytes that one worker of a stage had for itself; of any stage where it has had none."""
        return self._most.get(stage, max(self._most.values(), default=0))

    def _note(self, process: int, own: int) -> None:
        stage = self._workshop.workers.get(process)
        if stage is not None:  # the server's memory is not a worker's
            self._most[stage] = max(self._most.get(stage, 0), own)


def counted(process: int) -> Taken:
    """Nothing of a process that has ended."""
    found = _kilobytes(process, "smaps_rollup", ("Pss", "Pss_Shmem", "Private_Clean", "Private_Dirty"))
    mapped = _mapped(process)
    return Taken(
        proportional=found["Pss"] - found["Pss_Shmem"],
        own=found["Private_Clean"] + found["Private_Dirty"],
        anonymous=mapped["RssAnon"],
        of_files=mapped["RssFile"],
    )


def _mapped(process: int) -> dict[str, int]:
    return _kilobytes(process, "status", ("RssAnon", "RssFile"))


def _kilobytes(process: int, file: str, names: tuple[str, ...]) -> dict[str, int]:
    """Figures that the system gives in units of 1024 bytes, in bytes."""
    found = dict.fromkeys(names, 0)
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/{file}").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = 1024 * int(rest.split()[0])
    return found
