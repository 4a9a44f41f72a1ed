"""What a gradient one step late costs, by optimizer: python benchmarks/delay_convergence.py [--steps 250] [--seeds 3]

A small GPT-2 over bytes learns Python's help texts from random weights: with every gradient taken at the weights it is
applied to, and with PipeDream-2BW's recurrence W(t+1) = W(t) - u(g(W(t-1))), two sets of weights in one process, the
same numbers as a pipeline of any depth. Every optimizer sees the same batches, once, and has the same schedule (linear
warm-up over a tenth of the steps, cosine to a tenth of the rate), clipping at 1 and decay of 0.1. Losses are means over
the same pieces of text, by the newest weights.

Every case runs at every rate with every seed. The first table gives each case the rate that is best for it, the second
one compares at equal rates. A gap is the difference to the same optimizer without delay, seed by seed: first weights
and tokens are the same.

Writes curves (.csv of every run, .png at the best rates), and prints the tables. Nine minutes of one core.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hydra_ext
from hydra_ext.integrations import byte_text
from hydra_ext.optim import AdamW, DelayCorrectedAdamW, Muon, NAdamW

LAYERS, WIDTH, ROWS, LENGTH = 2, 64, 16, 64
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
WARM_UP, LAST_RATE = 0.1, 0.1
BETAS = (0.9, 0.95)  # where the rule does not name its own
DECAY = 0.1
POINT = 10  # batches in one point of a curve
VALIDATION_PIECES = 40

Make = Callable[[nn.Module, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """An optimizer, with or without delay; ``reference`` names the case that its gap is measured from."""

    name: str
    make: Make
    delayed: bool
    reference: str


@dataclass
class Outcome:
    loss: float
    curve: list[float] = field(default_factory=list)  # training losses, means of POINT batches


def muon(model: nn.Module, rate: float, correction: float = 0.0) -> Muon:
    """Embeddings, which are the output layer too, are left to AdamW."""
    matrices = [
        each for name, each in model.named_parameters() if each.dim() == 2 and "wte" not in name and "wpe" not in name
    ]
    rest = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "orthogonalize": False}]
    return Muon(groups, lr=rate, weight_decay=DECAY, betas=BETAS, correction=correction)


def adamw(model: nn.Module, rate: float) -> AdamW:
    return AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)


def corrected(model: nn.Module, rate: float) -> DelayCorrectedAdamW:
    return DelayCorrectedAdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)


def nadamw(model: nn.Module, rate: float) -> NAdamW:
    return NAdamW(model.parameters(), lr=rate, weight_decay=DECAY)


CASES = (
    Case("AdamW", adamw, False, "AdamW"),
    Case("AdamW, 2BW", adamw, True, "AdamW"),
    Case("DelayCorrectedAdamW, 2BW", corrected, True, "AdamW"),
    Case("NAdamW", nadamw, False, "NAdamW"),
    Case("NAdamW, 2BW", nadamw, True, "NAdamW"),
    Case("Muon", muon, False, "Muon"),
    Case("Muon, 2BW", muon, True, "Muon"),
    Case("Muon(correction=1), 2BW", lambda model, rate: muon(model, rate, 1.0), True, "Muon"),
)


def share_of_rate(step: int, steps: int) -> float:
    warm = WARM_UP * steps
    progress = max(0.0, step - warm) / (steps - warm)
    return min((step + 1) / warm, LAST_RATE + (1.0 - LAST_RATE) * (1.0 + math.cos(math.pi * progress)) / 2.0)


def train(case: Case, rate: float, steps: int, seed: int) -> Outcome:
    model = byte_text.model(layers=LAYERS, width=WIDTH, length=LENGTH, seed=seed).eval()  # no dropout
    weights = list(model.parameters())
    optimizer = case.make(model, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    older = [each.detach().clone() for each in weights]
    losses = []
    for batch in byte_text.batches(count=steps, rows=ROWS, length=LENGTH, seed=seed):
        newest = [each.detach().clone() for each in weights]
        if case.delayed:
            show(weights, older)
        loss = byte_text.loss_of(model, batch)
        loss.backward()
        clip_grad_norm_(weights, 1.0)
        show(weights, newest)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        older = newest
        losses.append(loss.item())
    curve = [statistics.fmean(losses[at : at + POINT]) for at in range(0, len(losses), POINT)]
    return Outcome(validation_loss(model), curve)


@torch.no_grad()
def show(weights: Sequence[torch.Tensor], version: Sequence[torch.Tensor]) -> None:
    for each, values in zip(weights, version, strict=True):
        each.copy_(values)


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    pieces = byte_text.batches(count=VALIDATION_PIECES, rows=ROWS, length=LENGTH, seed=2**31)
    return statistics.fmean(byte_text.loss_of(model, piece).item() for piece in pieces)


@dataclass
class Results:
    """Of every run, by case, rate and seed."""

    rates: Sequence[float]
    seeds: int
    runs: dict[tuple[str, float, int], Outcome] = field(default_factory=dict)

    def losses(self, name: str, rate: float) -> list[float]:
        return [self.runs[name, rate, seed].loss for seed in range(self.seeds)]

    def best_rate(self, name: str) -> float:
        return min(self.rates, key=lambda rate: statistics.fmean(self.losses(name, rate)))

    def gaps(self, case: Case, rate: float, reference_rate: float) -> str:
        """Mean, least and most."""
        pairs = zip(self.losses(case.name, rate), self.losses(case.reference, reference_rate), strict=True)
        gaps = [loss - reference for loss, reference in pairs]
        return f"{statistics.fmean(gaps):+.4f} ({min(gaps):+.4f} … {max(gaps):+.4f})"


def run_all(steps: int, results: Results) -> None:
    for case in CASES:
        for rate in results.rates:
            for seed in range(results.seeds):
                results.runs[case.name, rate, seed] = train(case, rate, steps, seed)
        print(f"{case.name}: done", file=sys.stderr, flush=True)


def table_of_best(results: Results) -> str:
    lines = ["| optimizer | best rate | loss | gap to no delay (least … most) |", "| --- | --- | --- | --- |"]
    for case in CASES:
        rate, reference_rate = results.best_rate(case.name), results.best_rate(case.reference)
        loss = statistics.fmean(results.losses(case.name, rate))
        gaps = results.gaps(case, rate, reference_rate) if case.delayed else ""
        lines.append(f"| {case.name} | {rate:g} | {loss:.4f} | {gaps} |")
    return "\n".join(lines)


def table_of_rates(results: Results) -> str:
    """Losses without delay, gaps with it."""
    header = " | ".join(f"{rate:g}" for rate in results.rates)
    lines = [f"| optimizer, by rate | {header} |", "| --- " * (1 + len(results.rates)) + "|"]
    for case in CASES:
        cells = [
            results.gaps(case, rate, rate)
            if case.delayed
            else f"{statistics.fmean(results.losses(case.name, rate)):.4f}"
            for rate in results.rates
        ]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_curves(results: Results, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["optimizer", "rate", "seed", "batches", "training_loss"])
        for (name, rate, seed), outcome in results.runs.items():
            for point, loss in enumerate(outcome.curve, 1):
                writer.writerow([name, f"{rate:g}", seed, point * POINT, f"{loss:.5f}"])


def draw(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), sharey=True)
    for axis, reference in zip(axes, dict.fromkeys(case.reference for case in CASES), strict=True):
        for case in (case for case in CASES if case.reference == reference):
            rate = results.best_rate(case.name)
            curves = [results.runs[case.name, rate, seed].curve for seed in range(results.seeds)]
            points = list(zip(*curves, strict=True))
            batches = [POINT * (1 + index) for index in range(len(points))]
            axis.plot(batches, [*map(statistics.fmean, points)], label=f"{case.name} ({rate:g})")
            axis.fill_between(batches, [*map(min, points)], [*map(max, points)], alpha=0.2)
        axis.set(xlabel="batches", title=reference)
        axis.legend()
    axes[0].set_ylabel(f"training loss, mean of {POINT} batches and {results.seeds} seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the curves")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = byte_text.model(layers=LAYERS, width=WIDTH, length=LENGTH)
    print(
        f"{sum(each.numel() for each in model.parameters())} parameters, {options.steps} batches of {ROWS} x {LENGTH} "
        f"bytes, {options.seeds} seeds; Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, hydra_ext {hydra_ext.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    results = Results(options.rates, options.seeds)
    run_all(options.steps, results)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today()}-delay-convergence"
    write_curves(results, options.out / f"{name}.csv")
    draw(results, options.out / f"{name}.png")
    print(table_of_best(results), table_of_rates(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
