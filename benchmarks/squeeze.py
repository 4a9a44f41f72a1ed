"""The smallest budget at which a step runs in any mode; and a little above it ten steps in that mode and by themselves.

For each model, the smallest budget at which one ``run.step`` runs, with rounds of 1 to 4 microbatches, kept or
recomputed, is found by bisection; then at ``--factor`` times that ten steps are made in that mode, and ten for which
nothing is given but the budget, and compared with plain PyTorch bit for bit. Prints a table.

    python benchmarks/squeeze.py [--models NAME ...] [--factor 1.06]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import hydra_ext
from support.rounds.squeeze import AUTOMATIC, Mode, Trained, smallest, train, train_plain
from support.rounds.squeezed import SUBJECTS, Subject


def verdict(subject: Subject, budget: int, mode: Mode, steps: int, plain: Trained) -> tuple[str, Trained | None]:
    try:
        trained = train(subject, budget, mode, steps)
    except torch.OutOfMemoryError as error:
        return f"**{str(error)[:150]}**", None
    return "equal" if trained.equals(plain) else "**differs**", trained


def row(subject: Subject, factor: float, steps: int) -> str:
    weights = sum(parameter.nbytes for parameter in subject.make().parameters())
    least, mode = smallest(subject, lambda text: print(text, file=sys.stderr, flush=True))
    budget = int(factor * least)
    plain = train_plain(subject, steps)
    in_mode, _ = verdict(subject, budget, mode, steps, plain)
    automatic, trained = verdict(subject, budget, AUTOMATIC, steps, plain)
    by_step = trained.retries if trained is not None else ()
    report = trained.report if trained is not None else None
    counts = f"{report.rounds} | {report.refusals} | {report.fallbacks}" if report is not None else "| |"
    return (
        f"| {subject.name} | {weights / 2**20:.2f} | {least / 2**20:.3f} | {mode} | {in_mode} | {automatic} | "
        f"{', '.join(map(str, by_step))} | {counts} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--factor", type=float, default=1.06)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"hydra_ext {hydra_ext.__version__}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(
        "| model | weights, MiB | smallest budget, MiB | in the mode | ten steps in it | ten automatic | retries after "
        "each step | rounds | refusals | fallbacks |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in options.models:
        begin = time.perf_counter()
        print(row(SUBJECTS[name], options.factor, options.steps), flush=True)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
