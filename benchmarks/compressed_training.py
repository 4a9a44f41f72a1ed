"""What storing activations inexactly does to training: python benchmarks/compressed_training.py [--seeds 5] [--tiny]

The trainings of small_trainings.py, whose first weights and batches are the same with every way of saving: a CNN on
scikit-learn's digits by SGD with momentum, whose score is the accuracy on images that it has not seen; and a small
GPT-2 over bytes on the help texts that ship with Python by AdamW, whose score is the loss on pieces of the text.

Plain PyTorch, hydra_ext.Compress() as it comes, and for the CNN larger fractions and fixed bounds. Goals:

(score) The mean over seeds differs from plain PyTorch's by no more than the noise of seeds: twice the standard error of
    such a difference, 2 * s * sqrt(2 / seeds), where s is the standard deviation of plain runs.
(bytes) In the CNN all that a step saves takes at least 5 times as much as what is stored of it, with every seed, in the
    second half of training. What a step saves is counted in plain PyTorch: each storage once, parameters not at all.
    Stored is all of that but what was compressed, and streams of what was. Memory that the stash has when a forward has
    ended is told beside it: its buffers are a little larger than what they hold.

A run ends at once if losses are not the same to the last bit before anything inexact was used: in the first step, and
with the adaptive bound in the second, whose weights were made from what was stored exactly.

Writes curves (.csv of every run, .png), and prints tables. Five minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import activations
import torch
from delay_convergence import share_of_rate
from small_trainings import Training, cnn, gpt2
from torch.nn.utils import clip_grad_norm_

import hydra_ext

SEEDS, POINTS = 5, 10  # of a curve
LEAST_RATIO = 5.0

PLAIN, DEFAULT = "plain", "Compress()"
DEFAULT_POLICY = hydra_ext.Compress()
FRACTIONS = (0.05, 0.2, 0.8)
BOUNDS = (0.1, 1.0, 4.0, 16.0)


@dataclass(frozen=True)
class Study:
    """A training, and the ways of saving that it is run with."""

    training: Training
    policies: Mapping[str, hydra_ext.Compress | None]
    has_goal: bool  # of bytes


def studies(*, tiny: bool) -> list[Study]:
    main: dict[str, hydra_ext.Compress | None] = {PLAIN: None, DEFAULT: DEFAULT_POLICY}
    many = 1 if tiny else None
    fractions = {f"fraction {fraction:g}": hydra_ext.Compress(fraction=fraction) for fraction in FRACTIONS[:many]}
    bounds = {f"bound {bound:g}": hydra_ext.Compress(error=bound) for bound in BOUNDS[:many]}
    return [
        Study(cnn(20 if tiny else 280), {**main, **fractions, **bounds}, has_goal=True),
        Study(gpt2(10 if tiny else 300), main, has_goal=False),
    ]


# ---- runs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Point:
    """Of a curve; its loss is the mean of training losses since the last point."""

    step: int
    loss: float
    score: float
    report: Any  # a hydra_ext.stash's, so far


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    memory: int = 0  # the stash's, at the end of the last forward


def train(training: Training, policy: hydra_ext.Compress | None, seed: int) -> Run:
    model = training.model(seed)
    optimizer = training.optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, training.steps))
    stash = None
    if policy is not None:
        stash = hydra_ext.stash(policy, model=model, optimizer=optimizer, device="simulated")
    run, each = Run(), training.steps // POINTS
    for step, batch in enumerate(training.batches(training.steps, seed), 1):
        with stash or nullcontext():
            loss = training.loss(model, batch)
        if stash is not None and step == training.steps:
            now = stash.report()
            run.memory = now.host_bytes + now.held_bytes
        loss.backward()
        run.losses.append(loss.item())
        del loss
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % each == 0:
            report = None if stash is None else stash.report()
            run.points.append(Point(step, statistics.fmean(run.losses[-each:]), training.score(model), report))
    return run


def check_beginning(name: str, policy: hydra_ext.Compress, run: Run, plain: Run) -> None:
    exact = 2 if policy.error == "adaptive" else 1
    if run.losses[:exact] != plain.losses[:exact]:
        raise SystemExit(f"{name} begins with losses {run.losses[:exact]!r}, plain with {plain.losses[:exact]!r}")


# ---- what is said of them --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stored:
    """Bytes saved in some steps, and what became of them.

    Attributes:
        saved: all that plain PyTorch saves.
        convolutions: what their inputs took that were compressed, and take; ``linears`` likewise.
    """

    saved: int
    stored: int
    convolutions: tuple[int, int]
    linears: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.saved / self.stored

    @property
    def rest(self) -> tuple[int, int]:
        return (
            self.saved - self.convolutions[0] - self.linears[0],
            self.stored - self.convolutions[1] - self.linears[1],
        )


@dataclass
class Results:
    """Of one training, by case and seed.

    Attributes:
        saved: bytes that a step saves in plain PyTorch.
    """

    study: Study
    seeds: int
    saved: int
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.runs))

    def scores(self, name: str) -> list[float]:
        return [self.runs[name, seed].points[-1].score for seed in range(self.seeds)]

    def difference(self, name: str) -> float:
        return statistics.fmean(self.scores(name)) - statistics.fmean(self.scores(PLAIN))

    def noise(self) -> float:
        return 2 * statistics.stdev(self.scores(PLAIN)) * math.sqrt(2 / self.seeds)

    def stored(self, name: str, seed: int, after: int, until: int = -1) -> Stored:
        """Between two points."""
        points = self.runs[name, seed].points
        first, last = points[after], points[until]
        saved = (last.step - first.step) * self.saved
        gone = last.report.compressed_bytes - first.report.compressed_bytes
        come = last.report.stream_bytes - first.report.stream_bytes
        self.check_books(first, last)
        dimensions = {name: weight.dim() for name, weight in self.study.training.model(seed).named_parameters()}

        def of(wanted: Callable[[int], bool]) -> tuple[int, int]:
            rows = [
                (now.saved_bytes - then.saved_bytes, now.stored_bytes - then.stored_bytes)
                for then, now in zip(first.report.layers, last.report.layers, strict=True)
                if wanted(dimensions[now.weight])
            ]
            return sum(row[0] for row in rows), sum(row[1] for row in rows)

        return Stored(saved, saved - gone + come, of(lambda count: count > 2), of(lambda count: count == 2))

    def check_books(self, first: Point, last: Point) -> None:
        """What plain PyTorch saves is what the stash was given, but for tensors too small to be moved; and all of that
        was compressed, or is known to be exact."""
        steps = last.step - first.step
        given = last.report.saved_bytes - first.report.saved_bytes
        gone = last.report.compressed_bytes - first.report.compressed_bytes
        exact = sum(row.bytes for row in last.report.exact) - sum(row.bytes for row in first.report.exact)
        kept = last.report.kept - first.report.kept
        if not (0 <= steps * self.saved - given <= kept * 1024 and gone + exact == given):
            raise SystemExit(
                f"{self.study.training.name}: {steps} steps save {steps * self.saved} bytes, of which {given} came to "
                f"the stash; it compressed {gone}, and stored {exact} exactly"
            )

    def of_second_half(self, name: str) -> list[Stored]:
        return [self.stored(name, seed, POINTS // 2 - 1) for seed in range(self.seeds)]

    def gradient_error(self, name: str) -> float:
        """As foretold for a step at the end; the median of layers and seeds."""
        reports = [self.runs[name, seed].points[-1].report for seed in range(self.seeds)]
        return statistics.median(row.gradient_error for report in reports for row in report.layers)


def run_all(study: Study, seeds: int) -> Results:
    training = study.training
    batch = training.batches(1, 0)[0]
    model = training.model(0)
    task = activations.Task(training.name, model, batch[0], lambda _: training.loss(model, batch))
    results = Results(study, seeds, activations.saved_by(task).bytes)
    for name, policy in study.policies.items():
        for seed in range(seeds):
            run = results.runs[name, seed] = train(training, policy, seed)
            if policy is not None:
                check_beginning(f"{training.name}, {name}", policy, run, results.runs[PLAIN, seed])
        print(f"{training.name}, {name}: done", file=sys.stderr, flush=True)
    return results


def ratio_of(pairs: Sequence[tuple[int, int]]) -> str:
    before, after = (sum(each) for each in zip(*pairs, strict=True))
    return f"{before / after:.2f}" if after else ""


def table(results: Results) -> str:
    """Ratios are of all seeds together."""
    training = results.study.training
    form = training.score_form
    columns = [training.name, f"{training.score_name} (least … most)", "difference to plain"]
    columns += ["times smaller", "convolutions' inputs", "linear layers' inputs", "the rest", "gradient error"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name in results.names():
        scores = results.scores(name)
        cells = [name, f"{statistics.fmean(scores):{form}} ({min(scores):{form}} … {max(scores):{form}})"]
        if name != PLAIN:
            stored = results.of_second_half(name)
            cells += [f"{results.difference(name):+{form}}", ratio_of([(each.saved, each.stored) for each in stored])]
            cells += [ratio_of([each.convolutions for each in stored]), ratio_of([each.linears for each in stored])]
            cells += [ratio_of([each.rest for each in stored]), f"{results.gradient_error(name):.2%}"]
        lines.append(f"| {' | '.join(cells + [''] * (len(columns) - len(cells)))} |")
    return "\n".join(lines)


def judge(results: Results) -> list[str]:
    training, difference, noise = results.study.training, results.difference(DEFAULT), results.noise()
    name = training.name
    stored = results.of_second_half(DEFAULT)
    memory = max(results.runs[DEFAULT, seed].memory for seed in range(results.seeds))
    least = min(each.ratio for each in stored)
    goal = f": at least {LEAST_RATIO:g} {activations.judged(least >= LEAST_RATIO)}" if results.study.has_goal else ""
    first = stored[0]
    parts = {"convolutions' inputs": first.convolutions, "linear layers' inputs": first.linears, "the rest": first.rest}
    said = [f"{part} {before / first.saved:.1%}" for part, (before, _) in parts.items() if before]
    return [
        f"(score) {name}, {DEFAULT}: {training.score_name} differs from plain by {difference:+.5f}, the noise "
        f"of seeds is {noise:.5f}: {activations.judged(abs(difference) <= noise)}",
        f"(bytes) {name}: a step saves {results.saved} bytes: {', '.join(said)}",
        f"(bytes) {name}, {DEFAULT}: stored {least:.2f} times smaller{goal}",
        f"(bytes) {name}, {DEFAULT}: at the end of a forward the stash has {memory} bytes, "
        f"{results.saved / memory:.2f} times fewer",
    ]


def write_curves(every: Sequence[Results], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "case", "seed", "step", "training_loss", "score", "times_smaller"])
        for results in every:
            for (name, seed), run in results.runs.items():
                for at, point in enumerate(run.points):
                    ratio = ""
                    if point.report is not None and at:
                        ratio = f"{results.stored(name, seed, at - 1, at).ratio:.3f}"
                    row = [
                        results.study.training.name,
                        name,
                        seed,
                        point.step,
                        f"{point.loss:.5f}",
                        f"{point.score:.5f}",
                    ]
                    writer.writerow([*row, ratio])


def draw(every: Sequence[Results], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    digits, text = every
    figure, axes = pyplot.subplots(2, 2, figsize=(14, 9))
    fractions = [name for name in digits.names() if not name.startswith("bound")]
    bounds = [name for name in digits.names() if name == PLAIN or name.startswith("bound")]
    for axis, results, names in (
        (axes[0][0], digits, fractions),
        (axes[0][1], digits, bounds),
        (axes[1][1], text, None),
    ):
        for name in names or results.names():
            curves = [[point.score for point in results.runs[name, seed].points] for seed in range(results.seeds)]
            points = list(zip(*curves, strict=True))
            steps = [point.step for point in results.runs[name, 0].points]
            axis.plot(steps, [*map(statistics.fmean, points)], label=name)
            axis.fill_between(steps, [*map(min, points)], [*map(max, points)], alpha=0.15)
        axis.set(
            title=results.study.training.name,
            ylabel=f"{results.study.training.score_name}, mean of {results.seeds} seeds",
        )
    for results, names in ((digits, digits.names()), (text, text.names())):
        for name in names:
            if name != PLAIN:
                points = results.runs[name, 0].points
                ratios = [results.stored(name, 0, at - 1, at).ratio for at in range(1, len(points))]
                axes[1][0].plot(
                    [point.step for point in points[1:]], ratios, label=f"{results.study.training.name}, {name}"
                )
    axes[1][0].axhline(LEAST_RATIO, color="grey", linestyle=":")
    axes[1][0].set(title="all that a step saves", ylabel="times smaller, seed 0", yscale="log")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="two or more")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that the benchmark runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the curves")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = studies(tiny=options.tiny)
    for training in (study.training for study in chosen):
        parameters = sum(each.numel() for each in training.model(0).parameters())
        print(f"{training.name}: {parameters} parameters, {training.steps} steps, {options.seeds} seeds")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, hydra_ext {hydra_ext.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    every = [run_all(study, options.seeds) for study in chosen]
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today()}-compressed-training"
    write_curves(every, options.out / f"{name}.csv")
    draw(every, options.out / f"{name}.png")
    for results in every:
        print("", table(results), "", *judge(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
