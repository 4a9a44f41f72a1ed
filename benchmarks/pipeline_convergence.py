"""What 2bw costs a real pipeline's training: python benchmarks/pipeline_convergence.py [--steps 250]

A small GPT-2 over bytes learns Python's help texts on two ranks, as a plain module that hydra_ext.Pipeline splits:
with 1f1b, with 2bw, and with 2bw and DelayCorrectedAdamW; the same first weights, tokens, rates (linear warm-up over a
tenth of the steps, cosine to a tenth), clipping at 1 and decay of 0.1. Every loss of every step has to be, to the last
bit, that of one process: plain training's for 1f1b, and the recurrence W(t+1) = W(t) - u(grad f(W(t-1))) for 2bw. (The
output layer has weights of its own: of a weight that both ranks hold, the sum is added in another order.)

Writes the losses (.csv), their curves and gaps (.png), and prints a table. Three minutes of two cores.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from delay_convergence import BETAS, DECAY, LENGTH, share_of_rate
from ranks import run_ranks
from torch import Tensor, nn

import hydra_ext
from hydra_ext.integrations import byte_text
from hydra_ext.optim import AdamW, DelayCorrectedAdamW, clip_grad_norm_

LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 64, 16, 4
RATES = (1e-3, 3e-3)
LAST = 25  # steps at the end whose mean loss is compared
SMOOTH = 10  # steps in a point of a curve


@dataclass(frozen=True)
class Case:
    name: str
    schedule: str
    optimizer: Any
    delay: int


CASES = (
    Case("1f1b, AdamW", "1f1b", AdamW, 0),
    Case("2bw, AdamW", "2bw", AdamW, 1),
    Case("2bw, DelayCorrectedAdamW", "2bw", DelayCorrectedAdamW, 1),
)
Losses = dict[tuple[str, float], list[float]]


def make_model() -> nn.Module:
    model: Any = byte_text.model(layers=LAYERS, width=WIDTH, length=LENGTH).eval()  # no dropout
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def make_batches(steps: int) -> list[tuple[Tensor, ...]]:
    return [batch.chunk(MICROBATCHES) for batch in byte_text.batches(count=steps, rows=ROWS, length=LENGTH)]


def rates_of(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))


def train_in_pipeline(rank: int, steps: int) -> Losses:
    batches = make_batches(steps)
    losses: Losses = {}
    for case in CASES:
        for rate in RATES:
            model = make_model()

            def loss_of(ids: Tensor, model: nn.Module = model) -> Tensor:
                return byte_text.loss_of(model, ids)

            def optimizer(parameters: Any, case: Case = case, rate: float = rate) -> torch.optim.Optimizer:
                return case.optimizer(parameters, lr=rate, betas=BETAS, weight_decay=DECAY)

            with hydra_ext.Pipeline(model, optimizer, schedule=case.schedule, microbatches=MICROBATCHES) as pipe:
                pipe.prepare(batches[0][0], loss_of)
                schedulers = [rates_of(each, steps) for each in pipe.optimizers]
                outputs = []
                for batch in batches:
                    outputs.append(pipe.step(list(batch), loss_of, max_norm=1.0))
                    for scheduler in schedulers:
                        scheduler.step()
                losses[case.name, rate] = [output.loss.item() for output in outputs]
    return losses


def train_in_one_process(case: Case, rate: float, steps: int) -> list[float]:
    newest = make_model()
    older = copy.deepcopy(newest)
    optimizer = case.optimizer(newest.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)
    scheduler = rates_of(optimizer, steps)
    losses = []
    for batch in make_batches(steps):
        used = older if case.delay else newest
        before = copy.deepcopy(newest) if case.delay else newest
        used.zero_grad()
        each = []
        for ids in batch:
            loss = byte_text.loss_of(used, ids)
            (loss / len(batch)).backward()
            each.append(loss.detach())
        for parameter, other in zip(newest.parameters(), used.parameters(), strict=True):
            parameter.grad = other.grad
        clip_grad_norm_(newest.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        older = before
        losses.append(torch.stack(each).mean().item())
    return losses


def check(pipeline: Losses, steps: int) -> None:
    for case in CASES:
        for rate in RATES:
            expected = train_in_one_process(case, rate, steps)
            found = pipeline[case.name, rate]
            differing = [step for step, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
            if differing:
                step = differing[0]
                raise SystemExit(f"{case.name}, {rate:g}: step {step} has {found[step]!r}, expected {expected[step]!r}")
            what = "the recurrence" if case.delay else "plain training"
            print(f"{case.name}, rate {rate:g}: all {steps} losses are those of {what}, to the last bit", flush=True)


def smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, at + 1 - SMOOTH) : at + 1]) for at in range(len(values))]


def table(losses: Losses) -> str:
    lines = [f"| last {LAST} steps' mean loss, by rate | {' | '.join(f'{rate:g}' for rate in RATES)} |"]
    lines.append("| --- " * (1 + len(RATES)) + "|")
    for case in CASES:
        cells = []
        for rate in RATES:
            mean = statistics.fmean(losses[case.name, rate][-LAST:])
            gap = mean - statistics.fmean(losses[CASES[0].name, rate][-LAST:])
            cells.append(f"{mean:.4f}" + (f" ({gap:+.4f})" if case.delay else ""))
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(losses: Losses, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"{name}, rate {rate:g}" for name, rate in losses)])
        writer.writerows(
            [step, *(f"{value:.5f}" for value in row)] for step, row in enumerate(zip(*losses.values(), strict=True))
        )


def draw(losses: Losses, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(RATES), figsize=(12, 7), sharex=True, sharey="row")
    for column, rate in enumerate(RATES):
        reference = losses[CASES[0].name, rate]
        for case in CASES:
            curve = losses[case.name, rate]
            axes[0][column].plot(smooth(curve), label=case.name)
            gap = [value - other for value, other in zip(curve, reference, strict=True)]
            axes[1][column].plot(smooth(gap), label=case.name)
        axes[0][column].set_title(f"rate {rate:g}")
        axes[1][column].set_xlabel("step")
    axes[0][0].set_ylabel(f"training loss, mean of {SMOOTH} steps")
    axes[1][0].set_ylabel(f"gap to 1f1b, mean of {SMOOTH} steps")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the curves")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(
        f"{sum(each.numel() for each in make_model().parameters())} parameters on 2 ranks, {options.steps} batches of "
        f"{MICROBATCHES} x {ROWS // MICROBATCHES} x {LENGTH} bytes; Python {platform.python_version()}, torch "
        f"{torch.__version__}, hydra_ext {hydra_ext.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    ranks = run_ranks(train_in_pipeline, options.steps, size=2)
    if ranks[0] != ranks[1]:
        raise SystemExit("the ranks were told different losses")
    check(ranks[0], options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today()}-pipeline-convergence"
    write(ranks[0], options.out / f"{name}.csv")
    draw(ranks[0], options.out / f"{name}.png")
    print(table(ranks[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
