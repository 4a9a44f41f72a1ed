"""Pipelines of small stages in several processes, and the recurrences that they have to equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext import Checks, schedule
from hydra_ext.errors import HydraError, InvalidArgument
from hydra_ext.pipeline import Pipeline
from hydra_ext.split.stage_program import event_seed

WIDTH = 12
CLASSES = 7


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x += 0.0  # a stage may write to its input
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)

    def forward(self, microbatch: dict[str, Tensor]) -> Tensor:
        return self.embedding(microbatch["ids"])


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.inner(x.clone()), x, use_reentrant=False)


def make_stages(count: int, *, dropout: float = 0.0, checkpoints: bool = False) -> list[nn.Module]:
    """Makes stages with the same numbers in every process."""
    torch.manual_seed(0)
    stages: list[list[nn.Module]] = [[Layer(dropout), Layer(dropout)] for _ in range(count)]
    if checkpoints:
        stages = [[Checkpointed(layer) for layer in layers] for layers in stages]
    stages[0].insert(0, First())
    stages[-1].append(Last())
    return [nn.Sequential(*modules) for modules in stages]


def make_microbatch(step: int, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(CLASSES, (2, 3 + index % 2), generator=generator)
    return {"ids": ids, "labels": torch.randint(CLASSES, ids.shape, generator=generator)}


def loss_of(output: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(output.flatten(0, 1), microbatch["labels"].flatten())
    return loss * microbatch["scale"] if "scale" in microbatch else loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def native_adamw(parameters: Any) -> torch.optim.Optimizer:
    return hydra_ext.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def native_sgd(parameters: Any) -> torch.optim.Optimizer:
    return hydra_ext.optim.SGD(parameters, lr=0.05, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "native-adamw": native_adamw, "native-sgd": native_sgd}


@dataclass(frozen=True)
class Case:
    """One training."""

    schedule: str = "2bw"
    stages: int = 2
    microbatches: int = 4
    optimizer: str = "adamw"
    steps: int = 8
    max_norm: float | None = None
    dropout: float = 0.0
    checkpoints: bool = False  # whether the pipeline's stages, not the reference, checkpoint each layer
    recompute: bool = False
    budget: int | None = None
    replicas: int = 1
    counts: tuple[int, ...] = ()  # microbatches of each step, if they differ
    decays: bool = False  # whether the learning rate decays after each step
    drains: tuple[int, ...] = ()  # steps that a drain follows
    evaluates: bool = False  # whether an evaluation follows each step
    spoils: tuple[int, int] | None = None  # a replica and a step: one of its microbatches has the loss NaN
    waits: bool = False  # whether each forward waits until the gradients of the last step are summed

    def count(self, step: int) -> int:
        return self.counts[step % len(self.counts)] if self.counts else self.microbatches


def schedule_of(case: Case) -> str | schedule.Schedule:
    """Returns the built-in schedule: "-sync" with vertical sync, "-ahead" with one ahead, "-text" parsed from text."""
    options = {"stages": case.stages, "microbatches": case.microbatches}
    if case.schedule == "pipedream-sync":
        return schedule.make("pipedream", vertical_sync=True, **options)
    if case.schedule.endswith("-ahead"):
        return schedule.make(case.schedule.removesuffix("-ahead"), ahead=1, **options)
    if case.schedule.endswith("text"):
        return schedule.Schedule.parse(schedule.make(case.schedule.removesuffix("-text"), **options).text)
    return case.schedule


def data_of(case: Case, step: int, replica: int = 0) -> list[dict[str, Tensor]]:
    data = [make_microbatch(step, 100 * replica + index) for index in range(case.count(step))]
    if case.spoils == (replica, step):
        data[-1]["scale"] = torch.tensor(float("nan"))
    return data


@dataclass
class Trained:
    """The results of a training: losses by step, and the final weights by stage."""

    losses: list[Tensor]
    norms: list[float | None]
    evaluations: list[list[Tensor]]
    weights: dict[int, list[Tensor]]


# ---- the pipeline ---------------------------------------------------------------------------------------------------
def pipeline_of(case: Case, stages: list[nn.Module], make: Any = None, *, poisons: bool = True) -> Pipeline:
    """Makes the pipeline of a case.

    Args:
        make: Makes another optimizer than the case's.
        poisons: Whether hosts are poisoned, if the case has a budget.
    """
    return Pipeline(
        None,
        make or OPTIMIZERS[case.optimizer],
        stages=stages,
        schedule=schedule_of(case),
        microbatches=case.microbatches,
        replicas=case.replicas,
        recompute=case.recompute,
        budget=case.budget,
        checks=Checks(poison_hosts=True) if poisons and case.budget is not None else None,
        seed=5,
    )


def wait_for_gradients(pipe: Pipeline) -> None:
    """Waits, within a forward or ``fn``, so that the next action finds the gradients of the last step."""
    pending = pipe._engine.executor.updates._pending
    summed = [each.gradients for each in pending.values() if each.gradients is not None]
    pipe._watch.wait_for(lambda: all(gradients.done for gradients in summed))


def begun_updates(pipe: Pipeline) -> list[tuple[int, int]]:
    """Returns the updates that run behind the current actions, by batch and stage."""
    pending = pipe._engine.executor.updates._pending
    return [(batch, stage) for batch, each in pending.items() for stage in each.begun]


def train(rank: int, case: Case) -> dict[str, Any]:
    stages = make_stages(case.stages, dropout=case.dropout, checkpoints=case.checkpoints)
    pipe = pipeline_of(case, stages)
    for stage in stages if case.waits else ():
        stage.register_forward_pre_hook(lambda *_: wait_for_gradients(pipe))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in pipe.optimizers]
    outputs, evaluations = [], []
    for step in range(case.steps):
        outputs.append(pipe.step(data_of(case, step, pipe.replica), loss_of, max_norm=case.max_norm))
        for scheduler in schedulers if case.decays else ():
            scheduler.step()
        if step in case.drains:
            pipe.drain()
        if case.evaluates:
            evaluations.append(evaluate(pipe, stages, data_of(case, step + 100, pipe.replica), step))
    norms = [None if output.grad_norm is None else output.grad_norm.item() for output in outputs]
    losses = [output.losses for output in outputs]
    device = pipe.report().device
    pipe.close()
    behind = pipe.report().updates_behind
    own = {
        stage: [p.detach().clone() for p in stages[stage].parameters()] for stage in pipe.schedule.stages_of(pipe.place)
    }
    return {
        "losses": losses,
        "norms": norms,
        "evaluations": evaluations,
        "weights": own,
        "device": device and device.as_dict(),
        "updates_behind": behind,
    }


def evaluate(pipe: Pipeline, stages: Sequence[nn.Module], data: Any, step: int) -> Sequence[Tensor]:
    """Evaluates as users do: from step to step with gradients, with ``no_grad``, or in inference mode."""
    for stage in stages:
        stage.eval()
    with (nullcontext(), torch.no_grad(), torch.inference_mode())[step % 3]:
        losses = [loss.clone() for loss in pipe.evaluate(data, loss_of).losses]
    for stage in stages:
        stage.train()
    return losses


def train_all(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [train(rank, case) for case in cases]


# ---- the reference --------------------------------------------------------------------------------------------------
def forward(stages: Sequence[nn.Module], microbatch: Any, seed: int) -> Tensor:
    """Runs one microbatch through all stages, with the documented random numbers."""
    value = microbatch
    for index, stage in enumerate(stages):
        torch.manual_seed(event_seed(seed, index))
        value = stage(value)
        torch.manual_seed(event_seed(seed, index, after=True))
    return loss_of(value, microbatch)


def moved(data: Sequence[dict[str, Tensor]], device: str) -> list[dict[str, Tensor]]:
    return [{name: value.to(device) for name, value in microbatch.items()} for microbatch in data]


def seed_of(replica: int, step: int, microbatch: int) -> int:
    return event_seed(event_seed(event_seed(5, replica), step), microbatch)


def recurrence(case: Case, delay: int | Sequence[int], device: str = "cpu") -> Trained:
    """W(t+1) = W(t) - v * grad f(W(max(t - delay, 0))), in one process; by stage if there are several delays."""
    delays = [delay] * case.stages if isinstance(delay, int) else delay
    newest = nn.ModuleList(make_stages(case.stages, dropout=case.dropout)).to(device)
    versions = [copy.deepcopy(newest)]
    optimizer = OPTIMIZERS[case.optimizer](newest.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trained = Trained([], [], [], {})
    for step in range(case.steps):
        used = nn.ModuleList(versions[max(step - late, 0)][stage] for stage, late in enumerate(delays))
        sums = []
        for replica in range(case.replicas):
            used.zero_grad()
            losses = []
            for index, microbatch in enumerate(moved(data_of(case, step, replica), device)):
                loss = forward(used, microbatch, seed_of(replica, step, index))
                (loss / case.count(step) if case.count(step) > 1 else loss).backward()
                losses.append(loss.detach().cpu())
            trained.losses.append(torch.stack(losses))
            sums.append([parameter.grad for parameter in used.parameters()])
        for parameter, *gradients in zip(newest.parameters(), *sums, strict=True):
            parameter.grad = mean(gradients)
        norm = None
        if case.max_norm is not None:
            norm = hydra_ext.optim.clip_grad_norm_(newest.parameters(), case.max_norm)
        trained.norms.append(None if norm is None else norm.item())
        if norm is None or norm.isfinite():
            optimizer.step()
        if case.decays:
            scheduler.step()
        versions.append(copy.deepcopy(newest))
        if case.evaluates:
            newest.eval()
            with torch.no_grad():
                evaluated = [forward(newest, microbatch, 0) for microbatch in data_of(case, step + 100)]
            newest.train()
            trained.evaluations.append(evaluated)
    trained.weights = {index: [p.detach().cpu() for p in stage.parameters()] for index, stage in enumerate(newest)}
    return trained


def mean(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total / len(gradients) if len(gradients) > 1 else total


def norms_told(case: Case, norms: Sequence[float | None], delay: int) -> list[float | None]:
    """Returns the norm that each step reports: that of the last update since the step before, None without one.

    A delayed update is made two steps later, or in a drain.
    """
    told: list[float | None] = []
    made = updates = 0
    for step in range(case.steps):
        made = max(made, step - 1 if delay else step + 1)
        told.append(norms[made - 1] if made > updates else None)
        updates = made
        if case.evaluates or step in case.drains:
            made = step + 1
    return told


def same(ranks: Sequence[dict[str, Any]], expected: Trained, case: Case, delay: int | Sequence[int]) -> None:
    """Asserts that every rank has the losses of its replica, and each stage its weights, to the last bit."""
    for rank, result in enumerate(ranks):
        replica = rank % case.replicas
        own = expected.losses[replica :: case.replicas]
        for step, (losses, wanted) in enumerate(zip(result["losses"], own, strict=True)):
            found = torch.stack(list(losses))
            assert torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True), (
                f"{case}: {rank}, losses of step {step}"
            )
        for found, wanted in zip(result["evaluations"], expected.evaluations, strict=True):
            assert torch.equal(torch.stack(list(found)), torch.stack(wanted)), f"{case}: rank {rank}, evaluation"
        if isinstance(delay, int):
            wanted_norms = [str(norm) for norm in norms_told(case, expected.norms, delay)]
            assert [str(norm) for norm in result["norms"]] == wanted_norms, f"{case}: rank {rank}, norms"
        for stage, weights in result["weights"].items():
            for index, (weight, wanted) in enumerate(zip(weights, expected.weights[stage], strict=True)):
                assert torch.equal(weight, wanted), f"{case}: rank {rank}, weight {index} of stage {stage}"


def train_unevenly(rank: int) -> list[str]:
    """Returns the errors if stages or replicas differ in the number of microbatches, or in ``max_norm``."""
    return [
        _error_of(lambda step: step(4 - rank, None), replicas=1),
        _error_of(lambda step: step(4, 1.0 + rank), replicas=1),
        _error_of(lambda step: step(4, None if rank else 1.0), replicas=1),
        _error_of(lambda step: step(4, 1.0 + rank), replicas=2),
        _error_of(lambda step: step(4, None if rank else 1.0), replicas=2),
    ]


def _error_of(body: Callable[[Callable[[int, float | None], Any]], Any], *, replicas: int) -> str:
    stages = make_stages(2 // replicas)
    pipe = Pipeline(None, adamw, stages=stages, schedule="2bw", microbatches=4, replicas=replicas, seed=5)

    def step(count: int, max_norm: float | None) -> Any:
        return pipe.step([make_microbatch(0, index) for index in range(count)], loss_of, max_norm=max_norm)

    try:
        for _ in range(3):
            body(step)
    except HydraError as error:
        pipe.close()
        return str(error)
    return ""


def clip_too_soon(rank: int) -> tuple[str, float]:
    """Returns the error of a step with ``max_norm``, and the loss of the next step without."""
    with Pipeline(None, adamw, stages=make_stages(2), schedule="pipedream", microbatches=1, seed=5) as pipe:
        try:
            pipe.step([make_microbatch(0, 0)], loss_of, max_norm=1.0)
        except InvalidArgument as error:
            return str(error), pipe.step([make_microbatch(0, 0)], loss_of).loss.item()
    return "", 0.0
