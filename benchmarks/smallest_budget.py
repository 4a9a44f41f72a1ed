"""The smallest budget that trains a model with nothing chosen, beside lower bounds and what plain PyTorch takes.

A step is ``run.step`` over four microbatches with hydra_ext.optim.AdamW and clipping; the budget is the only option.

(smallest) By bisection, within 1 %: three steps while it is sought, then ten, whose losses, weights and buffers are
    compared with plain PyTorch's bit for bit, on poisoned hosts. If the ten run out of memory, 1 % more is tried.
(dry run) The floor of a run on fake tensors, before any step: what is alive in one microbatch if each saved tensor
    leaves at once, with the blocks in use, gradients until they are summed, what convolutions take for themselves, and
    buffers. Blocks are those of a roomy budget; small budgets may have smaller blocks. Goal: at most 1.10 times that.
(operator) The bytes of the largest operation of one microbatch's forward and backward, as PyTorch dispatches it below
    autograd: its inputs, weights among them, and its outputs. A storage counts once, with the bytes of the largest
    view of it that the operation was given. What kernels allocate meanwhile does not count, nor does the optimizer.
    Goal on models that were not tuned on: in the median at most 2.5 times, at worst 4 times that.
(plain) Weights, buffers, gradients of all that is trained, and the storages that one microbatch saves for backward.
    Neither the optimizer's state nor what is alive for a moment is in it.

Convolutional models are in channels last: in the other layout oneDNN copies what convolutions take and give into
layouts of its own. --channels-first has a table of that.

    python benchmarks/smallest_budget.py [--models NAME ...] [--channels-first] [--sweep]

With --sweep budgets rise by equal ratios from the smallest to plain's bytes with what three more microbatches save: 100
for three models, 12 for the others. At each three steps are made on an asynchronous simulated device with poisoned
hosts, and compared likewise.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import transformers
from fitted_models import SUBJECTS, Subject
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hydra_ext
from hydra_ext.errors import BudgetTooSmall, NotOnFakeTensors
from hydra_ext.profile.dry_run import dry_run

MICROBATCHES, MAX_NORM = 4, 1.0
SEARCH_STEPS, STEPS = 3, 10
CLOSE = 1.01
OF_FLOOR, MEDIAN, WORST = 1.10, 2.5, 4.0
THOROUGH = ("VGG-16", "Llama", "ViT")  # swept over 100 budgets
MANY, FEW = 100, 12
MIB = 2**20


# ---- training -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    state: dict[str, Tensor]
    retries: int = 0

    def equals(self, other: Trained) -> bool:
        same = all(torch.equal(a, b) for a, b in zip(self.losses, other.losses, strict=True))
        return same and all(torch.equal(value, other.state[name]) for name, value in self.state.items())


def optimizer_of(model: nn.Module) -> hydra_ext.optim.AdamW:
    return hydra_ext.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def seeds_of(step: int) -> list[int]:
    return [1000 * step + index for index in range(MICROBATCHES)]


def trained(model: nn.Module, losses: list[Tensor], retries: int = 0) -> Trained:
    return Trained(losses, {name: value.detach().clone() for name, value in model.state_dict().items()}, retries)


def train_plain(subject: Subject, steps: int) -> Trained:
    model = subject.make()
    optimizer = optimizer_of(model)
    batches = subject.batches(steps * MICROBATCHES)
    losses = []
    for step in range(steps):
        for seed in seeds_of(step):
            torch.manual_seed(seed)
            loss = subject.loss(model, batches[len(losses)])
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        hydra_ext.optim.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return trained(model, losses)


def train(subject: Subject, budget: int, steps: int, *, asynchronous: bool = False) -> Trained:
    model = subject.make()
    batches = subject.batches(steps * MICROBATCHES)
    losses: list[Tensor] = []
    with hydra_ext.offload(
        model,
        optimizer_of(model),
        budget=budget,
        device=hydra_ext.SimulatedDevice(asynchronous=asynchronous),
        checks=hydra_ext.Checks(poison_hosts=True),
    ) as run:
        for step in range(steps):
            microbatches = batches[step * MICROBATCHES : (step + 1) * MICROBATCHES]
            made = run.step(
                microbatches, lambda batch: subject.loss(model, batch), max_norm=MAX_NORM, seeds=seeds_of(step)
            )
            losses += made.losses
        retries = run.report().retries
    return trained(model, losses, retries)


def why_not(subject: Subject, budget: int, steps: int) -> str:
    """Why a budget does not train; empty if it does."""
    try:
        train(subject, budget, steps)
    except (torch.OutOfMemoryError, BudgetTooSmall) as error:
        return str(error)
    return ""


def smallest(subject: Subject, guess: int) -> int:
    """The smallest budget that makes three steps, within 1 %."""
    high = guess
    while reason := why_not(subject, high, SEARCH_STEPS):
        tell(f"{subject.name}: {high / MIB:.3f} does not: {reason}")
        high = int(1.1 * high)
    low = int(high / 1.15)
    while not why_not(subject, low, SEARCH_STEPS):
        high, low = low, int(low / 1.15)
    while high > CLOSE * low:
        middle = int((low * high) ** 0.5)
        if reason := why_not(subject, middle, SEARCH_STEPS):
            tell(f"{subject.name}: {middle / MIB:.3f} does not: {reason}")
            low = middle
        else:
            tell(f"{subject.name}: {middle / MIB:.3f} trains")
            high = middle
    return high


# ---- bounds ---------------------------------------------------------------------------------------------------------
class LargestOperation(TorchDispatchMode):
    """Finds the operation whose inputs and outputs take the most bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.bytes = "", 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        parts: dict[int, int] = {}
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                known = parts.get(storage.data_ptr(), 0)
                parts[storage.data_ptr()] = max(known, min(storage.nbytes(), tensor.nbytes))
        if sum(parts.values()) > self.bytes:
            self.name, self.bytes = str(func).removeprefix("aten.").partition(".")[0], sum(parts.values())
        return output


