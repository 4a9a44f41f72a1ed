"""Twelve small language models on two simulated devices: the fleet's makespan beside its bounds and two simple orders.

The devices' links have a speed, so that most of a step is a wait, and two trainings at a time do not compete for cores.
*One each* runs every job on one device, in the order given. *One after another* gives every job both devices, with a
larger budget that its pipelines need, which only favours it. Each fleet measures its jobs before, which the figures
leave out. The bound is max(area / devices, longest job) of the round's trials.

    python benchmarks/fleet.py [--rounds 3] [--steps 40]

Prints a table, and a line for each goal. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hydra_ext.fleet import Fleet, Job, Results, history
from hydra_ext.fleet.scheduling.trials import Measured
from hydra_ext.policy import SimulatedDevice
from support.fleet import language_models

BUDGET = "800KiB"
ROOMY = "3MiB"  # a pipeline keeps activations of several microbatches
LINK = 20e6  # bytes a second, each way
DEVICE = SimulatedDevice(to_device_bytes_per_second=LINK, to_host_bytes_per_second=LINK, poison=False)
OF_BOUND, OF_ORDERS = 1.05, 1.02


def seconds(results: Results) -> float:
    """From the first start to the last end, without the trials."""
    stretches = [stretch for job in results.values() for stretch in job.stretches]
    return max(each.end for each in stretches) - min(each.start for each in stretches)


def bound(jobs: list[Job], measured: dict[str, Measured], devices: int) -> float:
    area, longest = 0.0, 0.0
    for job in jobs:
        times = [
            (option.devices, option.open_s + job.steps * option.step_s + option.save_s)
            for option in measured[job.name].options
        ]
        area += min(count * time for count, time in times)
        longest = max(longest, min(time for _, time in times))
    return max(area / devices, longest)


def one_round(jobs: list[Job], folder: Path) -> dict[str, float]:
    devices = [DEVICE, DEVICE]
    fleet = Fleet(folder / "fleet", devices=devices, budget=BUDGET)
    results = fleet.run(jobs, techniques=["offload", "pipeline"])
    results.raise_failures()
    past = history.load(folder / "fleet")
    measured = {job.name: found for job in jobs if (found := past.measured_of(job.name)) is not None}
    found = {"fleet": seconds(results), "bound": bound(jobs, measured, len(devices))}
    each = Fleet(folder / "each", devices=devices, budget=BUDGET).run(jobs, techniques=["offload"])
    found["one each"] = seconds(each)
    after = Fleet(folder / "after", devices=devices, budget=ROOMY).run(jobs, techniques=["pipeline"])
    found["one after another"] = seconds(after)
    for other in (each, after):
        if any(dict(other[job.name].losses) != dict(results[job.name].losses) for job in jobs):
            sys.exit("losses differ")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    jobs = language_models.jobs(steps=options.steps)
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(jobs, Path(folder)))
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {value:.2f} s" for name, value in rounds[-1].items()),
            flush=True,
        )
    of_bound = statistics.median(each["fleet"] / each["bound"] for each in rounds)
    of_orders = statistics.median(each["fleet"] / min(each["one each"], each["one after another"]) for each in rounds)
    spread = max(each["fleet"] for each in rounds) / min(each["fleet"] for each in rounds) - 1
    print(f"makespan / bound {of_bound:.3f} (goal at most {OF_BOUND}), spread of the rounds {100 * spread:.1f} %")
    print(f"makespan / better of the two orders {of_orders:.3f} (goal at most {OF_ORDERS})")
    missed = of_bound > OF_BOUND or of_orders > OF_ORDERS
    print("a goal is missed" if missed else "every goal is met")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
