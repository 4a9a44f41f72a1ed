"""Several threads, what a thread is charged for, and gradients and parameters that go other ways."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, prune

import hydra_ext
from hydra_ext import _C, Checks, SimulatedDevice
from hydra_ext.errors import StateError
from support.benches import ROOMY, Outcome, assert_same
from support.runtime.leaving import beside

WIDTH = 64
BATCHES = torch.randn(6, 8, WIDTH, generator=torch.Generator().manual_seed(1))
POISONED = Checks(poison_hosts=True)


def stack(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Outcome:
    loss = model(batch).pow(2).mean()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach().clone(), norm.clone()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def faces(model: nn.Module) -> int:
    return sum(_C.is_face(parameter) for parameter in model.parameters())


class Elsewhere:
    """A thread that stands inside the model's forward until it is let go, or the context is left."""

    def __init__(self, model: nn.Module, *, grad: bool = False) -> None:
        self._inside, self._go = threading.Event(), threading.Event()
        self._errors: list[Exception] = []

        def stand(*_: Any) -> None:
            if threading.current_thread() is self._thread:
                self._inside.set()
                assert self._go.wait(60)

        def run() -> None:
            try:
                with torch.set_grad_enabled(grad):
                    model(BATCHES[0])
            except hydra_ext.errors.ModelChanged as error:
                self._errors.append(error)

        self._handle = model[1].register_forward_pre_hook(stand)  # type: ignore[index]
        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self._inside.wait(60)

    def let_go(self) -> list[Exception]:
        self._go.set()
        self._thread.join()
        self._handle.remove()
        return self._errors

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


# ---- threads that overlap -------------------------------------------------------------------------------------------


def test_an_optimizer_step_while_another_thread_is_inside_is_refused_before_it_writes() -> None:
    model = stack()
    optimizer = adam(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with hydra_ext.offload(model, optimizer, budget=ROOMY), Elsewhere(model) as other:
        model(BATCHES[0]).sum().backward()
        with pytest.raises(StateError, match="under way, here or in another thread"):
            optimizer.step()
        assert other.let_go() == []
        assert_same(before, [parameter.detach().clone() for parameter in model.parameters()])
        optimizer.step()


def test_a_write_while_another_thread_is_inside_is_an_error_for_both() -> None:
    model = stack()
    weight = model[0].weight
    with hydra_ext.offload(model, budget=ROOMY), Elsewhere(model) as other:
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(StateError, match=r"wrote to '0.weight' while another thread was inside"):
            model(BATCHES[0])
        (error,) = other.let_go()
        assert "wrote to '0.weight' while the forward ran" in str(error)
        with torch.no_grad():
            assert torch.equal(model(BATCHES[0]), nn.Sequential(*model)(BATCHES[0]))


@pytest.mark.full
def test_figures_are_read_while_another_thread_trains() -> None:
    """Tensors end under the interpreter's lock, which no reader may hold while it waits for a figure."""
    command = [sys.executable, "-W", "ignore", "-m", "support.runtime.figures_beside"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_leaving_the_context_waits_for_threads_inside() -> None:
    model = stack()
    context = hydra_ext.offload(model, budget=ROOMY)
    with context, Elsewhere(model) as other, beside(lambda: context.__exit__(None, None, None)) as leaver:
        leaver.join(0.3)
        assert leaver.is_alive()
        assert other.let_go() == []
        leaver.join()
        assert faces(model) == 0


def test_a_context_left_from_inside_its_own_forward_leaves_a_plain_model() -> None:
    model = stack()
    context = hydra_ext.offload(model, budget=ROOMY, checks=POISONED)
    model[1].register_forward_pre_hook(lambda *_: context.__exit__(None, None, None))
    with context, torch.no_grad():
        assert torch.equal(model(BATCHES[0]), stack()(BATCHES[0]))
    assert faces(model) == 0
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in stack().parameters()])


# ---- what a thread is charged for -----------------------------------------------------------------------------------


def test_a_forward_that_no_backward_follows_charges_its_thread_while_its_graph_lives() -> None:
    model = stack()
    with hydra_ext.offload(model, budget=ROOMY) as run:
        output = model(BATCHES[0])
        held = output.exp()  # of the loss, say
        assert _C.on_simulated_device(held)
        best = output.argmax(-1)
        del output, held
        gc.collect()
        assert not _C.on_simulated_device(torch.zeros(10))
        assert run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS) == best.nbytes


def test_an_evaluation_without_graph_charges_nothing_afterwards() -> None:
    model = stack()
    with hydra_ext.offload(model, budget=ROOMY), torch.no_grad():
        model(BATCHES[0])
        assert not _C.on_simulated_device(torch.zeros(10))


