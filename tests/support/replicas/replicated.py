"""The work of ranks in tests of data parallel training, and one process that computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks, optim
from support.benches import parameter_bytes
from support.models.zoo import FAMILIES, Batch, Family
from support.models.zoo_more import MORE_FAMILIES
from support.rounds.rounds import assert_nothing_left

Seen = dict[str, Any]

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "ours": lambda parameters: optim.AdamW(parameters, lr=1e-2),
}


@dataclass(frozen=True)
class Job:
    """A training and its options.

    Attributes:
        m: Microbatches of a step, by rank; the last number counts for all further ranks.
        loop: "step"; "plain"; "no_sync", a plain loop that averages once a step.
        activations: As for ``offload``.
        nested: Whether activations are checkpointed with backwards inside the backward.
    """

    family: str = "gpt2"
    m: tuple[int, ...] = (3,)
    steps: int = 5
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    loop: str = "step"
    round_size: int | None = None
    recompute: bool | None = None
    nested: bool = False
    activations: Literal["auto"] | None = None

    @property
    def known(self) -> Family:
        return {**FAMILIES, **MORE_FAMILIES}[self.family]

    def make(self, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes a different model on each rank. Training has to begin with rank 0's model."""
        model = self.known.make(rank).to(self.dtype)
        if self.nested:
            self.known.set_checkpointing(model, reentrant=True)
        return model, OPTIMIZERS[self.optimizer](list(model.parameters()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.known.loss(model, batch)

    def microbatches(self, rank: int, step: int) -> list[tuple[int, Batch]]:
        """Returns microbatches with their seeds."""
        m = self.m[min(rank, len(self.m) - 1)]
        batches = self.known.batches(100 + rank, self.steps * m)[step * m : (step + 1) * m]
        return [(1000 * step + 10 * index + rank, batch) for index, batch in enumerate(batches)]


def values_of(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


class Recorder:
    """Everything visible of a training."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.seen: Seen = {"losses": [], "norms": [], "gradients": [], "parameters": [], "buffers": []}
        optimizer.register_step_pre_hook(lambda *_: self.note_gradients())

    def note_gradients(self) -> None:
        self.seen["gradients"].append(values_of([parameter.grad for parameter in self.model.parameters()]))

    def step_ended(self) -> None:
        self.seen["parameters"].append(values_of(list(self.model.parameters())))
        self.seen["buffers"].append(values_of(list(self.model.buffers())))

    def end(self) -> Seen:
        states = (self.optimizer.state[parameter] for parameter in self.model.parameters())
        self.seen["state"] = [
            [value.clone() for value in state.values() if isinstance(value, Tensor)] for state in states
        ]
        return self.seen


# ---- one rank -------------------------------------------------------------------------------------------------------


def tight_budget(job: Job) -> int:
    """Returns a budget for the activations of any rank's steps, and for a part of the weights."""
    largest = 0
    for rank in range(2):
        model, optimizer = job.make(0)
        recorder = Recorder(model, optimizer)
        with hydra_ext.offload(model, optimizer, budget=2**30, activations=None) as run:
            for step in range(job.steps):
                take_any_step(run, job, rank, step, recorder)
                kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD, _C.PassKind.INFERENCE)
                largest = max(largest, *(size for kind in kinds for _, size in run.core.pager.recorded(kind)))
    return largest + parameter_bytes(model) * 2 // 5


def train(rank: int, job: Job, budget: int) -> Seen:
    """Trains one rank, offloaded."""
    model, optimizer = job.make(rank)
    recorder = Recorder(model, optimizer)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=budget, checks=checks, activations=job.activations) as run:
        for step in range(job.steps):
            take_any_step(run, job, rank, step, recorder)
            assert_nothing_left(run)
            recorder.step_ended()
        recorder.seen["report"] = run.report().as_dict()
        recorder.seen["text"] = str(run.report())
    return recorder.end()


def take_any_step(run: hydra_ext.Run, job: Job, rank: int, step: int, recorder: Recorder) -> None:
    take = take_step if job.loop == "step" else take_plain_step
    take(run, job, job.microbatches(rank, step), recorder)


def take_step(run: hydra_ext.Run, job: Job, given: Sequence[tuple[int, Batch]], recorder: Recorder) -> None:
    out = run.step(
        [batch for _, batch in given],
        lambda batch: job.loss(recorder.model, batch),
        seeds=[seed for seed, _ in given],
        max_norm=job.max_norm,
        round_size=job.round_size,
        recompute=job.recompute,
    )
    recorder.seen["losses"] += values_of(out.losses)
    recorder.seen["norms"] += [] if out.grad_norm is None else [out.grad_norm.clone()]


def take_plain_step(run: hydra_ext.Run, job: Job, given: Sequence[tuple[int, Batch]], recorder: Recorder) -> None:
    for index, (seed, batch) in enumerate(given):
        torch.manual_seed(seed)
        last = index + 1 == len(given)
        with nullcontext() if last or job.loop == "plain" else run.no_sync():
            loss = job.loss(recorder.model, batch)
            (loss / len(given)).backward()
        recorder.seen["losses"].append(loss.detach().clone())
    update(job, recorder)


def update(job: Job, recorder: Recorder) -> None:
    if job.max_norm is not None:
        clip = optim.clip_grad_norm_ if job.optimizer == "ours" else torch.nn.utils.clip_grad_norm_
        recorder.seen["norms"].append(clip(recorder.model.parameters(), job.max_norm).clone())
    recorder.optimizer.step()
    recorder.optimizer.zero_grad()


# ---- all ranks in one process ---------------------------------------------------------------------------------------


def average(models: Sequence[nn.Module]) -> None:
    """Replaces gradients by their sum in the order of the ranks, divided by the number of ranks."""
    for copies in zip(*(model.parameters() for model in models), strict=True):
        if all(copy.grad is None for copy in copies):
            continue
        parts = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        for copy in copies:
            copy.grad = total / len(copies)


def train_together(job: Job, size: int = 2) -> list[Seen]:
    """Returns the expected results of each rank: plain PyTorch, with one model for each rank."""
    made = [job.make(rank) for rank in range(size)]
    for model, _ in made[1:]:
        model.load_state_dict(made[0][0].state_dict())
    recorders = [Recorder(model, optimizer) for model, optimizer in made]
    for step in range(job.steps):
        given = [job.microbatches(rank, step) for rank in range(size)]
        for index in range(max(len(mine) for mine in given)):
            for recorder, mine in zip(recorders, given, strict=True):
                if index < len(mine):
                    seed, batch = mine[index]
                    torch.manual_seed(seed)
                    loss = job.loss(recorder.model, batch)
                    (loss / len(mine)).backward()
                    recorder.seen["losses"].append(loss.detach())
            if job.loop == "plain":
                average([recorder.model for recorder in recorders])
        if job.loop != "plain":
            average([recorder.model for recorder in recorders])
        for recorder in recorders:
            update(job, recorder)
            recorder.step_ended()
    return [recorder.end() for recorder in recorders]


def differences(ours: Any, plain: Any, path: str = "") -> list[str]:
    """Lists where two nested values of tensors are not equal to the last bit."""
    if isinstance(plain, Tensor) and isinstance(ours, Tensor):
        assert not plain.isnan().any(), f"{path} proves nothing: it is NaN"
        same = ours.dtype == plain.dtype and torch.equal(ours, plain)
        return [] if same else [path]
    if isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return [f"{path}: {len(ours)} in place of {len(plain)}"]
        pairs = enumerate(zip(ours, plain, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{path}.{index}")]
    return [] if ours == plain else [f"{path}: {ours} in place of {plain}"]
