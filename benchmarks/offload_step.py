"""A training step under a budget against the plain step: python benchmarks/offload_step.py [--rounds 9] [--tiny]

Compute runs on one thread, the lanes on another core. ``--part loop`` answers three questions, ``--part rounds`` a
fourth, (d), which step_bound.py explains.

(a) Room for all: how much slower than plain PyTorch? The goal is at most 3 %.
(b) Room for 30 % of the weights, over a simulated link on which the weights that move in take half of the plain step:
    how near to the bound max(compute, bytes / bandwidth)? The goal is 90 %. Compute is the plain step, optimizer
    included, in the same process.
(c) Do the bytes moved, counted where they are copied, equal the formula, to the byte?

    Room for all: every step moves each block in once (its weights were updated) and each gradient out once.
        weights in = S,   gradients out = G
    Room for less: weights in = the sum over all moments of the slot bytes that come in then,   gradients out = G.
        A moment is a use of a block, in the recorded order of forward and backward. At each, the uses to come are gone
        through, nearest first, and a block is chosen if it fits at every moment until its use, in the room that
        activations leave of the budget then, beside the block in use and those chosen before. Chosen blocks that are
        in a slot stay, others come in, up to the first that does not fit; what is not chosen goes. Nothing that
        backward needs comes in before backward begins, and at the beginning of forward nothing is there.
    S is the sum of slot bytes (parameters rounded up to 512 bytes each), G the sum of gradient bytes. The moments are
    recorded by the engine; what moves is worked out here.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass
from typing import Any

import step_bound
import torch
from measure import Comparison, compare
from models import Size, keep_freed_memory, make_model
from transformers import GPT2LMHeadModel

import hydra_ext
from hydra_ext import _C

FULL = Size(layers=8, width=768, tokens=256)
TINY = Size(layers=4, width=128, tokens=64)


class Training:
    """One model, its optimizer, its batch: a step is forward, backward, update."""

    def __init__(self, model: GPT2LMHeadModel, ids: torch.Tensor) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.ids = ids
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


def plain_peak(model: GPT2LMHeadModel, ids: torch.Tensor) -> int:
    """Counter peak of a plain step without its parameters and gradients."""
    probe = copy.deepcopy(model)
    for parameter in probe.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    meter = _C.testing.Meter()
    meter.begin()
    probe(input_ids=ids.clone(), labels=ids.clone(), use_cache=False).loss.backward()
    meter.end()
    return int(meter.ledger.peak)


def slot_bytes(model: GPT2LMHeadModel) -> int:
    return sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())


def gradient_bytes(model: GPT2LMHeadModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@dataclass(frozen=True)
class Moved:
    weights: int
    gradients: int


def moved_in_one_step(run: hydra_ext.Run, training: Training) -> Moved:
    before = run.report()
    training.step()
    after = run.report()
    return Moved(
        after.weights_moved_bytes - before.weights_moved_bytes,
        after.gradients_moved_bytes - before.gradients_moved_bytes,
    )


def weights_in(run: hydra_ext.Run, sizes: list[int]) -> int:
    """The formula for room for less."""
    forward, backward = run.core.pager.recorded(_C.PassKind.FORWARD), run.core.pager.recorded(_C.PassKind.BACKWARD)
    total, present = 0, set[int]()
    for window, later in ((forward, backward), (backward, forward)):
        for now in range(-1, len(window)):  # -1: the window opens
            coming = window[max(now, 0) :] + later
            loadable = len(window) - max(now, 0)
            chosen = choose(coming, loadable, sizes, present, run.budget)
            total += sum(sizes[block] for block in chosen - present)
            present = chosen
    return total


def choose(coming: list[tuple[int, int]], loadable: int, sizes: list[int], present: set[int], budget: int) -> set[int]:
    """Blocks that hold a slot now, given the (block, activation bytes) to come."""
    used = [sizes[block] for block, _ in coming]
    room = [budget - activations for _, activations in coming]
    chosen, rejected, fetching = {coming[0][0]}, set[int](), True
    for when, (block, _) in enumerate(coming):
        if block in chosen or block in rejected:
            continue
        rejected.add(block)
        if block not in present and not (fetching and when < loadable):
            continue
        if all(used[i] + sizes[block] <= room[i] for i in range(when)):
            chosen.add(block)
            for i in range(when):
                used[i] += sizes[block]
        else:
            fetching = False
    return chosen


def room_for_all(model: GPT2LMHeadModel, ids: torch.Tensor, rounds: int) -> tuple[Comparison, bool]:
    plain, offloaded = Training(copy.deepcopy(model), ids), Training(copy.deepcopy(model), ids)
    budget = plain_peak(model, ids) + int(1.1 * gradient_bytes(model))
    device = hydra_ext.SimulatedDevice(poison=False)
    with hydra_ext.offload(offloaded.model, offloaded.optimizer, budget=budget, device=device) as run:
        result = compare(plain.step, offloaded.step, rounds=rounds)
        moved = moved_in_one_step(run, offloaded)
        report = run.report()
    expected = Moved(slot_bytes(model), gradient_bytes(model))
    check_equal(plain, offloaded)
    print(f"(a) moved {moved}, formula {expected}; evictions {report.evictions}, faults {report.faults}")
    return result, moved == expected and report.evictions == 0


def room_for_some(model: GPT2LMHeadModel, ids: torch.Tensor, rounds: int) -> tuple[Comparison, float]:
    plain, offloaded = Training(copy.deepcopy(model), ids), Training(copy.deepcopy(model), ids)
    budget = plain_peak(model, ids) + int(0.3 * gradient_bytes(model))
    compute = compare(plain.step, plain.step, rounds=3).reference_seconds
    probe = Training(copy.deepcopy(model), ids)
    with hydra_ext.offload(probe.model, probe.optimizer, budget=budget) as run:
        for _ in range(2):
            probe.step()
        weights = moved_in_one_step(run, probe).weights
    bandwidth = weights / (0.5 * compute)
    device = hydra_ext.SimulatedDevice(
        to_device_bytes_per_second=bandwidth, to_host_bytes_per_second=bandwidth, poison=False
    )
    with hydra_ext.offload(offloaded.model, offloaded.optimizer, budget=budget, device=device) as run:
        result = compare(plain.step, offloaded.step, rounds=rounds)
        moved = moved_in_one_step(run, offloaded)
        sizes = [sum(-(-p.nbytes // 512) * 512 for _, p in block.parameters) for block in run.layout.blocks]
        expected = Moved(weights_in(run, sizes), gradient_bytes(model))
        print(run.report())
    print(f"(b) moved {moved}, formula {expected}: {'equal' if moved == expected else 'NOT EQUAL'}")
    check_equal(plain, offloaded)
    bound = max(result.reference_seconds, moved.weights / bandwidth)
    print(f"(b) link {bandwidth / 1e9:.2f} GB/s, {moved}, bound {bound:.3f} s, step {result.subject_seconds:.3f} s")
    return result, bound / result.reference_seconds / result.ratio


def check_equal(plain: Training, offloaded: Training) -> None:
    shared = min(len(plain.losses), len(offloaded.losses))
    if not all(torch.equal(a, b) for a, b in zip(plain.losses[:shared], offloaded.losses[:shared], strict=True)):
        sys.exit("the losses of the offloaded run differ from the plain run's")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--part", choices=["loop", "rounds"], help="both unless given")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that the benchmark runs")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.part != "rounds":
        loop(TINY if options.tiny else FULL, options.rounds)
    if options.part != "loop":
        step_bound.main(tiny=options.tiny, rounds=options.rounds)
    return 0


def loop(size: Size, rounds: int) -> None:
    """(a), (b) and (c)."""
    model = make_model(size)
    ids = torch.randint(0, 256, (1, size.tokens))
    print(f"GPT-2 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {size.tokens} tokens")

    result, bytes_equal = room_for_all(model, ids, rounds)
    print(f"(a) plain {result.reference_seconds:.3f} s, offloaded {result.subject_seconds:.3f} s, ratio "
          f"{result.ratio:.4f}, spread {result.spread:.4f}: at most 1.03 "
          f"{result.verdict(margin=0.03, holds=result.ratio <= 1.03)}")  # fmt: skip
    some, of_bound = room_for_some(model, ids, rounds)
    print(f"(b) {of_bound:.1%} of the bound, spread {some.spread:.4f}: at least 90 % "
          f"{some.verdict(margin=0.10, holds=of_bound >= 0.90)}")  # fmt: skip
    print(f"(c) bytes moved with room for all equal the formula: {bytes_equal}")


if __name__ == "__main__":
    sys.exit(main())
