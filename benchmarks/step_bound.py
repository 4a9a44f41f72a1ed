"""Part (d) of offload_step.py: run.step over several microbatches against what its slowest resource allows.

Steps with hydra_ext.optim.AdamW and clipping, on a simulated device whose link and whose host's memory have speeds such
that each of these takes a chosen share of compute:

    compute      the plain forward and backward of the same microbatches, no optimizer; one thread, the same process
    to device    bytes of weights / speed of the link, counted where they are copied
    to host      bytes of gradients / speed of the link, likewise
    optimizer    bytes that the update reads and writes / speed of the host's memory

    bound  =  max(compute, to device, to host, optimizer)  +  max(0, optimizer - forward of the first round)

The second part is there because clipping to the exact norm lets no update start before backward has ended, so that only
the next forward can hide it. Goals: 95 % of the bound where one resource takes twice the second, 90 % at balance.

Where the optimizer is the slowest, backward goes on beside neither of the two parts, and a step can be faster than the
bound. What no schedule undercuts is printed beside it as the floor: the slowest of forward plus that of backward.

    floor  =  max(forward, to device in forward, optimizer)  +  max(backward, to device in backward, to host)

It leaves out that a block can be computed with only when it is there, and the last gradients leave only when they are
computed. A step is timed right behind another, whose update it has to hide.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from measure import Series, verdict
from models import Size, make_model

import hydra_ext
from hydra_ext import _C
from hydra_ext.optim import AdamW

# Many blocks, since the first one's update and fetch, and the last gradients' way out, are hidden behind nothing.
FULL, TINY = Size(layers=48, width=384, tokens=256), Size(layers=12, width=128, tokens=64)
MICROBATCHES = 4
MAX_NORM = 1.0
BLOCKS_OF_ROOM = 5


@dataclass(frozen=True)
class Case:
    """What the resources take, as shares of compute; the goal, as a share of the bound; and the tokens of a microbatch,
    as a share of the size's: where compute has time to spare its amount matters little."""

    name: str
    to_device: float
    to_host: float
    optimizer: float
    goal: float = 0.95
    tokens: float = 1.0


CASES = (
    Case("compute twice the rest", to_device=0.5, to_host=0.25, optimizer=0.5),
    Case("link to the device twice the rest", to_device=2.0, to_host=0.5, optimizer=1 / 3, tokens=0.25),
    Case("optimizer twice the rest", to_device=1.0, to_host=0.5, optimizer=2.0, tokens=0.25),
    # Gradients have backward to leave in, two thirds of compute.
    Case("balance", to_device=1.0, to_host=2 / 3, optimizer=1.0, goal=0.90),
)


class Plain:
    """Compute: forward and backward of the microbatches, one after the other."""

    def __init__(self, model: torch.nn.Module, batches: list[torch.Tensor]) -> None:
        self._model, self._batches = model, batches
        self.forward_seconds = 0.0

    def run(self) -> float:
        """Seconds; ``forward_seconds`` of them in forward."""
        self.forward_seconds = 0.0
        start = time.perf_counter()
        for ids in self._batches:
            begin = time.perf_counter()
            loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss / len(self._batches)
            self.forward_seconds += time.perf_counter() - begin
            loss.backward()
        seconds = time.perf_counter() - start
        self._model.zero_grad()
        return seconds


@dataclass(frozen=True)
class Amounts:
    """Bytes of one step."""

    forward_weights: int
    backward_weights: int
    gradients: int
    update: int


@dataclass(frozen=True)
class Speeds:
    """Bytes per second."""

    to_device: float
    to_host: float
    memory: float

    @classmethod
    def of(cls, case: Case, compute: float, amounts: Amounts) -> Speeds:
        """Such that a step with these amounts takes the case's shares of so many seconds."""
        return cls(
            to_device=(amounts.forward_weights + amounts.backward_weights) / (case.to_device * compute),
            to_host=amounts.gradients / (case.to_host * compute),
            memory=amounts.update / (case.optimizer * compute),
        )


@dataclass(frozen=True)
class Bound:
    """Seconds."""

    slowest: float
    exposed: float
    floor: float

    @property
    def seconds(self) -> float:
        return self.slowest + self.exposed

    @classmethod
    def of(cls, amounts: Amounts, speeds: Speeds, compute: float, forward: float) -> Bound:
        loads = [amounts.forward_weights / speeds.to_device, amounts.backward_weights / speeds.to_device]
        gradients, optimizer = amounts.gradients / speeds.to_host, amounts.update / speeds.memory
        return cls(
            slowest=max(compute, sum(loads), gradients, optimizer),
            exposed=max(0.0, optimizer - forward),
            floor=max(forward, loads[0], optimizer) + max(compute - forward, loads[1], gradients),
        )


