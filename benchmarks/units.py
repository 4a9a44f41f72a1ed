"""Shard units of many models on a few devices: makespans of policies beside the bound, and seconds to schedule them.

Models of Hydra's simulations train for an epoch each, without loads: equal ones take 2 h and have 2000 units, different
ones take 0.5 to 4 h and have 100 to 10,000 units. Then models of three shards alternate with loads, forward and
backward, with one microbatch or four on each shard. Seconds to schedule are those of the CPU.

    python benchmarks/units.py [--seeds N]

Prints the tables, and a line for each goal that is missed. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from unit_cells import Problem, cell, sharded

from hydra_ext.plan.units import simulate

BASELINES = ("random", "round_robin", "shortest_first")
POLICIES = ("lrtf", "lrtf_affinity", *BASELINES)
CELLS = [(models, devices) for models in (8, 64) for devices in (4, 8)]
LOADS = (0.3, 1.0, 3.0, 10.0)  # seconds of a load; a unit takes 1 s forward and 2 s backward
MOST_OVER_BOUND = 1.001
LEAST_MARGIN = 1.05  # of random over the longest first, on 8 different models and 4 devices
MANY_UNITS = 340_000
MOST_SECONDS = 1.0


@dataclass(frozen=True)
class Cell:
    """Means over problems; the worst of the longest first."""

    models: int
    devices: int
    equal: bool
    units: float
    seconds: float  # of the CPU, the most
    worst: float  # makespan of the longest first over the bound
    over: dict[str, float]  # means of all policies

    def __str__(self) -> str:
        kind = "equal" if self.equal else "different"
        numbers = [f"{self.units:.0f}", f"{self.seconds:.3f}", f"{self.worst:.6f}"]
        numbers += [f"{self.over[policy]:.4f}" for policy in ("lrtf", *BASELINES)]
        return f"| {self.models} {kind} | {self.devices} | {' | '.join(numbers)} |"

    def missed(self) -> Iterator[str]:
        name = f"{self.models} models, {self.devices} devices, equal={self.equal}"
        if self.worst > MOST_OVER_BOUND:
            yield f"{name}: the longest first take {self.worst:.6f} times the bound"
        margin = self.over["random"] / self.over["lrtf"]
        if (self.models, self.devices, self.equal) == (8, 4, False) and margin < LEAST_MARGIN:
            yield f"{name}: random takes {margin:.4f} times as long as the longest first"


def measured(models: int, devices: int, *, equal: bool, seeds: int) -> Cell:
    over: dict[str, list[float]] = {policy: [] for policy in ("lrtf", *BASELINES)}
    units, times = [], []
    for seed in range(seeds):
        problem = cell(seed, models=models, devices=devices, equal=equal)
        for policy, found in over.items():
            begun = time.process_time()
            schedule = simulate({**problem, "policy": policy}, seed=seed)
            times.append(time.process_time() - begun)
            found.append(schedule.makespan / schedule.bound)
        units.append(schedule.units)
    means = {policy: statistics.fmean(found) for policy, found in over.items()}
    return Cell(models, devices, equal, statistics.fmean(units), max(times), max(over["lrtf"]), means)


def many_units() -> tuple[int, float]:
    """340,000 units of 64 models on 8 devices, and the seconds that they take."""
    problem = cell(0, models=64, devices=8, equal=True)
    for job in problem["jobs"]:
        job["batches"] = -(-MANY_UNITS // 64)
    begun = time.process_time()
    schedule = simulate(problem)
    return schedule.units, time.process_time() - begun


def with_loads(problem: Problem) -> list[str]:
    """Makespan over the bound, and the part of the time that links are busy, for each policy."""
    found = [simulate({**problem, "policy": policy}) for policy in POLICIES]
    busy = [each.load_seconds / each.makespan / problem["devices"] for each in found]
    return [f"{each.makespan / each.bound:.3f} ({100 * link:.0f} %)" for each, link in zip(found, busy, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    print("| models | devices | units | CPU, s | lrtf, worst | lrtf | random | round robin | shortest first |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    faults = []
    for equal in (True, False):
        for models, devices in CELLS:
            row = measured(models, devices, equal=equal, seeds=options.seeds)
            print(row, flush=True)
            faults += row.missed()
    units, seconds = many_units()
    print(f"\n{units} units are scheduled in {seconds:.3f} s of the CPU.\n")
    if seconds > MOST_SECONDS:
        faults.append(f"{units} units take {seconds:.3f} s")
    print(
        "| models | devices | microbatches | load, s | lrtf | lrtf_affinity | random | round robin | shortest first |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for models, devices in ((4, 1), (8, 4)):
        for microbatches in (1, 4):
            for load in LOADS:
                row = with_loads(sharded(models, devices=devices, microbatches=microbatches, load=load, batches=100))
                print(f"| {models} | {devices} | {microbatches} | {load} | {' | '.join(row)} |", flush=True)
    print(*["", *(faults or ["every goal is met"])], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
