"""Training from the disk against what the disk gives: python benchmarks/disk.py [--folder DIR] [--rounds 9] [--quick]

Weights, gradients and optimizer state all have their home on the disk, under the smallest host_budget= that there can
be. The device, a simulated one with a link of unlimited speed, has room for the activations and for some blocks, so
that most weights are read in forward and again in backward. Compute runs on one thread, all else on the other cores.

(a) What does the disk give? Pieces as large as those of the spill file, as many threads, past the system's cache where
    the file system allows it, in a file of its own in the same folder, without checksums: reads alone, writes alone,
    and the mix, which is both, evenly among each other, in the proportion of a training step's.
(b) A batch so small that compute takes less than the disk: how near does a step come to the bound? The goal is 85 %.

        bound  =  bytes that the step moves, counted where they are moved / speed of the mix in the same round
        floor  =  max(forward, its bytes / speed) + max(backward, its bytes / speed)

    Forward and backward are those of the same step with all on the host, and a forward's bytes are its weights' and
    those of the update that it hides. No schedule undercuts the floor: an update begins when backward has ended.
    Where the cores share memory, or a host's threads, with the disk, this moves less while they compute: so the mix is
    measured once more beside steps with all on the host, as many as with all on the disk. That judges nothing.
(c) A batch so large that compute takes three times what the disk does: how much longer does a step take than with all
    on the host? The goal is at most 5 %.

A step is timed right behind another, whose update it has to hide. Whatever is timed begins when the disk is idle.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from disk_bound import Disk, Moved
from measure import Series, verdict
from models import Size, keep_freed_memory, make_model, parameter_bytes

import hydra_ext
from hydra_ext import _C
from hydra_ext.errors import HostBudgetTooSmall
from hydra_ext.optim import AdamW

BLOCKS_OF_ROOM = 3
STEPS = 2  # timed together
OF_BOUND, SLOWER = 0.85, 1.05
COMPUTE_SHARE = 3.0  # of what the disk takes, for (c)


@dataclass(frozen=True)
class Scale:
    """``small`` batches for (b), of one row; ``large`` ones for (c), of as many rows as it takes."""

    small: Size
    large: Size
    half: int


FULL = Scale(small=Size(layers=16, width=768, tokens=16), large=Size(layers=16, width=384, tokens=256), half=2**30)
QUICK = Scale(small=Size(layers=12, width=512, tokens=16), large=Size(layers=12, width=256, tokens=128), half=2**28)


@dataclass(frozen=True)
class Amounts:
    """Of one step; ``forward`` with the update that it hides."""

    forward: Moved
    backward: Moved

    @property
    def step(self) -> Moved:
        return self.forward + self.backward


# ---- what is trained ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of one step."""

    forward: float
    backward: float  # and all else but the forward

    @property
    def step(self) -> float:
        return self.forward + self.backward


