"""Two runs on one simulated device, together and one after the other: python benchmarks/sharing.py [--rounds 9]

One run is bound by its link: its blocks are large and compute for a short time. The other is bound by compute. Blocks
compute by sleeping for a known time.

    compute     seconds of both runs in plain PyTorch, with the same sleeps, measured in the same round
    link        bytes that are counted where they are copied / bytes a second, for each direction
    joint       the largest of these three
    sleeps      the same with the sum of the sleeps alone as compute, which no program reaches
    one after the other    the sum over the runs of each run's own joint bound

Together and one after the other take turns. Goal: together takes at most 1.05 times the joint bound, in the median.
Every weight has the bits of the run alone in plain PyTorch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hydra_ext

GOAL = 1.05
BYTES_PER_SECOND = 4e6
_FEW = 64  # columns of a weight


@dataclass(frozen=True)
class Shape:
    """One run.

    Attributes:
        rows: Of a block's weight.
        seconds: That one visit of a block computes.
        slots: Blocks that its budget holds.
    """

    blocks: int
    rows: int
    seconds: float
    slots: int
    steps: int

    @property
    def block_bytes(self) -> int:
        return 4 * self.rows * _FEW

    @property
    def compute_seconds(self) -> float:
        return 2 * self.blocks * self.seconds * self.steps  # forward and backward


LINK_BOUND = Shape(blocks=8, rows=256, seconds=0.003, slots=4, steps=24)
COMPUTE_BOUND = Shape(blocks=16, rows=4, seconds=0.01, slots=16, steps=24)


class _Sleep(torch.autograd.Function):
    """Passes a tensor on, forward and backward, after a known time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class Block(nn.Module):
    """Reads few of its weights, and takes a known time."""

    def __init__(self, rows: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, _FEW))
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x * self.weight[0], self._seconds)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class Outcome:
    """Weights after a run, and the bytes that it moved each way."""

    weights: list[torch.Tensor]
    to_device: int = 0
    to_host: int = 0


def train(shape: Shape, device: Any) -> Outcome:
    """A training; in plain PyTorch if ``device`` is None."""
    torch.manual_seed(7)
    model = nn.Sequential(*[Block(shape.rows, shape.seconds) for _ in range(shape.blocks)])
    optimizer = hydra_ext.optim.SGD(model.parameters(), lr=1e-2)

    def steps() -> None:
        for _ in range(shape.steps):
            model(torch.randn(_FEW)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if device is None:
        steps()
        return Outcome([each.detach().clone() for each in model.parameters()])
    with hydra_ext.offload(
        model,
        optimizer,
        device=device,
        budget=budget_of(shape),
        activations=None,
        blocks=list(model),
    ) as run:
        steps()
        backend = run.core.memory.backend
        moved = backend.to_device_statistics.bytes, backend.to_host_statistics.bytes
    return Outcome([each.detach().clone() for each in model.parameters()], *moved)


def budget_of(shape: Shape) -> int:
    return shape.slots * shape.block_bytes + 2**16


def bound(compute: float, outcomes: list[Outcome]) -> float:
    return max(
        compute,
        sum(outcome.to_device for outcome in outcomes) / BYTES_PER_SECOND,
        sum(outcome.to_host for outcome in outcomes) / BYTES_PER_SECOND,
    )


def timed(shapes: list[Shape]) -> tuple[float, list[Outcome], hydra_ext.SharedReport]:
    simulated = hydra_ext.SimulatedDevice(
        to_device_bytes_per_second=BYTES_PER_SECOND, to_host_bytes_per_second=BYTES_PER_SECOND, poison=False
    )
    device = hydra_ext.SharedDevice(simulated, budget=sum(map(budget_of, shapes)))
    outcomes = device.run(
        *[lambda shape=shape: train(shape, device) for shape in shapes],  # type: ignore[misc]
    )
    report = device.report()
    return report.seconds, outcomes, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    shapes = [LINK_BOUND, COMPUTE_BOUND]
    sleeps = sum(shape.compute_seconds for shape in shapes)
    together: list[float] = []
    beside_sleeps: list[float] = []
    singly: list[float] = []
    for number in range(rounds):
        alone, compute = [], []
        for shape in shapes:
            begin = time.monotonic()
            alone.append(train(shape, None))
            compute.append(time.monotonic() - begin)
        seconds, outcomes, report = timed(shapes)
        joint = bound(sum(compute), outcomes)
        one_by_one = [timed([shape]) for shape in shapes]
        own = [bound(plain, parts) for plain, (_, parts, _) in zip(compute, one_by_one, strict=True)]
        for outcome, plain in zip(outcomes, alone, strict=True):
            if not all(map(torch.equal, outcome.weights, plain.weights)):
                raise SystemExit("the weights are not those of the run alone")
        together.append(seconds / joint)
        beside_sleeps.append(seconds / bound(sleeps, outcomes))
        singly.append(sum(each for each, _, _ in one_by_one) / joint)
        print(
            f"round {number}: together {seconds:.3f} s, joint bound {joint:.3f} s ({together[-1]:.3f}); one after the "
            f"other {sum(each for each, _, _ in one_by_one):.3f} s, bounds {own[0]:.3f} + {own[1]:.3f} s; {report}",
            flush=True,
        )
    median = statistics.median(together)
    print(
        f"together / joint bound: median {median:.3f}, {min(together):.3f} to {max(together):.3f} (goal {GOAL}); "
        f"one after the other / joint bound: median {statistics.median(singly):.3f}; together / bound of the sleeps: "
        f"median {statistics.median(beside_sleeps):.3f}"
    )
    print("the goal is met" if median <= GOAL else "the goal is MISSED")
    return 0 if median <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
