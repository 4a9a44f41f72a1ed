"""What became of the jobs of a fleet."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hydra_ext.errors import JobFailed


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A time during which a job had devices. Times are seconds from the fleet's beginning.

    Attributes:
        technique: What it ran with.
        steps: Steps made by its end.
        failure: Why it ended before its time; None if it did not.
    """

    technique: str
    node: str
    devices: tuple[int, ...]
    start: float
    end: float
    steps: int
    failure: str | None


class Outcome(str, Enum):
    """What became of a job."""

    OPEN = "open"  # it has not ended
    DONE = "done"  # it has made all its steps
    STOPPED = "stopped"  # by its fleet's guide, or on request
    SET_ASIDE = "set aside"  # it has failed too often


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """One job's result.

    Attributes:
        name: Of the job.
        outcome: What became of it.
        losses: The loss of each step, by its number from 1 on.
        evaluation: The mean loss over ``evaluate``'s microbatches; None without it.
        seconds: During which it had devices.
        stretches: Where and how it ran.
        failures: Why it was set aside; empty if it was not.
        folder: Its checkpoints, for :func:`hydra_ext.load_model`.
    """

    name: str
    outcome: Outcome
    losses: Mapping[int, float]
    evaluation: float | None
    seconds: float
    stretches: tuple[Stretch, ...]
    failures: tuple[str, ...]
    folder: Path

    @property
    def is_done(self) -> bool:
        """Whether it has made all its steps."""
        return self.outcome is Outcome.DONE

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return self.losses[max(self.losses)] if self.losses else None


_COLUMNS = ("job", "state", "steps", "loss", "evaluation", "seconds", "runs", "technique", "error")


class Results(Mapping[str, JobResult]):
    """The results of all jobs, by their names. ``str()`` gives a table.

    Attributes:
        seconds: From the fleet's beginning to its end.
        threads: Of torch on the CPU, in each process. Sums there depend on it: see ``torch.set_num_threads``.
    """

    def __init__(self, jobs: Mapping[str, JobResult], *, seconds: float, threads: int | None) -> None:
        self._jobs = dict(jobs)
        self.seconds = seconds
        self.threads = threads

    def __getitem__(self, name: str) -> JobResult:
        return self._jobs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def raise_failures(self) -> None:
        """
        Raises:
            JobFailed: A job was set aside.
        """
        failed = {name: job.failures[-1] for name, job in self._jobs.items() if job.failures and not job.is_done}
        if failed:
            shown = "; ".join(f"{name}: {message}" for name, message in failed.items())
            raise JobFailed(f"{len(failed)} of {len(self)} jobs were set aside: {shown}", failures=failed)

    def rows(self) -> list[dict[str, object]]:
        """A row for each job, the best evaluation or loss first."""
        rows: list[dict[str, object]] = []
        for job in sorted(self._jobs.values(), key=_rank):
            last = job.stretches[-1] if job.stretches else None
            values = (
                job.name,
                job.outcome.value,
                max(job.losses, default=0),
                job.loss,
                job.evaluation,
                job.seconds,
                len(job.stretches),
                "" if last is None else f"{last.technique} on {len(last.devices)}",
                job.failures[-1] if job.failures else "",
            )
            rows.append(dict(zip(_COLUMNS, values, strict=True)))
        return rows

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows, under the names of their columns."""
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())

    def __str__(self) -> str:
        return aligned([_COLUMNS, *(tuple(map(text_of, row.values())) for row in self.rows())])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, with columns as wide as they have to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _rank(job: JobResult) -> tuple[bool, float, str]:
    value = job.evaluation if job.evaluation is not None else job.loss
    return not job.is_done, value if value is not None and math.isfinite(value) else math.inf, job.name


def text_of(value: object) -> str:
    """A cell of a table: one short line."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).splitlines()[0][:60] if str(value) else ""
