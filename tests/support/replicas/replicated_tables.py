"""Ranks that train models with embedding tables, beside ``DistributedDataParallel`` in the same processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hydra_ext
from hydra_ext import optim
from support.tables import BUDGET, HOST_BUDGET, ROWS, WIDTH, Batch, Recommender, batches, copied, parts

Step = list[Batch]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "ours": lambda parameters: optim.AdamW(parameters, lr=0.1),
    "our sgd": lambda parameters: optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.01),
}


class Skipping(Recommender):
    """Leaves a table out where its batch says so."""

    def forward(self, batch: Batch) -> Tensor:
        if not batch.get("without"):
            return super().forward(batch)
        bags = self.bags(batch["indices"], batch["offsets"])
        return self.top(torch.cat([torch.zeros_like(bags), bags], dim=1)).squeeze(1)


class Tables(nn.Module):
    """Tables and nothing else."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum")

    def forward(self, batch: Batch) -> Tensor:
        return self.bags(batch["indices"], batch["offsets"]).sum(dim=1)


@dataclass(frozen=True)
class TableJob:
    """A training and its options.

    Attributes:
        way: "step"; "loop", whose backwards are averaged each; "no_sync", a loop that averages once a step.
        m: Microbatches of a step, by rank.
        empty: Rank whose bags are all empty, in each second microbatch.
        without: Ranks that leave the first table out in each second microbatch; if ``early``, in each.
        early: Whether a backward of its own, without synchronisation, comes before each step; on the first rank it
            uses both tables.
        options: Of the model.
        spills: Whether the tables are at home on the disk.
    """

    sparse: bool = True
    optimizer: str = "adagrad"
    way: str = "loop"
    m: tuple[int, ...] = (2, 2, 2)
    steps: int = 3
    max_norm: float | None = None
    empty: int | None = None
    without: tuple[int, ...] = ()
    early: bool = False
    frozen: bool = False
    only: bool = False
    budget: int = BUDGET
    options: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    spills: bool = False

    def make(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        if self.only:
            return Tables(sparse=self.sparse)
        kind = Skipping if self.without else Recommender
        model = kind(sparse=self.sparse, **self.options)
        model.one.weight.requires_grad_(not self.frozen)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch), batch["target"])

    def given(self, rank: int) -> list[Step]:
        found = batches(self.m[rank] * self.steps, seed=rank)
        for number, batch in enumerate(found):
            if number % 2 and rank == self.empty:
                batch["indices"], batch["offsets"] = batch["indices"][:0], torch.zeros_like(batch["offsets"])
            batch["without"] = (self.early or number % 2 == 1) and rank in self.without
        return [found[first : first + self.m[rank]] for first in range(0, len(found), self.m[rank])]


