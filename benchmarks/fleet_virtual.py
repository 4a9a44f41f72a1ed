"""Fleets of 12 jobs in virtual time: the fleet's own scheduler and planner, beside rules on the same cluster.

Jobs have the curves of Saturn's batches (VLDB 2024) as far as they are published: TXT and IMG are calibrated to the
totals there, with jobs that scale more than linearly and jobs whose curves have a plateau. Gangs take these seconds,
and those of opening, of checkpoints at intervals, and of moves. All executors share the scheduler, so that a rule's job
starts as soon as its devices are free. Random is the mean of 20 plans. Nothing trains, and no seconds are measured but
those of the planner.

    python benchmarks/fleet_virtual.py [--seeds N] [--interval SECONDS]

Prints tables: with exact estimates, with estimates that are wrong by up to 20 %, and what a plan for 300 jobs takes
beside the solver. Then a line for each missed goal. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job_baselines import drawn, largest_first, optimus, smallest_first

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from hydra_ext.fleet.scheduling import planning
from hydra_ext.fleet.scheduling.planning import (
    Choice,
    FleetPlan,
    Held,
    Placed,
    Planner,
    Work,
    arranged,
    follow_plan,
    lower_bound,
    make_plan,
)
from hydra_ext.plan import solve
from support.fleet.virtual_fleet import Curve, VirtualFleet, exact, once

HOUR = 3600.0
LAYOUTS = {"1x8": [8], "4x8": [8, 8, 8, 8], "2+2+4+8": [2, 2, 4, 8]}
# Hours of a job on 1 to 8 devices; there are three jobs of each curve.
FAMILIES = {
    "TXT": {
        "A": (6.0, 3.1, 2.3, 1.95, 1.6, 1.35, 1.0, 0.62),
        "B": (6.6, 3.06, 2.18, 1.94, 1.75, 1.59, 0.92, 0.6),
        "C": (44.0, 14.6, 6.6, 5.1, 4.7, 4.5, 4.3, 3.99),
        "D": (46.29, 15.43, 6.2, 4.9, 4.7, 4.55, 4.4, 3.977),
    },
    "IMG": {
        "R64": (3.3, 1.6, 1.2, 1.0, 0.9, 0.82, 0.77, 0.72),
        "R128": (3.6, 1.75, 1.32, 1.1, 0.98, 0.9, 0.83, 0.78),
        "V64": (26.0, 9.2, 4.3, 3.0, 2.7, 2.45, 2.3, 2.1),
        "V128": (29.55, 9.89, 4.6, 3.2, 2.9, 2.65, 2.45, 2.2667),
    },
}
PUBLISHED = {"TXT": 1.31, "IMG": 1.43}  # margins over the second best, on one node
OPEN, SAVE = 60.0, 40.0
DRAWS = 20
ERROR = 0.2
ROUNDING = 1e-6
OWN_SECONDS = 1.0  # of a plan for 300 jobs, beside the solver's

Rule = Callable[[Mapping[str, Any]], list[list[Any]]]
RULES: dict[str, Rule] = {"Max": largest_first, "Min": smallest_first, "Optimus*": optimus}


def by_rule(rule: Rule) -> Planner:
    """Plans by a rule at the beginning, and follows this plan."""

    def planner(works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None) -> FleetPlan:
        followed = None if before is None else follow_plan(works, nodes, before)
        if followed is not None:
            return followed
        jobs = [
            {"options": [{"gpus": each.devices, "runtime_s": each.seconds} for each in work.choices]} for work in works
        ]
        plan = rule({"nodes": list(nodes.values()), "jobs": jobs})
        names = list(nodes)
        chosen = {
            work.name: Placed(option=option, node=names[node], start=start, end=start)
            for work, (option, node, start) in zip(works, plan, strict=True)
        }
        return arranged(works, nodes, chosen)

    return planner


@dataclass(frozen=True)
class Cell:
    """One family of jobs on one layout, with estimates that are exact, or wrong as a seed says."""

    family: str
    layout: str
    interval: float
    seed: int | None = None

    def fleet(self, planner: Planner) -> VirtualFleet:
        """A fleet that has run."""
        largest = max(LAYOUTS[self.layout])
        jobs: dict[str, Curve] = {
            f"{name}-{number}": {devices: HOUR * hours for devices, hours in enumerate(curve, 1) if devices <= largest}
            for name, curve in FAMILIES[self.family].items()
            for number in (1, 2, 3)
        }
        fleet = VirtualFleet(
            {f"node{number}": devices for number, devices in enumerate(LAYOUTS[self.layout])},
            jobs,
            open=OPEN,
            save=SAVE,
            interval=self.interval,
            errors=exact if self.seed is None else self._error,
            planner=planner,
        )
        fleet.run()
        if set(fleet.cluster.saved.values()) != {fleet.steps} or len(fleet.cluster.saved) != len(jobs):
            raise ValueError(f"{self}: jobs have not ended")
        return fleet

    def _error(self, job: str, technique: str, devices: int) -> float:
        return 1 + random.Random(f"{self.seed} {job} {devices}").uniform(-ERROR, ERROR)

    def rules(self) -> dict[str, float]:
        """Seconds by each rule."""
        seconds = {name: self.fleet(by_rule(rule)).cluster.now() for name, rule in RULES.items()}
        draws = [self.fleet(by_rule(lambda problem, n=n: drawn(problem, n))).cluster.now() for n in range(DRAWS)]  # type: ignore[misc]
        return seconds | {"random": statistics.fmean(draws)}


def with_exact_estimates(interval: float) -> list[str]:
    print(
        "| jobs | devices | ours, h | planned once | bound, h | moves | plans | planning, s | Max | Min | Optimus* |",
        end="",
    )
    print(" random | margin | published |\n|" + " --- |" * 14)
    missed = []
    for family in FAMILIES:
        for layout in LAYOUTS:
            cell = Cell(family, layout, interval)
            begun = time.process_time()
            fleet = cell.fleet(make_plan)
            planning_s = time.process_time() - begun
            ours, at_once, rules = fleet.cluster.now(), cell.fleet(once).cluster.now(), cell.rules()
            margin, bound = min(rules.values()) / ours, fleet.events("plan")[0]["bound"]
            texts = [family, layout, f"{ours / HOUR:.2f}", f"{at_once / ours:.3f}", f"{bound / HOUR:.2f}"]
            texts += [str(fleet.moves), str(fleet.scheduler.plans), f"{planning_s:.1f}"]
            texts += [f"{seconds / ours:.2f}" for seconds in rules.values()]
            texts += [f"{margin:.3f}", f"{PUBLISHED[family]:.2f}"]
            print(f"| {' | '.join(texts)} |", flush=True)
            if round(margin, 2) < PUBLISHED[family]:  # which has two digits, too
                missed.append(f"{family} on {layout}: margin {margin:.3f} over the second best, {PUBLISHED[family]}")
            if ours > at_once * (1 + ROUNDING):
                missed.append(f"{family} on {layout}: {ours:.0f} s, and {at_once:.0f} s if planned once")
    return missed


def with_wrong_estimates(interval: float, seeds: int) -> list[str]:
    print("\n| jobs | devices | ours, h | planned once | moves | Max | Min | Optimus* | best rule of each seed |")
    print("|" + " --- |" * 9)
    missed = []
    for family in FAMILIES:
        for layout in LAYOUTS:
            rows = []
            for seed in range(seeds):
                cell = Cell(family, layout, interval, seed)
                fleet = cell.fleet(make_plan)
                rules = [cell.fleet(by_rule(rule)).cluster.now() for rule in RULES.values()]
                seconds = [cell.fleet(once).cluster.now(), *rules, min(rules)]
                rows.append([fleet.cluster.now(), fleet.moves, *(each / fleet.cluster.now() for each in seconds)])
            ours, moves, at_once, *others = (statistics.fmean(column) for column in zip(*rows, strict=True))
            texts = [family, layout, f"{ours / HOUR:.2f}", f"{at_once:.3f}", f"{moves:.1f}"]
            print(f"| {' | '.join([*texts, *(f'{each:.2f}' for each in others)])} |", flush=True)
            if at_once < 1 or others[-1] < 1:
                missed.append(f"{family} on {layout}, wrong estimates: {at_once:.3f} once, {others[-1]:.3f} by rules")
    return missed


def with_many_jobs() -> list[str]:
    """What plans for 300 jobs on 32 devices take, at the beginning and while jobs run."""
    spent = 0.0

    def timed(*given: Any, **more: Any) -> Any:
        nonlocal spent
        begun = time.process_time()
        try:
            return solve(*given, **more)
        finally:
            spent += time.process_time() - begun

    planning.solve = timed
    print("\n| 300 jobs on | plan | solver, s | beside it, s | arranged once, ms | makespan over bound |")
    print("|" + " --- |" * 6)
    missed = []
    for name, sizes in {"4x8": [8] * 4, "1x32": [32], "32x1": [1] * 32, "2+2+4+8+16": [2, 2, 4, 8, 16]}.items():
        nodes = {f"node{number}": devices for number, devices in enumerate(sizes)}
        rng, plan = random.Random(0), None
        works = [_work(f"job{number}", max(sizes), rng) for number in range(300)]
        for when in ("first", "later"):
            spent, begun = 0.0, time.process_time()
            plan = make_plan(works, nodes, seed=0, before=plan)
            own = time.process_time() - begun - spent
            begun = time.process_time()
            arranged(works, nodes, plan.jobs, keeps_nodes=False)
            texts = [name, when, f"{spent:.2f}", f"{own:.2f}", f"{1000 * (time.process_time() - begun):.1f}"]
            print(f"| {' | '.join(texts)} | {plan.makespan / lower_bound(works, nodes):.3f} |", flush=True)
            if own > OWN_SECONDS:
                missed.append(f"300 jobs on {name}: a plan takes {own:.2f} s beside the solver")
            works = _later(works, plan, rng)
    planning.solve = solve
    return missed


def _work(name: str, most: int, rng: random.Random) -> Work:
    work, part = rng.uniform(100, 1000), rng.uniform(0.02, 0.4)
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    return Work(name=name, choices=[Choice(devices=n, seconds=work * (part + (1 - part) / n) + 5) for n in counts])


def _later(works: Sequence[Work], plan: FleetPlan, rng: random.Random) -> list[Work]:
    """When a tenth of the time has passed, and jobs take longer or less long than they were to."""
    now, left = 0.1 * plan.makespan, []
    for work in works:
        placed = plan.jobs[work.name]
        if placed.end <= now:
            continue
        begun = max(0.0, now - placed.start) / (placed.end - placed.start)
        factor = (1 - begun) * rng.uniform(0.7, 1.3)
        choices = [Choice(devices=each.devices, seconds=each.seconds * factor) for each in work.choices]
        devices = choices[placed.option].devices
        held = Held(node=placed.node, devices=devices, option=placed.option, leave=5.0) if begun else None
        left.append(Work(name=work.name, choices=choices, held=held))
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of wrong estimates")
    parser.add_argument("--interval", type=float, default=1000.0, help="seconds between plans, and checkpoints")
    options = parser.parse_args()
    missed = with_exact_estimates(options.interval)
    missed += with_wrong_estimates(options.interval, options.seeds)
    missed += with_many_jobs()
    print("", *missed or ["every goal is met"], sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