def test_no_thread_is_charged_beyond_the_context() -> None:
    model = stack()
    done, ended = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        output = model(BATCHES[0])
        seen.append(_C.on_simulated_device(output * 2))
        done.set()
        assert ended.wait(60)
        seen.append(_C.on_simulated_device(torch.zeros(10)))

    with contextlib.ExitStack() as beyond, hydra_ext.offload(model, budget=ROOMY):
        beyond.enter_context(beside(work, until=ended))
        assert done.wait(60)
    assert seen == [True, False]


def _charged(answer: Any) -> None:
    answer.put(_C.on_simulated_device(torch.zeros(10)))


def test_a_forked_child_is_not_charged_for_its_parents_loss() -> None:
    model = stack()
    with hydra_ext.offload(model, budget=ROOMY):
        loss = model(BATCHES[0]).sum()
        context = multiprocessing.get_context("fork")
        answer = context.SimpleQueue()
        child = context.Process(target=_charged, args=(answer,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert answer.get() is False
        assert _C.on_simulated_device(loss * 2)


# ---- gradients and parameters that go other ways --------------------------------------------------------------------


class Inner(nn.Module):
    """A module that trains a part of itself in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = stack()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        loss.backward()
        return loss.detach()


def test_training_inside_the_models_own_forward_is_refused_and_inside_a_plain_one_works() -> None:
    model = Inner()
    with (
        hydra_ext.offload(model, budget=ROOMY, device=SimulatedDevice(to_host_bytes_per_second=1e6)),
        pytest.raises(StateError, match="Offload the inner module"),
    ):
        model(BATCHES[0])
    plain, outer = Inner(), Inner()
    plain(BATCHES[0])
    with hydra_ext.offload(outer.net, budget=ROOMY, checks=POISONED):
        outer(BATCHES[0])
    assert_same([p.grad for p in plain.parameters()], [p.grad for p in outer.parameters()])


class Assigns(torch.autograd.Function):
    """Writes a parameter's gradient by hand, as reversible networks do."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        context.linear, context.value = linear, value.detach()
        return value @ linear.weight.detach().T

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.linear.weight.grad = gradient.T @ context.value
        return gradient @ context.linear.weight.detach(), None


def test_a_gradient_that_a_function_assigns_by_hand_comes_home() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = stack(2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return Assigns.apply(self.first(batch), self.second)  # type: ignore[no-any-return, no-untyped-call]

    plain, model = Model(), Model()
    plain(BATCHES[0]).sum().backward()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        model(BATCHES[0]).sum().backward()
        assert run.report().windows == 2
    assert_same(
        [p.grad for p in plain.parameters() if p.grad is not None],
        [p.grad for p in model.parameters() if p.grad is not None],
    )


def test_a_parameter_that_a_forward_returns_shows_its_value_of_now() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = stack(), nn.Parameter(torch.ones(16))

        def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.body(batch).sum() * self.scale.sum(), self.scale

    def work(model: nn.Module) -> Outcome:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        seen = []
        for batch in BATCHES[:2]:
            loss, scale = model(batch)
            loss.backward()
            optimizer.step()
            seen.append(scale.detach().clone())
        return seen

    model = Scaled()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED):
        seen = work(model)
    assert_same(work(Scaled()), seen)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: prune.l1_unstructured(model[0], "weight", 0.3),
        lambda model: setattr(model[1], "weight", model[0].weight),
        lambda model: setattr(model[1], "again", model[1].weight),
    ],
    ids=["renamed", "tied", "under two names"],
)
def test_parameters_that_move_inside_the_context_are_still_found(change: Callable[[nn.Module], Any]) -> None:
    def work(model: nn.Module) -> Outcome:
        optimizer = adam(model)
        seen = step(model, optimizer, BATCHES[0])
        change(model)
        return seen + [value for batch in BATCHES[1:3] for value in step(model, optimizer, batch)]

    model = stack()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        seen = work(model)
        assert run.core.gate.foreign_entries == 0
    assert faces(model) == 0
    assert_same(work(stack()), seen)


def test_a_forward_that_keeps_a_parameter_under_another_name_keeps_the_models_own() -> None:
    class Keeps(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.last = self.weight
            return super().forward(input)

    torch.manual_seed(0)
    model = Keeps(WIDTH, WIDTH)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED):
        first, second = model(BATCHES[0]).detach(), model(BATCHES[0]).detach()
    assert torch.equal(first, second)
    assert model.last is model.weight


def test_parameters_that_share_memory_are_poisoned_and_revealed_together() -> None:
    def tied() -> nn.Sequential:
        model = stack(3)
        model[2].weight.data = model[0].weight.data
        return model

    model = tied()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED):
        output = model(BATCHES[0]).detach().clone()
    assert torch.equal(output, tied()(BATCHES[0]))
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in tied().parameters()])