class Training:
    """Steps of one offloaded model."""

    def __init__(self, run: hydra_ext.Run, model: torch.nn.Module, optimizer: AdamW, ids: torch.Tensor) -> None:
        self.run, self._model, self._optimizer, self._ids = run, model, optimizer, ids
        self.losses: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> float:
        """Seconds in forward."""
        begin = time.perf_counter()
        loss = self.forward()
        seconds = time.perf_counter() - begin
        loss.backward()
        self.update()
        return seconds

    def times(self) -> Times:
        """Of some steps on average, the first of which has another one's update to hide."""
        self.step()
        begin = time.perf_counter()
        forward = sum(self.step() for _ in range(STEPS))
        seconds = time.perf_counter() - begin
        self.settle()
        return Times(forward / STEPS, (seconds - forward) / STEPS)

    def settle(self) -> Moved:
        """Returns when the update has ended and the disk is idle: what has moved since the beginning."""
        self.run.core.update.finish()
        before = None
        while before != (now := self._moved()):
            before = now
            time.sleep(0.1)
        return now

    def _moved(self) -> Moved:
        disk = self.run.core.homes.disk.statistics
        return Moved(disk.read_bytes, disk.written_bytes)

    def steps(self, number: int) -> Moved:
        begin = self.settle()
        for _ in range(number):
            self.step()
        return self.settle() - begin

    def amounts(self) -> Amounts:
        """Of a step that has another one's update to hide, as those have that are timed."""
        once, more = self.steps(1), self.steps(1 + STEPS)
        step = Moved((more.read - once.read) // STEPS, (more.written - once.written) // STEPS)
        loss = self.forward()
        after_forward = self.settle()
        loss.backward()
        backward = self.settle() - after_forward
        self.update()
        self.settle()
        return Amounts(step - backward, backward)


@dataclass(frozen=True)
class Bench:
    """What is trained, under which budget of the device."""

    size: Size
    rows: int
    budget: int

    @classmethod
    def make(cls, size: Size, rows: int) -> Bench:
        """With room for the activations and for some blocks."""
        with cls(size, rows, 2**40).training(None) as roomy:
            roomy.step()
            kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
            activations = max(held for kind in kinds for _, held in roomy.run.core.pager.recorded(kind))
        layer = parameter_bytes(make_model(replace(size, layers=1)).transformer.h[0])
        return cls(size, rows, activations + BLOCKS_OF_ROOM * layer)

    @contextmanager
    def training(self, folder: Path | None) -> Iterator[Training]:
        """With all that can be there in the folder; with nothing on the disk for None."""
        model = make_model(self.size)
        optimizer = AdamW(model.parameters(), lr=1e-4)
        ids = torch.randint(0, 256, (self.rows, self.size.tokens), generator=torch.Generator().manual_seed(1))

        def context(host_budget: int | None) -> hydra_ext.offload:
            device = hydra_ext.SimulatedDevice(poison=False)
            return hydra_ext.offload(
                model, optimizer, budget=self.budget, device=device, host_budget=host_budget, spill_dir=folder
            )

        with context(smallest_budget(context) if folder else None) as run:
            yield Training(run, model, optimizer, ids)


def smallest_budget(context: Any) -> int:
    try:
        with context(1):
            sys.exit("nothing of the model is on the disk, or all that moves it takes one byte")
    except HostBudgetTooSmall as error:
        return error.smallest_budget


def check_equal(one: Training, other: Training) -> None:
    shared = min(len(one.losses), len(other.losses))
    if not all(torch.equal(a, b) for a, b in zip(one.losses[:shared], other.losses[:shared], strict=True)):
        sys.exit("the losses with everything on the disk differ from those with everything on the host")


# ---- (a) and (b) ----------------------------------------------------------------------------------------------------

WAITS = ("waited_for_disk_seconds", "waited_for_weights_seconds", "waited_for_gradients_seconds",
         "waited_at_window_end_seconds", "waited_for_updates_seconds", "update_seconds")  # fmt: skip


def disk_binds(bench: Bench, disk: Disk, folder: Path, rounds: int) -> None:
    with bench.training(folder) as spilled, bench.training(None) as held:
        for each in (spilled, held):
            each.times()
        amounts = spilled.amounts()
        step, half = amounts.step, amounts.step.total // 2
        reads: list[float] = []
        writes: list[float] = []
        mixes: tuple[list[float], list[float]] = [], []
        steps: tuple[list[Times], list[Times]] = [], []
        hosts: list[Times] = []
        beside: list[float] = []
        waited = dict.fromkeys(WAITS, 0.0)
        for _ in range(rounds):
            reads.append(disk.seconds(Moved(half, 0)))
            writes.append(disk.seconds(Moved(0, half)))
            for mix, times in zip(mixes, steps, strict=True):
                mix.append(disk.seconds(step))
                before = spilled.run.report()
                times.append(spilled.times())
                after = spilled.run.report()
                for name in WAITS:
                    waited[name] += getattr(after, name) - getattr(before, name)
            hosts.append(held.times())
            beside.append(seconds_beside(held, disk, step, pace=steps[1][-1].step))
        check_equal(spilled, held)
        print(spilled.run.report())
    print(
        f"(a) reads {speed(half, reads)}, writes {speed(half, writes)}, mix {speed(step.total, mixes[0] + mixes[1])}, "
        f"beside compute {speed(step.total, beside)}"
    )
    of_that = statistics.median(bound / (a.step + b.step) * 2 for bound, a, b in zip(beside, *steps, strict=True))
    print(f"(b) {of_that:.1%} of what the disk gives beside compute")
    every = 2 * rounds * (STEPS + 1)
    print("(b) seconds of a step: " + ", ".join(f"{name} {seconds / every:.3f}" for name, seconds in waited.items()))
    series = Series(
        {
            "mix": mixes[0],
            "mix again": mixes[1],
            "step": [each.step for each in steps[0]],
            "step again": [each.step for each in steps[1]],
        }
    )
    judge_bound(series, amounts, hosts, [each.forward for each in steps[0] + steps[1]])


def seconds_beside(held: Training, disk: Disk, amount: Moved, *, pace: float) -> float:
    """Of the disk, for so many bytes, while a step is made every ``pace`` seconds."""
    times = 3  # so that what is computed is spread as it is in steps
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(lambda: sum(disk.seconds(amount) for _ in range(times)))
        while not moving.done():
            begin = time.perf_counter()
            held.step()
            wait([moving], timeout=max(0.0, pace - (time.perf_counter() - begin)))
    held.settle()
    return moving.result() / times


def speed(amount: int, seconds: list[float]) -> str:
    low, middle, high = (amount / each / 1e9 for each in reversed(statistics.quantiles(seconds, n=4)))
    return f"{middle:.2f} GB/s ({low:.2f} to {high:.2f})"


def judge_bound(series: Series, amounts: Amounts, hosts: list[Times], forwards: list[float]) -> None:
    bounds, steps = ([(a + b) / 2 for a, b in zip(series.seconds[name], series.seconds[f"{name} again"], strict=True)]
                     for name in ("mix", "step"))  # fmt: skip
    share = amounts.forward.total / amounts.step.total
    floors = [
        max(host.forward, share * bound) + max(host.backward, (1 - share) * bound)
        for host, bound in zip(hosts, bounds, strict=True)
    ]
    of_bound, of_floor = (
        statistics.median(each / step for each, step in zip(limits, steps, strict=True)) for limits in (bounds, floors)
    )
    spread = max(series.spread(name, f"{name} again") for name in ("mix", "step"))
    forward, backward = (statistics.median(getattr(host, name) for host in hosts) for name in ("forward", "backward"))
    print(
        f"(b) {amounts}; on the host forward {forward:.3f} s, backward {backward:.3f} s; bound "
        f"{statistics.median(bounds):.3f} s, floor {statistics.median(floors):.3f} s, step "
        f"{statistics.median(steps):.3f} s, {statistics.median(forwards):.3f} s of it forward"
    )
    print(
        f"(b) {of_bound:.1%} of the bound ({of_floor:.1%} of the floor), spread {spread:.4f}: at least {OF_BOUND:.0%} "
        f"{verdict(spread, margin=1 - OF_BOUND, holds=of_bound >= OF_BOUND)}",
        flush=True,
    )


# ---- (c) ------------------------------------------------------------------------------------------------------------


def rows_for(size: Size, disk: Disk, folder: Path) -> int:
    bench = Bench.make(size, 1)
    with bench.training(folder) as spilled, bench.training(None) as held:
        held.times()
        spilled.step()
        return math.ceil(COMPUTE_SHARE * disk.seconds(spilled.amounts().step) / held.times().step)


def disk_is_hidden(size: Size, disk: Disk, folder: Path, rounds: int) -> None:
    bench = Bench.make(size, rows_for(size, disk, folder))
    with bench.training(folder) as spilled, bench.training(None) as held:
        for each in (spilled, held):
            each.times()
        amounts = spilled.amounts()
        before: list[Times] = []
        steps: list[Times] = []
        after: list[Times] = []
        mixes: list[float] = []
        for _ in range(rounds):
            before.append(held.times())
            steps.append(spilled.times())
            after.append(held.times())
            mixes.append(disk.seconds(amounts.step))
        check_equal(spilled, held)
        print(spilled.run.report())
    series = Series({"held": [each.step for each in before], "held again": [each.step for each in after]})
    spread = series.spread("held", "held again")
    hosts = [(a.step + b.step) / 2 for a, b in zip(before, after, strict=True)]
    slower = statistics.median(step.step / host for step, host in zip(steps, hosts, strict=True))
    mix, forward = statistics.median(mixes), statistics.median(each.forward for each in before + after)
    share = amounts.forward.total / amounts.step.total
    print(
        f"(c) {bench.rows} rows of {size.tokens} tokens; on the host {statistics.median(hosts):.3f} s, {forward:.3f} s "
        f"of it forward; {amounts}, at the mix's speed {mix:.3f} s, {share * mix:.3f} s of it in forward; step "
        f"{statistics.median(each.step for each in steps):.3f} s, "
        f"{statistics.median(each.forward for each in steps):.3f} s of it forward"
    )
    print(
        f"(c) compute {statistics.median(h / m for h, m in zip(hosts, mixes, strict=True)):.1f} times the disk, ratio "
        f"{slower:.4f}, spread {spread:.4f}: at most {SLOWER} "
        f"{verdict(spread, margin=SLOWER - 1, holds=slower <= SLOWER)}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk in question; here unless given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small models and 3 rounds, to see that it runs")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    scale, rounds = (QUICK, 3) if options.quick else (FULL, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        disk = Disk(folder, scale.half)
        if not disk.bypasses_cache:
            print(
                "(a) the file system allows no transfers past the cache: these are the cache's figures, not the disk's"
            )
        bench = Bench.make(scale.small, 1)
        print(f"(b) {scale.small}, {parameter_bytes(make_model(scale.small)) / 1e6:.0f} MB of weights")
        disk_binds(bench, disk, folder, rounds)
        disk_is_hidden(scale.large, disk, folder, rounds)
        disk.close()
    if options.quick:
        print("these sizes and 3 rounds judge nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