class Offloaded:
    """``run.step`` over the microbatches, all in one round."""

    def __init__(self, model: torch.nn.Module, batches: list[torch.Tensor], run: hydra_ext.Run) -> None:
        self._model, self._batches, self._run = model, batches, run
        self._loaded = 0

    def _step(self) -> None:
        def loss(ids: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self._model(input_ids=ids, labels=ids, use_cache=False).loss
            self._loaded = self._run.core.pager.statistics.loaded_bytes
            return value

        self._run.step(self._batches, loss, max_norm=MAX_NORM, round_size=len(self._batches), recompute=False)

    def run(self) -> float:
        """Seconds of a step that has another one's update to hide."""
        self._step()
        start = time.perf_counter()
        self._step()
        seconds = time.perf_counter() - start
        self._run.sync()
        return seconds

    def amounts(self) -> Amounts:
        before = self._run.report()
        self._step()
        self._run.sync()
        after = self._run.report()
        return Amounts(
            self._loaded - before.weights_moved_bytes,
            after.weights_moved_bytes - self._loaded,
            after.gradients_moved_bytes - before.gradients_moved_bytes,
            after.update_bytes - before.update_bytes,
        )

    def activations(self) -> int:
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
        return max(size for kind in kinds for _, size in self._run.core.pager.recorded(kind))

    def report(self) -> hydra_ext.Report:
        return self._run.report()


@dataclass(frozen=True)
class Bench:
    """What is trained, and under which budget."""

    model: torch.nn.Module
    batches: list[torch.Tensor]
    budget: int

    @classmethod
    def make(cls, size: Size) -> Bench:
        """With room for the activations and for some blocks."""
        batches = [torch.randint(0, 256, (1, size.tokens)) for _ in range(MICROBATCHES)]
        roomy = cls(make_model(size), batches, 2**40)
        with roomy.offloaded(hydra_ext.SimulatedDevice(poison=False)) as offloaded:
            offloaded.run()
            activations = offloaded.activations()
        layer = sum(parameter.nbytes for parameter in roomy.model.transformer.h[0].parameters())
        return replace(roomy, budget=activations + BLOCKS_OF_ROOM * layer)

    @contextmanager
    def offloaded(self, device: hydra_ext.SimulatedDevice) -> Iterator[Offloaded]:
        model = copy.deepcopy(self.model)
        with hydra_ext.offload(model, AdamW(model.parameters()), budget=self.budget, device=device) as run:
            yield Offloaded(model, self.batches, run)

    def plain(self) -> Plain:
        return Plain(copy.deepcopy(self.model), self.batches)


def calibrate(bench: Bench) -> tuple[float, Amounts]:
    """Seconds of compute, and what a step moves."""
    plain = bench.plain()
    compute = statistics.median(plain.run() for _ in range(5))
    with bench.offloaded(hydra_ext.SimulatedDevice(poison=False)) as unlimited:
        unlimited.run()
        return compute, unlimited.amounts()


def measure(case: Case, bench: Bench, compute: float, amounts: Amounts, rounds: int) -> None:
    speeds, plain = Speeds.of(case, compute, amounts), bench.plain()
    device = hydra_ext.SimulatedDevice(
        to_device_bytes_per_second=speeds.to_device,
        to_host_bytes_per_second=speeds.to_host,
        host_memory_bytes_per_second=speeds.memory,
        poison=False,
    )
    computes, forwards, steps = [], [], []
    with bench.offloaded(device) as offloaded:
        offloaded.run()
        plain.run()
        for _ in range(rounds):  # plain, step, plain, step, ..., plain
            computes.append(plain.run())
            forwards.append(plain.forward_seconds)
            steps.append(offloaded.run())
        computes.append(plain.run())
        amounts = offloaded.amounts()
        print(offloaded.report())
    print(f"(d) {case.name}: {amounts}, {speeds}")
    series = Series({"plain": computes[:-1], "offloaded": steps, "plain again": computes[1:]})
    judge(case, series, forwards, amounts, speeds)


def judge(case: Case, series: Series, forwards: list[float], amounts: Amounts, speeds: Speeds) -> None:
    before, steps, after = series.seconds.values()
    computes = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    bounds = [Bound.of(amounts, speeds, *times) for times in zip(computes, forwards, strict=True)]
    of_bound = statistics.median(bound.seconds / step for bound, step in zip(bounds, steps, strict=True))
    of_floor = statistics.median(bound.floor / step for bound, step in zip(bounds, steps, strict=True))
    middle = Bound.of(amounts, speeds, statistics.median(computes), statistics.median(forwards))
    spread = series.spread("plain", "plain again")
    print(
        f"(d) compute {statistics.median(computes):.3f} s, {statistics.median(forwards):.3f} s of it forward; bound "
        f"{middle.slowest:.3f} s + {middle.exposed:.3f} s; floor {middle.floor:.3f} s; step "
        f"{series.median('offloaded'):.3f} s"
    )
    print(
        f"(d) {case.name}: {of_bound:.1%} of the bound ({of_floor:.1%} of the floor), spread {spread:.4f}: at least "
        f"{case.goal:.0%} {verdict(spread, margin=1 - case.goal, holds=of_bound >= case.goal)}",
        flush=True,
    )


def main(*, tiny: bool, rounds: int) -> None:
    size = TINY if tiny else FULL
    for tokens, cases in groupby(sorted(CASES, key=lambda case: case.tokens), key=lambda case: case.tokens):
        bench = Bench.make(replace(size, tokens=int(size.tokens * tokens)))
        count = sum(parameter.numel() for parameter in bench.model.parameters())
        shape = tuple(bench.batches[0].shape)
        print(f"(d) GPT-2 of {count / 1e6:.1f} M parameters, {MICROBATCHES} microbatches of {shape}")
        compute, amounts = calibrate(bench)
        for case in cases:
            measure(case, bench, compute, amounts, rounds)
