"""Four jobs on one simulated device: a fleet whose jobs may share it, beside one whose jobs come one after the other.

Two jobs are bound by the device's link, and two compute for a known time, asleep. Both fleets have the same budget.
Both measure their jobs first, which the figures leave out. Every job has the bits of the job alone in plain PyTorch.

    python benchmarks/packing.py [--rounds 5] [--steps 40]

Prints a line for each round, the medians, and the ratio of both. Exits with 1 if the fleets do not differ by more than
the rounds do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import hydra_ext
from hydra_ext.fleet import Fleet, Job, Results
from support.fleet import drives
from support.fleet.comparison import assert_as_alone

BUDGET = "512KiB"
WAYS = {"after each other": ["offload"], "shared": ["offload", "shared offload"]}


def jobs(steps: int) -> list[Job]:
    loss = partial(drives.slowly, seconds=0.1)
    rates = {"1": 1e-2, "2": 1e-3}
    link = [
        drives.link_bound(f"link-{name}", optimizer=partial(hydra_ext.optim.AdamW, lr=lr), steps=steps)
        for name, lr in rates.items()
    ]
    return [
        *link,
        *(drives.compute_bound(f"compute-{name}", lr=lr, loss=loss, steps=steps) for name, lr in rates.items()),
    ]


def seconds(results: Results) -> float:
    """From the first start to the last end, without the trials."""
    stretches = [stretch for job in results.values() for stretch in job.stretches]
    return max(each.end for each in stretches) - min(each.start for each in stretches)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    given = jobs(options.steps)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way, techniques in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                fleet = Fleet(folder, devices=[drives.SLOW_LINK], budget=BUDGET)
                results = fleet.run(given, techniques=techniques)
                assert_as_alone(results, given)
                found[way].append(seconds(results))
        print(f"round {number + 1}: " + ", ".join(f"{way} {each[-1]:.2f} s" for way, each in found.items()), flush=True)
    medians = {way: statistics.median(each) for way, each in found.items()}
    spread = max(max(each) / min(each) - 1 for each in found.values())
    ratio = medians["shared"] / medians["after each other"]
    print(", ".join(f"{way} {median:.2f} s" for way, median in medians.items()))
    print(f"shared / after each other {ratio:.3f}, spread of the rounds {100 * spread:.1f} %")
    return int(1 - ratio < 2 * spread)


if __name__ == "__main__":
    sys.exit(main())
