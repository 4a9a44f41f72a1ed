"""Ranks that fail, or do what ranks must not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from support.replicas.replicated import Job, Recorder, Seen
from support.replicas.replicated_cases import offloaded

FAILING = Job(m=(2,))
Fault = Callable[[nn.Module, Tensor], Tensor]


class Broken(Exception):
    """The error of a test's own code."""


def step_with(
    run: hydra_ext.Run, model: nn.Module, rank: int, step: int, change: Fault | None = None, **choices: Any
) -> None:
    """Makes a step in which ``change`` is applied to the loss of the last microbatch."""
    given = FAILING.microbatches(rank, step)
    last = given[-1][1]

    def loss(batch: Any) -> Tensor:
        value = FAILING.loss(model, batch)
        return change(model, value) if change is not None and batch is last else value

    run.step([batch for _, batch in given], loss, seeds=[seed for seed, _ in given], **choices)


def raise_in_forward(_model: nn.Module, _loss: Tensor) -> Tensor:
    raise Broken("in the forward")


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: Tensor) -> Tensor:
        raise Broken("in the backward")


def raise_in_backward(model: nn.Module, loss: Tensor) -> Tensor:
    """Raises near the end of the backward."""
    embedding = model.transformer.wpe.weight
    return loss + 0 * _RaisingBackward.apply(embedding.sum())


FAULTS: dict[str, Fault] = {"forward": raise_in_forward, "backward": raise_in_backward}


def fail_and_go_on(rank: int, fault: str, round_size: int | None) -> tuple[str, list[bool], Seen]:
    """Fails in the second rank's second step, at the first attempt."""
    model, optimizer = FAILING.make(rank)
    recorder = Recorder(model, optimizer)
    error, left = "", []
    with offloaded(model, optimizer) as run:
        for step in range(FAILING.steps):
            if step == 1:
                change = FAULTS[fault] if rank == 1 else None
                try:
                    step_with(run, model, rank, step, change, round_size=round_size)
                except Exception as raised:  # noqa: BLE001 - whatever it is, is compared
                    error = f"{type(raised).__name__}: {raised}"
                left = [parameter.grad is not None for parameter in model.parameters()]
                optimizer.zero_grad()
            step_with(run, model, rank, step, round_size=round_size)
            recorder.step_ended()
    return error, left, recorder.seen


class _RunningOut(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("scripted: the device is out of memory.")


def _run_out(fault: str, model: nn.Module, loss: Tensor) -> Tensor:
    if fault == "forward":
        raise torch.OutOfMemoryError("scripted: the device is out of memory.")
    return loss + 0 * _RunningOut.apply(model.transformer.wpe.weight.sum())


def run_out_and_go_on(
    rank: int,
    fault: str,
    times: int,
    sizes: tuple[int | None, int | None],
    activations: Literal[auto] | None = None,
) -> tuple[str, int, Seen]:
    """Trains where the second rank's device runs out of memory ``times`` times in the second step.

    Returns:
        The error of that step, the retries that this rank has counted, and the results of the training.
    """
    model, optimizer = FAILING.make(rank)
    recorder = Recorder(model, optimizer)
    left, error = [times if rank == 1 else 0], ""

    def change(model: nn.Module, loss: Tensor) -> Tensor:
        if not left[0]:
            return loss
        left[0] -= 1
        return _run_out(fault, model, loss)

    with offloaded(model, optimizer, activations=activations) as run:
        for step in range(FAILING.steps):
            try:
                step_with(run, model, rank, step, change if step == 1 else None, round_size=sizes[rank])
            except Exception as raised:  # noqa: BLE001 - whatever it is, is compared
                error = f"{type(raised).__name__}: {raised}"
                optimizer.zero_grad()
                step_with(run, model, rank, step)
            recorder.step_ended()
        return error, run.report().retries, recorder.seen


def errors_of(rank: int, name: str) -> list[str]:
    """Returns the errors of a script's calls, in order; each may raise on some ranks only."""
    errors = []
    model, optimizer = FAILING.make(rank)
    with offloaded(model, optimizer) as run:
        for call in SCRIPTS[name](rank, run, model, optimizer):
            try:
                call()
                errors.append("")
            except Exception as raised:  # noqa: BLE001 - as above
                errors.append(f"{type(raised).__name__}: {raised}")
    return errors


Script = Callable[[int, hydra_ext.Run, nn.Module, torch.optim.Optimizer], list[Callable[[], object]]]


def _data(rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any) -> list[Callable[[], object]]:
    def microbatches() -> Iterator[Any]:
        yield FAILING.microbatches(rank, 0)[0][1]
        if rank == 1:
            raise Broken("of the data")

    return [
        lambda: run.step(microbatches(), lambda batch: FAILING.loss(model, batch)),
        lambda: step_with(run, model, rank, 0),
    ]


def _update(rank: int, run: hydra_ext.Run, model: nn.Module, optimizer: Any) -> list[Callable[[], object]]:
    def fail(*_: Any) -> None:
        raise Broken("in the update")

    def failing() -> None:
        handle = optimizer.register_step_pre_hook(fail) if rank == 1 else None
        try:
            step_with(run, model, rank, 0)
        finally:
            if handle is not None:
                handle.remove()

    return [failing, lambda: step_with(run, model, rank, 1)]


def _places(rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any) -> list[Callable[[], object]]:
    loss = FAILING.loss(model, FAILING.microbatches(rank, 0)[0][1])
    return [lambda: loss.backward() if rank == 1 else step_with(run, model, rank, 0)]


def _frozen(rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any) -> list[Callable[[], object]]:
    model.transformer.wpe.weight.requires_grad_(rank == 0)
    return [lambda: step_with(run, model, rank, 0)]


def _steps_inside(rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any) -> list[Callable[[], object]]:
    bias = model.transformer.ln_f.bias

    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        parameter.sub_(parameter.grad)
        parameter.grad = None

    bias.register_post_accumulate_grad_hook(step)
    backward = FAILING.microbatches(rank, 0)[0][1]
    return [lambda: FAILING.loss(model, backward).backward()]


class _Nested(torch.autograd.Function):
    """A function whose backward runs another backward, which no graph shows."""

    @staticmethod
    def forward(context: Any, x: Tensor, model: nn.Module) -> Tensor:
        context.model = model
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            context.model.transformer.ln_f.bias.pow(2).sum().backward()
        return gradient, None


def _late(rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any) -> list[Callable[[], object]]:
    handle = model.transformer.wpe.register_forward_hook(lambda _module, _args, output: _Nested.apply(output, model))
    return [lambda: step_with(run, model, rank, 0), handle.remove, lambda: step_with(run, model, rank, 0)]


def _graph(rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any) -> list[Callable[[], object]]:
    return [lambda: FAILING.loss(model, FAILING.microbatches(rank, 0)[0][1]).backward(create_graph=rank == 1)]


def _without_synchronisation(
    rank: int, run: hydra_ext.Run, model: nn.Module, _optimizer: Any
) -> list[Callable[[], object]]:
    def step() -> None:
        with run.no_sync():
            step_with(run, model, rank, 0)

    return [step, lambda: step_with(run, model, rank, 0)]


SCRIPTS: dict[str, Script] = {
    "data": _data,
    "update": _update,
    "places": _places,
    "frozen": _frozen,
    "steps inside": _steps_inside,
    "late": _late,
    "graph": _graph,
    "no_sync": _without_synchronisation,
}