@dataclass
class Saved:
    """What one microbatch saves for backward: each storage once, without parameters and buffers."""

    storages: dict[int, int] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)  # so that no address comes twice

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        self.held.append(tensor)
        return tensor


@dataclass(frozen=True)
class Bounds:
    """Bytes; ``floor`` is 0 where fn cannot run on fake tensors."""

    weights: int
    floor: int
    operator: int
    operator_name: str
    saved: int
    plain: int


def bounds_of(subject: Subject) -> Bounds:
    model, batch = subject.make(), subject.batches(1)[0]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    try:
        floor = dry_run(model, batch, lambda given: subject.loss(model, given)).least_bytes() + buffers
    except NotOnFakeTensors as error:
        tell(f"{subject.name}: no dry run: {error}")
        floor = 0
    largest, saved = LargestOperation(), Saved()
    with saved_tensors_hooks(saved.note, lambda tensor: tensor), largest:
        subject.loss(model, batch).backward()
    own = {part.untyped_storage().data_ptr() for part in (*model.parameters(), *model.buffers())}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    activations = sum(size for storage, size in saved.storages.items() if storage not in own)
    plain = weights + buffers + gradients + activations
    return Bounds(weights, floor, largest.bytes, largest.name, activations, plain)


# ---- tables ---------------------------------------------------------------------------------------------------------
def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ten_steps(subject: Subject, budget: int) -> tuple[int, Trained]:
    """The budget, or the first one above it by hundredths, that makes ten steps."""
    while True:
        try:
            return budget, train(subject, budget, STEPS)
        except (torch.OutOfMemoryError, BudgetTooSmall) as error:
            tell(f"{subject.name}: {budget / MIB:.3f} makes three steps, but not ten: {error}")
            budget = int(CLOSE * budget)


@dataclass(frozen=True)
class Found:
    smallest: int
    bounds: Bounds
    is_equal: bool

    @property
    def of_floor(self) -> float:
        return self.smallest / self.bounds.floor if self.bounds.floor else 0.0

    @property
    def of_operator(self) -> float:
        return self.smallest / self.bounds.operator