@dataclass
class Seen:
    """What is visible of a training: for each step losses, norm and gradients, and in the end all tensors."""

    tensors: list[Tensor | None] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    def note_gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.tensors += [None] if parameter.grad is None else parts(copied(parameter.grad))

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tensors += [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            state = optimizer.state.get(parameter, {})
            self.tensors += [value.clone() for _, value in sorted(state.items()) if torch.is_tensor(value)]


def train_plain(rank: int, job: TableJob) -> Seen:
    """Trains with ``DistributedDataParallel``."""
    model = job.make(5)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    wrapped = DistributedDataParallel(model, find_unused_parameters=bool(job.without))
    seen = Seen()
    for group in job.given(rank):
        _early(rank, job, wrapped, group, wrapped.no_sync)
        _loop(job, wrapped, group, wrapped.no_sync, seen)
        _update(job, model, optimizer, seen)
    seen.end(model, optimizer)
    return seen


def train_offloaded(rank: int, job: TableJob) -> Seen:
    """Trains with rows on the device, from another model on each rank."""
    model = job.make(5 + rank)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    seen, device = Seen(), hydra_ext.SimulatedDevice(poison=True)
    home: dict[str, Any] = {"host_budget": HOST_BUDGET, "spill_dir": tempfile.gettempdir()} if job.spills else {}
    with hydra_ext.offload(model, optimizer, budget=job.budget, device=device, **home) as run:
        for group in job.given(rank):
            if job.way == "step":
                out = run.step(group, lambda batch: job.loss(model, batch), max_norm=job.max_norm, **job.step)
                seen.tensors += [*out.losses, *([] if out.grad_norm is None else [out.grad_norm])]
            else:
                _loop(job, model, group, run.no_sync, seen)
                _update(job, model, optimizer, seen)
        report = run.report()
        seen.report = {**report.as_dict()["tables"], "peak": report.peak_bytes, "reduced": report.reduced_bytes}
    seen.end(model, optimizer)
    return seen


def _early(rank: int, job: TableJob, model: nn.Module, group: Step, no_sync: Callable[[], Any]) -> None:
    if job.early:
        with no_sync():
            job.loss(model, {**group[0], "without": rank > 0}).backward()


def _loop(job: TableJob, model: nn.Module, group: Step, no_sync: Callable[[], Any], seen: Seen) -> None:
    for number, batch in enumerate(group):
        with nullcontext() if job.way == "loop" or number + 1 == len(group) else no_sync():
            loss = job.loss(model, batch)
            (loss / len(group)).backward()
        seen.tensors.append(loss.detach().clone())


def _update(job: TableJob, model: nn.Module, optimizer: torch.optim.Optimizer, seen: Seen) -> None:
    if job.max_norm is not None:
        seen.tensors.append(optim.clip_grad_norm_(model.parameters(), job.max_norm))
    if job.way != "step" and "our" not in job.optimizer:  # reading gradients makes them dense
        seen.note_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def train_beside(rank: int, jobs: Sequence[TableJob]) -> list[tuple[list[Any], list[Any], dict[str, Any]]]:
    """For each job the tensors of the offloaded training, those of the plain one, and the report on tables."""
    found = []
    for job in jobs:
        ours = train_offloaded(rank, job)
        found.append((ours.tensors, train_plain(rank, job).tensors, ours.report))
    return found


def sent_rows(job: TableJob, rank: int, ranks: int) -> int:
    """Rows of gradients that a rank sends: when gradients are averaged, all that its own gradient has by then."""
    given = [job.given(each) for each in range(ranks)]
    total = 0
    for step in range(job.steps):
        for names in (["indices"],) if job.only or job.frozen else (["one", "again"], ["indices"]):
            names = [name for name in names if name != "again" or job.options.get("twice")]
            held: list[set[int]] = [set() for _ in given]
            for number in range(max(job.m[:ranks])):
                found = [_looked_up(*groups[step][number : number + 1], names=names) for groups in given]
                held = [before | now for before, now in zip(held, found, strict=True)]
                if job.way == "loop" and any(found):
                    total += len(held[rank])
                    held = [set().union(*held) for _ in held]
            total += 0 if job.way == "loop" else len(held[rank])
    return total


def _looked_up(*given: Batch, names: Sequence[str]) -> set[int]:
    used = [batch for batch in given if not (batch["without"] and "one" in names)]
    return {int(row) for batch in used for name in names for row in batch[name]}


# ---- failures -------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """The error of a test's own code."""


class _Raise(torch.autograd.Function):
    """A function whose backward raises."""

    @staticmethod
    def forward(context: Any, x: Tensor, errors: list[Exception]) -> Tensor:
        context.errors = errors
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if context.errors:
            raise context.errors.pop()
        return gradient, None


def disturbed(
    rank: int, jobs: Sequence[TableJob], fault: str, memory: bool
) -> list[tuple[list[Any], list[Any], str, int]]:
    """Trains jobs of which the second rank fails in the second step, beside plain trainings that do not.

    Args:
        fault: "forward", or "backward" for the end of the backward, when the ranks have met.
        memory: Whether the device runs out of memory, twice.

    Returns:
        For each job the tensors of the plain training and of the other one, the error of the step, and the retries.
    """
    found = []
    for job in jobs:
        error: Exception = torch.OutOfMemoryError("scripted: out of memory.") if memory else Broken(f"in the {fault}")
        found.append((train_plain(rank, job).tensors, *_train_disturbed(rank, job, fault, error, 1 + memory)))
    return found


def _train_disturbed(rank: int, job: TableJob, fault: str, error: Exception, times: int) -> tuple[list[Any], str, int]:
    model: Any = job.make(5 + rank)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    seen, errors, raised = Seen(), [], ""
    last = job.given(rank)[1][-1] if rank == 1 else {"indices": torch.empty(0)}  # the microbatch that fails
    if fault == "backward":
        model.bags.register_forward_hook(
            lambda _, args, output: _Raise.apply(output, errors) if args[0].equal(last["indices"]) else output
        )

    def loss_of(batch: Batch) -> Tensor:
        if fault == "forward" and errors and batch["indices"].equal(last["indices"]):
            raise errors.pop()
        return job.loss(model, batch)

    with hydra_ext.offload(model, optimizer, budget=job.budget, device="simulated", activations=None) as run:
        for number, group in enumerate(job.given(rank)):
            if (number, rank) == (1, 1):
                errors += [error] * times
            try:
                _early(rank, job, model, group, run.no_sync)
                out = run.step(group, loss_of, max_norm=job.max_norm, **job.step)
            except Exception as caught:  # noqa: BLE001 - whatever it is, is compared
                raised = f"{type(caught).__name__}: {caught}"
                optimizer.zero_grad()
                out = run.step(group, loss_of, max_norm=job.max_norm, **job.step)
            seen.tensors += [*out.losses, *([] if out.grad_norm is None else [out.grad_norm])]
        retries = run.report().retries
    seen.end(model, optimizer)
    return seen.tensors, raised, retries


def errors_of(rank: int) -> list[str]:
    """The errors of trainings that ranks refuse."""
    return [_error_of(script, rank) for script in (_mixed, _written, _frozen, _of_different_kinds)]


def _error_of(script: Callable[[int], object], rank: int) -> str:
    try:
        script(rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, is compared
        return f"{type(error).__name__}: {error}"
    return ""


def _mixed(rank: int) -> None:
    """One rank uses the table outside the model, too, where its gradient is dense."""
    model = Recommender(sparse=True)
    with hydra_ext.offload(model, budget=20 * BUDGET, device="simulated"):
        loss = model(batches(1)[0]).sum()
        (loss if rank == 0 else loss + model.one.weight.sum()).backward()


def _written(_rank: int) -> None:
    model = Recommender(sparse=True)

    @torch.no_grad()
    def step(weight: Tensor) -> None:
        weight -= weight.grad

    with hydra_ext.offload(model, budget=BUDGET, device="simulated"):
        model.bags.weight.register_post_accumulate_grad_hook(step)
        model(batches(1)[0]).sum().backward()


def _frozen(rank: int) -> None:
    model = Recommender(sparse=True)
    with hydra_ext.offload(model, budget=BUDGET, device="simulated"):
        model.one.weight.requires_grad_(rank == 0)
        model(batches(1)[0]).sum().backward()


def _of_different_kinds(rank: int) -> None:
    with hydra_ext.offload(Recommender(sparse=rank == 0), budget=BUDGET, device="simulated"):
        pass


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def resume(rank: int, jobs: Sequence[TableJob], folder: str) -> list[tuple[list[Any], list[Any]]]:
    """For each job the tensors of a training that goes on from a checkpoint, and those of a plain one."""
    found = []
    for number, job in enumerate(jobs):
        _train_until(rank, job, job.steps - 1, f"{folder}/{number}")
        ours = _train_until(rank, job, job.steps, f"{folder}/{number}")
        found.append((ours, train_plain(rank, job).tensors[-len(ours) :]))
    return found


def _train_until(rank: int, job: TableJob, until: int, folder: str) -> list[Any]:
    model = job.make(5 + rank)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    with hydra_ext.offload(model, optimizer, budget=job.budget, device="simulated") as run:
        run.load(folder)
        for group in job.given(rank)[run.steps : until]:
            run.step(group, lambda batch: job.loss(model, batch), max_norm=job.max_norm)
        run.save(folder)
    seen = Seen()
    seen.end(model, optimizer)
    return seen.tensors


def materialized(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of a model that was built without memory, on entering; and those that rank 0 is to have built."""
    torch.manual_seed(5 + rank)
    model = hydra_ext.materialize(lambda: Recommender(sparse=True))
    with hydra_ext.offload(model, budget=BUDGET, device="simulated"):
        pass
    torch.manual_seed(5)
    return [list(each.parameters()) for each in (model, Recommender(sparse=True))]
