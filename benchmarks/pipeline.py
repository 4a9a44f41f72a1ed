"""Schedules in several processes: python benchmarks/pipeline.py [--part timed] [--depth 4] [--rounds 9]

2bw, 1f1b and gpipe of hydra_ext, 2bw with one more microbatch in flight a hop where there are enough of them, and
torch.distributed.pipelining's Schedule1F1B and ScheduleGPipe, with the same stages on the same ranks, by turns in one
run.

(timed) Stages are waits of known length that need no core, so that four ranks are measurable on two cores: the time of
a batch against the formulas, and against the simulator's with calibrated costs. Those of a forward and a backward are
calibrated outside of a pipeline; that of a hop is what a batch of a single microbatch takes beyond them, by its hops.
The ranks run before other processes of the machine where that is allowed (SCHED_RR): a wait that ends while others
compute would else end late.
(compute) A small transformer in two stages on two ranks of one thread each.

A batch's time is the mean over the ranks of the time from the end of their first step to that of their last one, by
the steps between. Medians over the rounds; the spread is half the interquartile range of the ratio of two identical
runs of a round. A figure is void where the spread exceeds half the margin of its goal.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from measure import verdict
from pipeline_stages import ROWS, WIDTH, WaitingStage, calibrated, mean_loss, token_loss, transformer_stages
from ranks import go_first, run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import hydra_ext
from hydra_ext import schedule
from hydra_ext.pipeline import Pipeline

FORWARD, BACKWARD = 0.020, 0.040  # seconds of a waiting stage
STEPS = {4: 4, 8: 3, 16: 2}  # of one run, by microbatches
LAYERS, TOKEN_WIDTH, LENGTH, TOKEN_ROWS = 8, 256, 64, 2

OURS = {"2bw": ("2bw", 0), "2bw, 1 ahead": ("2bw", 1), "1f1b": ("1f1b", 0), "gpipe": ("gpipe", 0)}  # kinds, ahead
TORCHS = {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}
TWIN = "2bw, again"
DELAYED = (TWIN, *(name for name, (kind, _) in OURS.items() if kind == "2bw"))

GOAL = 0.05
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """What all train.

    Attributes:
        batch: of which every microbatch is so many rows.
    """

    stages: Sequence[Callable[[], nn.Module]]
    microbatch: Tensor
    loss: Loss
    count: int

    @property
    def steps(self) -> int:
        return STEPS[self.count]

    @property
    def ours(self) -> tuple[str, ...]:
        hops = len(self.stages) - 1
        return tuple(name for name, (_, ahead) in OURS.items() if not ahead or self.count >= (1 + ahead) * hops)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ours, *TORCHS, TWIN)

    def schedule(self, name: str) -> schedule.Schedule:
        kind, ahead = OURS[name]
        return schedule.make(kind, stages=len(self.stages), microbatches=self.count, ahead=ahead)


@dataclass
class Run:
    """One rank's: seconds of the machine's monotonic clock; ``bubble`` between the first step's end and the last's."""

    start: float
    marks: list[float] = field(default_factory=list)
    end: float = 0.0
    bubble: float | None = None


@dataclass(frozen=True)
class Contender:
    step: Callable[[], None]
    finish: Callable[[], None]
    computing: Callable[[], float | None]

    def run(self, steps: int) -> Run:
        dist.barrier()
        run = Run(time.perf_counter())
        before = None
        for _ in range(steps):
            self.step()
            run.marks.append(time.perf_counter())
            before = self.computing() if before is None else before
        after = self.computing()
        if before is not None and after is not None:
            run.bubble = 1.0 - (after - before) / (run.marks[-1] - run.marks[0])
        self.finish()
        run.end = time.perf_counter()
        return run


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return hydra_ext.optim.AdamW(parameters, lr=1e-4)


def our_contender(problem: Problem, name: str) -> tuple[Contender, Pipeline]:
    made = problem.schedule(name)
    pipe = Pipeline(None, make_optimizer, stages=problem.stages, schedule=made, microbatches=problem.count)
    works = [problem.microbatch] * problem.count
    contender = Contender(
        step=lambda: void(pipe.step(works, problem.loss)),
        finish=pipe.drain,
        computing=lambda: pipe.report().computing_seconds,
    )
    return contender, pipe


def torch_contender(problem: Problem, kind: Any, rank: int) -> Contender:
    depth = len(problem.stages)
    module = problem.stages[rank]()
    first, last = rank == 0, rank == depth - 1
    stage = PipelineStage(module, rank, depth, torch.device("cpu"))
    run = kind(stage, problem.count, loss_fn=problem.loss)
    whole = torch.cat([problem.microbatch] * problem.count)
    optimizer = make_optimizer(module.parameters())

    def step() -> None:
        run.step(*([whole] if first else []), target=whole if last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step, finish=lambda: None, computing=lambda: None)


def void(_: Any) -> None:
    """It is not looked at."""


def run_by_turns(problem: Problem, rank: int, rounds: int) -> dict[str, list[Run]]:
    contenders, pipes = {}, []
    for name in problem.ours:
        contenders[name], pipe = our_contender(problem, name)
        pipes.append(pipe)
    for name, kind in TORCHS.items():
        contenders[name] = torch_contender(problem, kind, rank)
    contenders[TWIN] = contenders["2bw"]
    runs: dict[str, list[Run]] = {name: [] for name in problem.names}
    for number in range(-1, rounds):
        for name in problem.names:
            run = contenders[name].run(problem.steps)
            if number >= 0:
                runs[name].append(run)
    for pipe in pipes:
        pipe.close()
    return runs


# ---- figures of all ranks -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Figures:
    """Of one problem: seconds of a batch, and of all steps with the drain, by contender and round; bubbles by rank."""

    batch: dict[str, list[float]]
    makespan: dict[str, list[float]]
    bubbles: dict[str, list[float]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.batch)

    @property
    def ours(self) -> tuple[str, ...]:
        return tuple(name for name in self.batch if name in OURS)

    @property
    def spread(self) -> float:
        pairs = zip(self.batch["2bw"], self.batch[TWIN], strict=True)
        low, _, high = statistics.quantiles((a / b for a, b in pairs), n=4)
        return (high - low) / 2

    def median(self, name: str) -> float:
        return statistics.median(self.batch[name])

    def speed(self, name: str, reference: str) -> float:
        """How often as fast as the reference: the median over the rounds."""
        pairs = zip(self.batch[reference], self.batch[name], strict=True)
        return statistics.median(r / s for r, s in pairs)


def figures_of(ranks: Sequence[dict[str, list[Run]]]) -> Figures:
    batch, makespan, bubbles = {}, {}, {}
    for name in ranks[0]:
        rounds = list(zip(*(runs[name] for runs in ranks), strict=True))
        batch[name] = [
            statistics.fmean((run.marks[-1] - run.marks[0]) / (len(run.marks) - 1) for run in runs) for runs in rounds
        ]
        makespan[name] = [max(run.end for run in runs) - min(run.start for run in runs) for runs in rounds]
        bubbles[name] = [
            statistics.median(run.bubble for run in runs[name]) if runs[name][0].bubble is not None else float("nan")
            for runs in ranks
        ]
    return Figures(batch, makespan, bubbles)


def say(goal: str, figure: str, spread: float, *, margin: float, holds: bool) -> None:
    print(f"  {goal}: {figure}; {verdict(spread, margin=margin, holds=holds)}", flush=True)


# ---- timed waits ----------------------------------------------------------------------------------------------------
def timed_rank(rank: int, depth: int, rounds: int) -> dict[str, Any]:
    first = go_first()
    x = torch.ones(ROWS, WIDTH)
    costs = calibrated(WaitingStage(FORWARD, BACKWARD), x)
    problems = {count: waiting_problem(depth, count) for count in STEPS}
    single = single_microbatch(waiting_problem(depth, 1))
    runs = {count: run_by_turns(problem, rank, rounds) for count, problem in problems.items()}
    return {"costs": costs, "single": single, "runs": runs, "first": first}


def waiting_problem(depth: int, count: int) -> Problem:
    stages = [lambda: WaitingStage(FORWARD, BACKWARD)] * depth
    return Problem(stages, torch.ones(ROWS, WIDTH), mean_loss, count)


def single_microbatch(problem: Problem, *, steps: int = 25) -> float:
    """Median seconds of a batch of one, in which nothing runs beside anything else."""
    contender, pipe = our_contender(problem, "1f1b")
    dist.barrier()
    marks = []
    for _ in range(steps + 1):
        contender.step()
        marks.append(time.perf_counter())
    pipe.close()
    return statistics.median(end - start for start, end in itertools.pairwise(marks))


def timed_part(depth: int, rounds: int) -> None:
    ranks = run_ranks(timed_rank, depth, rounds, size=depth)
    forward, backward = ([each["costs"][i] for each in ranks] for i in (0, 1))
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    print(
        f"(timed) {depth} ranks; a forward waits {FORWARD * 1e3:g} ms, a backward {BACKWARD * 1e3:g} ms, "
        + ("before other processes" if all(each["first"] for each in ranks) else "NOT before other processes")
        + "; calibrated:"
    )
    single = statistics.fmean(each["single"] for each in ranks)
    hop = (single - sum(forward) - sum(backward)) / (2 * (depth - 1))
    print(
        "  "
        + ", ".join(f"{f * 1e3:.2f} + {b * 1e3:.2f} ms" for f, b in zip(forward, backward, strict=True))
        + f"; a hop {hop * 1e3:.2f} ms, by a batch of one in {single * 1e3:.2f} ms"
    )
    costs = {"forward": forward, "backward": backward, "latency": hop}
    for count in STEPS:
        figures = figures_of([each["runs"][count] for each in ranks])
        ideal = count * slowest
        flush = (count + depth - 1) / count
        print(f"(timed) {depth} ranks, {count} microbatches; spread of identical runs {figures.spread:.2%}")
        for name in figures.names:
            formula = 1.0 if name in DELAYED else flush
            time_of = figures.median(name) / ideal
            seen = ", ".join(f"{bubble:.1%}" for bubble in figures.bubbles[name])
            print(
                f"  {name:<12} {figures.median(name) * 1e3:8.2f} ms a batch = {time_of:.4f} of m(tF+tB), formula "
                f"{formula:.4f}; bubble {1.0 - 1.0 / time_of:.1%}, formula {1.0 - 1.0 / formula:.1%}"
                + (f", by the ranks' own times {seen}" if name in OURS else "")
            )
        judge_timed(figures, waiting_problem(depth, count), costs, ideal, flush)


def judge_timed(figures: Figures, problem: Problem, costs: dict[str, Any], ideal: float, flush: float) -> None:
    spread = figures.spread
    for name in figures.ours:
        if name in DELAYED:
            share = ideal / figures.median(name)
            say(f"{name} at least 95% of the ideal", f"{share:.1%}", spread, margin=GOAL, holds=share >= 1.0 - GOAL)
    for kind in ("1f1b", "gpipe"):
        off = figures.median(kind) / (ideal * flush) - 1.0
        say(f"{kind} within 5% of (m+d-1)/m", f"{off:+.1%}", spread, margin=GOAL, holds=abs(off) <= GOAL)
    for name in figures.ours:
        simulated = problem.schedule(name).simulate(batches=problem.steps, **costs).makespan
        measured = statistics.median(figures.makespan[name])
        off = simulated / measured - 1.0
        text = f"{simulated:.4f} s, measured {measured:.4f} s, {off:+.1%}"
        say(f"{name} makespan simulated within 5%", text, spread, margin=GOAL, holds=abs(off) <= GOAL)
    judge_speeds(figures)


def judge_speeds(figures: Figures) -> None:
    for ours, theirs in (("1f1b", "torch 1F1B"), ("gpipe", "torch GPipe")):
        speed = figures.speed(ours, theirs)
        text = f"{speed:.3f} times as fast"
        say(f"{ours} at least 98% of {theirs}", text, figures.spread, margin=0.02, holds=speed >= 0.98)
    for theirs in ("1f1b", *TORCHS):
        print(f"  2bw is {figures.speed('2bw', theirs):.3f} times as fast as {theirs}")


# ---- real compute ---------------------------------------------------------------------------------------------------
def compute_rank(rank: int, rounds: int) -> dict[int, dict[str, list[Run]]]:
    stages = [
        lambda index=index: transformer_stages(layers=LAYERS, width=TOKEN_WIDTH, length=LENGTH)[index]
        for index in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (TOKEN_ROWS, LENGTH), generator=generator)
    return {count: run_by_turns(Problem(stages, ids, token_loss, count), rank, rounds) for count in (4, 8)}


def compute_part(rounds: int) -> None:
    ranks = run_ranks(compute_rank, rounds, size=2)
    size = sum(
        p.numel()
        for stage in transformer_stages(layers=LAYERS, width=TOKEN_WIDTH, length=LENGTH)
        for p in stage.parameters()
    )
    for count in ranks[0]:
        figures = figures_of([runs[count] for runs in ranks])
        print(
            f"(compute) transformer of {size / 1e6:.1f} M parameters on 2 ranks, {count} microbatches of "
            f"({TOKEN_ROWS}, {LENGTH}); spread of identical runs {figures.spread:.2%}"
        )
        for name in figures.names:
            seen = ", ".join(f"{bubble:.1%}" for bubble in figures.bubbles[name])
            tail = f"; bubble by the ranks' own times {seen}" if name in (*OURS, TWIN) else ""
            print(f"  {name:<12} {figures.median(name) * 1e3:8.2f} ms a batch{tail}")
        judge_speeds(figures)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("timed", "compute"), action="append")
    parser.add_argument(
        "--depth", type=int, action="append", help="ranks of the timed part, at least 2; 2 and 4 unless given"
    )
    parser.add_argument("--rounds", type=int, default=9)
    options: Any = parser.parse_args(argv)
    if min(options.depth or (2,)) < 2:
        parser.error("--depth: at least 2 ranks, between which there are hops")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, hydra_ext {hydra_ext.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    parts = options.part or ["timed", "compute"]
    if "timed" in parts:
        for depth in options.depth or (2, 4):
            timed_part(depth, options.rounds)
    if "compute" in parts:
        compute_part(options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
