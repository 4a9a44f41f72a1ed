"""What a pipeline's plan may choose, and what it runs on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra_ext.errors import PlanError

KINDS = ("1f1b", "gpipe", "interleaved", "2bw")
"""The schedules that are tried, the first one first among equals."""

_MOST_ROUNDS = 4  # stages of a rank in an interleaved schedule
_MOST_SIZES = 16  # of microbatches that are tried


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """One way to train a model on several devices.

    Attributes:
        width: Lines of ranks, each with a copy of the model.
        depth: Ranks of a line.
        stages: Of the model; as many as ``depth``, or a multiple.
        samples: Of a microbatch.
        microbatches: Of a step, in each line.
        schedule: The kind of schedule.
        recompute: Whether stages run their forwards again before their backwards.
    """

    width: int
    depth: int
    stages: int
    samples: int
    microbatches: int
    schedule: str
    recompute: bool


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the ranks run on.

    Attributes:
        devices: Number of devices, one for each rank.
        bytes_per_second: Of a link between two ranks, in each direction.
        latency: Seconds that a message takes beside its bytes.
        update_seconds: Of the optimizer, for each byte of weights.
        state_copies: Bytes of the optimizer's state for each byte of weights.
        weights_at_home: Whether weights are on the host, and only those of one block on the device.
        budget: Device bytes of a rank; None for no limit.
        overlap: Whether messages and sums go on beside computes.
    """

    devices: int
    bytes_per_second: float = math.inf
    latency: float = 0.0
    update_seconds: float = 0.0
    state_copies: float = 2.0
    weights_at_home: bool = False
    budget: int | None = None
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What is given, and so is not chosen. None is free.

    Attributes:
        batch: Samples of a step on all devices.
        schedules: Kinds of schedules.
        width: Lines of ranks.
        stages: Of the model.
        microbatches: Of a step, in each line.
        samples: Of a microbatch: the sizes that may be taken.
        recompute: Whether to recompute.
        cuts: Events at which the stages after the first begin.
    """

    batch: int
    schedules: tuple[str, ...] = KINDS
    width: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    samples: tuple[int, ...] | None = None
    recompute: bool | None = None
    cuts: tuple[int, ...] | None = None

    def choices(self, devices: int, most_stages: int) -> Iterator[PipelineChoice]:
        """All choices that the numbers allow; a schedule may still refuse one.

        Args:
            devices: Number of ranks.
            most_stages: That the model can be cut into.
        """
        for width in divisors(devices):
            depth = devices // width
            if self.width not in (None, width) or self.batch % width:
                continue
            for samples in self._sizes(self.batch // width):
                for kind in self.schedules:
                    for stages in self._stages(kind, depth, most_stages):
                        for recompute in (False, True) if self.recompute is None else (self.recompute,):
                            yield PipelineChoice(
                                width=width,
                                depth=depth,
                                stages=stages,
                                samples=samples,
                                microbatches=self.batch // width // samples,
                                schedule=kind,
                                recompute=recompute,
                            )

    def sizes(self, devices: int) -> list[int]:
        """All sizes of microbatches that may be looked at."""
        widths = [width for width in divisors(devices) if self.width in (None, width) and self.batch % width == 0]
        return sorted({size for width in widths for size in self._sizes(self.batch // width)})

    def _sizes(self, samples: int) -> list[int]:
        found = divisors(samples)
        if self.microbatches is not None:
            found = [size for size in found if size * self.microbatches == samples]
        return thinned(found) if self.samples is None else [size for size in found if size in self.samples]

    def _stages(self, kind: str, depth: int, most: int) -> list[int]:
        if kind == "interleaved":
            several = range(2, _MOST_ROUNDS + 1) if depth > 1 else ()
            found = [rounds * depth for rounds in several]
        else:
            found = [depth]
        if self.stages is not None:
            found = [self.stages] if self.stages % depth == 0 and (kind != "interleaved" or depth > 1) else []
        return [stages for stages in found if stages <= most]


def checked_kinds(schedule: str | Sequence[str] | None) -> tuple[str, ...]:
    """
    Raises:
        PlanError: A kind is not known.
    """
    kinds = KINDS if schedule is None else (schedule,) if isinstance(schedule, str) else tuple(schedule)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise PlanError(f"schedule={schedule!r}: give one or several of {', '.join(KINDS)}, or None for all")
    return kinds


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def thinned(numbers: list[int], most: int = _MOST_SIZES) -> list[int]:
    """At most so many of them, the first and the last one included."""
    if len(numbers) <= most:
        return numbers
    step = (len(numbers) - 1) / (most - 1)
    return [numbers[round(step * place)] for place in range(most)]