def find(subject: Subject) -> Found:
    begin = time.perf_counter()
    bounds = bounds_of(subject)
    least, made = ten_steps(subject, smallest(subject, bounds.floor or 2 * bounds.operator))
    is_equal = made.equals(train_plain(subject, STEPS))
    found = Found(least, bounds, is_equal)
    floor = f"{bounds.floor / MIB:.2f} | {found.of_floor:.2f}" if bounds.floor else "- | -"
    print(
        f"| {subject.name}{' *' if subject.is_tuned_on else ''} | {bounds.weights / MIB:.2f} | {least / MIB:.2f} | "
        f"{floor} | {bounds.operator / MIB:.2f} ({bounds.operator_name}) | {found.of_operator:.2f} | "
        f"{bounds.plain / MIB:.2f} | {1 - least / bounds.plain:.0%} | {'equal' if is_equal else '**differ**'} | "
        f"{made.retries} |",
        flush=True,
    )
    tell(f"{subject.name}: {time.perf_counter() - begin:.0f} s")
    return found


def table(subjects: Sequence[Subject]) -> bool:
    """Prints the table. Returns whether the goals are met."""
    print(
        "| model | weights | smallest | dry run | times | operator bound | times | plain | less | bits | retries |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    found = {subject.name: find(subject) for subject in subjects}
    others = [found[subject.name].of_operator for subject in subjects if not subject.is_tuned_on]
    over = [name for name, each in found.items() if each.of_floor > OF_FLOOR]
    held = [not over, all(each.is_equal for each in found.values())]
    print(f"\nMiB. * tuned on. Above {OF_FLOOR} of the dry run: {', '.join(over) or 'none'}.")
    if others:
        held += [median(others) <= MEDIAN, max(others) <= WORST]
        print(f"Not tuned on: {median(others):.2f} times the operator bound in the median, {max(others):.2f} at worst.")
    return all(held)


def sweep(subject: Subject, count: int) -> int:
    """Trains with budgets from the smallest to a roomy one, and prints a line. Returns the number of failures."""
    begin = time.perf_counter()
    bounds = bounds_of(subject)
    low, _ = ten_steps(subject, smallest(subject, bounds.floor or 2 * bounds.operator))
    high = bounds.plain + (MICROBATCHES - 1) * bounds.saved
    plain = train_plain(subject, SEARCH_STEPS)
    failures, retries = 0, []
    for number in range(count):
        budget = int(low * (high / low) ** (number / (count - 1)))
        try:
            made = train(subject, budget, SEARCH_STEPS, asynchronous=True)
        except (torch.OutOfMemoryError, BudgetTooSmall) as error:
            tell(f"{subject.name}: FAILS at {budget / MIB:.3f}: {error}")
            failures += 1
            continue
        if not made.equals(plain):
            tell(f"{subject.name}: DIFFERS at {budget / MIB:.3f}")
            failures += 1
        retries.append(made.retries)
        tell(f"{subject.name}: {budget / MIB:.3f}, {made.retries} retries")
    print(
        f"| {subject.name} | {count} | {low / MIB:.2f} to {high / MIB:.2f} | {failures} | "
        f"{sum(retries)} (at most {max(retries, default=0)}, in {sum(map(bool, retries))} budgets) |",
        flush=True,
    )
    tell(f"{subject.name}: {time.perf_counter() - begin:.0f} s")
    return failures


def sweeps(subjects: Sequence[Subject]) -> bool:
    print("| model | budgets | MiB | failures | retries |\n| --- | --- | --- | --- | --- |")
    failures = sum(sweep(subject, MANY if subject.name in THOROUGH else FEW) for subject in subjects)
    print(f"\nfailures = {failures}")
    return failures == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--channels-first", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(
        f"hydra_ext {hydra_ext.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"load {load:.1f}\n"
    )
    subjects = [SUBJECTS[name] for name in options.models]
    if options.channels_first:
        subjects = [replace(each, layout=torch.contiguous_format) for each in subjects if each.layout is not None]
    return 0 if (sweeps if options.sweep else table)(subjects) else 1


if __name__ == "__main__":
    sys.exit(main())
