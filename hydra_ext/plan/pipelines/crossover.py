"""From how many devices on a hybrid of data and model parallelism trains faster than data parallelism alone.

The model is that of Pal et al., "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training" (IEEE
Micro 39(5), 2019): the time to train is the seconds of a step times the steps of an epoch times the epochs. More lines
make a larger batch, which takes more epochs. Devices that make each line faster instead leave the batch as it is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hydra_ext.errors import PlanError

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Epochs = Callable[[int], float] | Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class CrossoverPoint:
    """One number of devices.

    Attributes:
        devices: Their number.
        data_parallel: Seconds of the training with a line on each device; infinite if its batch does not converge.
        hybrid: Seconds with several devices in each line; infinite if no number of them divides the devices.
        ways: Devices of a line in the fastest hybrid; 0 if there is none.
    """

    devices: int
    data_parallel: float
    hybrid: float
    ways: int

    @property
    def gain(self) -> float:
        """How many times as fast the hybrid is as data parallelism alone on these devices."""
        if math.isinf(self.hybrid):
            return 0.0 if math.isfinite(self.data_parallel) else 1.0
        return self.data_parallel / self.hybrid


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """A curve over numbers of devices. ``str()`` gives a table."""

    points: tuple[CrossoverPoint, ...]

    @property
    def devices(self) -> int | None:
        """The fewest devices from which on the hybrid is always the faster one; None if it never stays so."""
        found = None
        for point in reversed(self.points):
            if point.gain <= 1:
                break
            found = point.devices
        return found

    @property
    def gain_at_scale(self) -> float:
        """How many times as fast the best hybrid is as the best that data parallelism reaches on any of the numbers."""
        alone = min(point.data_parallel for point in self.points)
        hybrid = min(point.hybrid for point in self.points)
        return 0.0 if math.isinf(hybrid) else alone / hybrid

    def __str__(self) -> str:
        lines = [f"{'devices':>7}  {'data parallel':>13}  {'hybrid':>10}  {'ways':>4}  {'gain':>5}"]
        for point in self.points:
            alone, hybrid = _hours(point.data_parallel), _hours(point.hybrid)
            lines.append(f"{point.devices:>7}  {alone:>13}  {hybrid:>10}  {point.ways or '-':>4}  {point.gain:>5.2f}")
        where = "never" if self.devices is None else f"from {self.devices} devices on"
        return "\n".join([*lines, f"the hybrid is faster {where}; {self.gain_at_scale:.3g} times as fast at scale"])


def crossover(
    epochs: Epochs,
    *,
    epoch_samples: int,
    line_batch: int,
    line_seconds: float,
    speedups: Mapping[int, float],
    gradient_bytes: float = 0.0,
    link: float = math.inf,
    devices: Iterable[int] = DEVICES,
) -> Crossover:
    """Compares hybrids with data parallelism alone over numbers of devices.

    N lines take ``epochs(N * line_batch)`` epochs of ``epoch_samples / (N * line_batch)`` steps, rounded up. A step
    takes ``line_seconds``, divided by the speedup of M devices in a line, and the seconds of the sum of gradients over
    the lines. Each device sums its part of them.

    Args:
        epochs: Epochs until the model is trained, for the samples of a step: a function, or points of a curve. Between
            points it is linear in the logarithm of the samples; below the first it is the first; beyond the last the
            training counts as one that never ends.
        epoch_samples: Samples of an epoch.
        line_batch: Samples of a step in each line.
        line_seconds: Of a line's step on one device, without sums.
        speedups: For each number of devices in a line, how many times as fast its step is, measured or from
            :func:`hydra_ext.plan.pipeline`.
        gradient_bytes: Of the whole model.
        link: Bytes a second of each device, each way, for sums.
        devices: Numbers of devices.

    Raises:
        PlanError: A number makes no sense; the message names it.
    """
    curve = _checked_curve(epochs)
    counts = sorted({*devices})
    _check(counts, epoch_samples, line_batch, line_seconds, speedups, gradient_bytes, link)

    def seconds(lines: int, ways: int) -> float:
        batch = lines * line_batch
        sums = 2 * (lines - 1) / lines * gradient_bytes / ways / link
        step = line_seconds / (speedups[ways] if ways > 1 else 1.0) + sums
        needed = curve(batch)
        if not needed > 0:
            raise PlanError(f"epochs({batch}) is {needed}: give more than 0, or infinity if it does not converge")
        return needed * math.ceil(epoch_samples / batch) * step

    points = []
    for count in counts:
        ways = [each for each in sorted(speedups) if each > 1 and count % each == 0]
        hybrids = [(seconds(count // each, each), each) for each in ways]
        best, chosen = min(hybrids, default=(math.inf, 0))
        points.append(
            CrossoverPoint(
                devices=count,
                data_parallel=seconds(count, 1),
                hybrid=best,
                ways=chosen if math.isfinite(best) else 0,
            )
        )
    return Crossover(points=tuple(points))


def _checked_curve(epochs: Epochs) -> Callable[[int], float]:
    if callable(epochs):
        return epochs
    points = [(int(batch), float(count)) for batch, count in epochs]
    batches = [batch for batch, _ in points]
    if not points or batches[0] < 1 or any(b <= a for a, b in pairwise(batches)):
        raise PlanError(f"epochs={points!r}: give points (samples of a step, epochs) with growing samples")

    def at(batch: int) -> float:
        place = bisect_left(batches, batch)
        if place == len(points):
            return math.inf
        if place == 0 or batches[place] == batch:
            return points[place][1]
        (low, first), (high, second) = points[place - 1], points[place]
        if math.isinf(second):
            return math.inf
        return first + (second - first) * math.log(batch / low) / math.log(high / low)

    return at


def _check(
    counts: Sequence[int],
    epoch_samples: int,
    line_batch: int,
    line_seconds: float,
    speedups: Mapping[int, float],
    gradient_bytes: float,
    link: float,
) -> None:
    positive: dict[str, float] = {
        "epoch_samples": epoch_samples,
        "line_batch": line_batch,
        "line_seconds": line_seconds,
        "link": link,
        **{f"speedups[{ways}]": speedup for ways, speedup in speedups.items()},
        "devices": min(counts, default=1),
    }
    for name, value in positive.items():
        if not value > 0:
            raise PlanError(f"{name}={value}: give more than 0")
    if not counts or any(count < 1 for count in (*counts, *speedups)):
        raise PlanError("devices and the keys of speedups: give numbers of devices, from 1 on")
    if not (gradient_bytes >= 0 and math.isfinite(gradient_bytes)):
        raise PlanError(f"gradient_bytes={gradient_bytes}: give 0 or more")
    if math.isinf(line_seconds):
        raise PlanError("line_seconds is infinite: give the seconds of a step")


def _hours(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds / 3600:.3g} h"
