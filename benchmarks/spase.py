"""Batches of jobs on nodes: makespans of the planner beside the best known ones, and beside those of simple rules.

``--data`` is a folder with problems of kind ``spase``, whose ``reference`` has the best known makespan. Makespans are
counted by an evaluator of this benchmark. Seconds are those of the CPU. Random is the mean of 20 plans.

    python benchmarks/spase.py --data FOLDER [--seeds N] [--effort N]

With several seeds the worst makespan counts. Prints a table, and a line for each goal. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job_baselines import drawn, largest_first, makespan_of, optimus, smallest_first

from hydra_ext.plan import solve

SAME = 1e-6
DRAWS = 20
MARGINS = {"txt-like-1x8": 1.31, "img-like-2x8": 1.43}  # published ones, over the second best


@dataclass(frozen=True)
class Row:
    name: str
    jobs: int
    known: float  # the best makespan that is known
    known_bound: float
    makespan: float  # the worst of all seeds
    bound: float
    seconds: float  # the most of all seeds
    rules: tuple[float, ...]  # Max, Min, Optimus*, random

    @property
    def margin(self) -> float:
        return min(self.rules) / self.makespan

    def __str__(self) -> str:
        numbers = [f"{self.known:.1f}", f"{self.makespan:.1f}", f"{100 * (self.makespan / self.known - 1):+.4f} %"]
        numbers += [f"{self.bound:.1f}", f"{100 * (1 - self.bound / self.makespan):.3f} %", f"{self.seconds:.2f}"]
        numbers += [f"{rule / self.makespan:.2f}" for rule in self.rules]
        return f"| {self.name} | {self.jobs} | {' | '.join(numbers)} |"


def measured(name: str, problem: dict[str, Any], seeds: int, effort: int) -> Row:
    makespans, bounds, times = [], [], []
    for seed in range(seeds):
        begun = time.process_time()
        found = solve("spase", problem, seed=seed, effort=effort)
        times.append(time.process_time() - begun)
        makespan = makespan_of(problem, found.plan)  # type: ignore[arg-type]
        if makespan != found.objective or found.bound is None or found.bound > makespan:
            raise ValueError(f"{name}: makespan {makespan}, objective {found.objective}, bound {found.bound}")
        makespans.append(makespan)
        bounds.append(found.bound)
    rules = [makespan_of(problem, rule(problem)) for rule in (largest_first, smallest_first, optimus)]
    rules.append(statistics.fmean(makespan_of(problem, drawn(problem, seed)) for seed in range(DRAWS)))
    known = problem["reference"]
    return Row(
        name,
        len(problem["jobs"]),
        known["best_makespan_s"],
        known["lower_bound_best_s"],
        max(makespans),
        max(bounds),
        max(times),
        tuple(rules),
    )


def missed(row: Row) -> list[str]:
    goals = {
        f"makespan {row.makespan}, known {row.known}": row.makespan <= row.known * (1 + SAME),
        f"makespan {row.makespan} below the known bound {row.known_bound}": row.makespan
        >= row.known_bound * (1 - SAME),
        f"bound {row.bound} above the best known makespan {row.known}": row.bound <= row.known * (1 + SAME),
        f"{row.seconds:.2f} s": row.jobs > 300 or row.seconds <= (1 if row.jobs <= 100 else 10),
        f"margin {row.margin:.2f}": row.margin >= MARGINS.get(row.name, 1 - SAME),
    }
    return [f"{row.name}: {goal}" for goal, is_met in goals.items() if not is_met]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--effort", type=int, default=1)
    options = parser.parse_args()
    print(
        "| problem | jobs | best known, s | ours, s | apart | bound, s | gap | CPU, s | Max | Min | Optimus* | random |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    faults = []
    for path in sorted(options.data.glob("*.json")):
        row = measured(path.stem, json.loads(path.read_text()), options.seeds, options.effort)
        print(row, flush=True)
        faults += missed(row)
    print(*faults or ["every goal is met"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
