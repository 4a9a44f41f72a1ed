"""Passes of a user's loop that have no backward, or fail: what was measured there says nothing of other passes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from hydra_ext.activations.profiler import Profiler
from hydra_ext.errors import StateError
from hydra_ext.runtime.step_planner import PlannedStep, StepPlanner
from support.runtime.fitted import optimizer_of
from support.runtime.layered import ROWS, WIDTH, Layered, data, loss_of

AMPLE = 1_200_000  # all weights take 0.55 MiB
Act = Callable[[nn.Module], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sigmoid())


def net() -> Layered:
    torch.manual_seed(0)
    return Layered([Layer() for _ in range(4)])


@contextmanager
def offloaded(model: nn.Module, *, trained: bool = True) -> Iterator[hydra_ext.Run]:
    optimizer = optimizer_of(model) if trained else None
    options: Any = {"device": SimulatedDevice(), "checks": Checks(poison_hosts=True)}
    with hydra_ext.offload(model, optimizer, budget=AMPLE, **options) as run:
        yield run


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Profiler]]:
    """All that was made to measure a microbatch."""
    made: list[weakref.ref[Profiler]] = []
    measure = StepPlanner.measure

    def noted(planner: StepPlanner) -> Profiler:
        profiler = measure(planner)
        made.append(weakref.ref(profiler))
        return profiler

    monkeypatch.setattr(StepPlanner, "measure", noted)
    return made


def planned(run: hydra_ext.Run) -> PlannedStep:
    assert run.fit is not None
    assert run.fit.applied is not None
    return run.fit.applied


def calls(run: hydra_ext.Run) -> set[int]:
    """Of modules, in the measured pass of the plan."""
    return {figures.calls for figures in planned(run).problem.profile.modules.values() if figures.saved.all}


def train(model: nn.Module, x: Tensor, passes: int = 2) -> None:
    for _ in range(passes):
        loss_of(model, x).backward()


def evaluate(model: nn.Module) -> None:
    for x in data(2):
        loss_of(model, x).item()


def fail_in_forward(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.zeros(ROWS, WIDTH - 1))


def fail_in_backward(model: nn.Module) -> None:
    loss = loss_of(model, data(1)[0])

    def raises(_gradient: Tensor) -> None:
        raise KeyError("of the user")

    loss.register_hook(raises)
    with pytest.raises(KeyError, match="of the user"):
        loss.backward()


@pytest.mark.parametrize("act", [evaluate, fail_in_forward, fail_in_backward])
def test_such_a_pass_leaves_no_mark_on_the_plan(act: Act, measurements: list[weakref.ref[Profiler]]) -> None:
    plans = []
    for disturbed in (False, True):
        model = net()
        with offloaded(model) as run:
            if disturbed:
                act(model)
            train(model, data(1)[0])
            assert calls(run) == {1}
            plans.append(planned(run))
    assert plans[0] == plans[1]
    assert plans[0].problem.profile.modules[""].saved == plans[1].problem.profile.modules[""].saved
    gc.collect()
    assert [each() for each in measurements] == [None] * len(measurements)


@pytest.mark.parametrize("act", [evaluate, fail_in_forward, fail_in_backward])
def test_after_such_a_pass_a_microbatch_of_another_size_has_its_own_plan(act: Act) -> None:
    """Whether the plan of the pass stands already, or it was measured."""
    small, large = data(1)[0][: ROWS // 8], data(1)[0]
    for stands in (False, True):
        model = net()
        with offloaded(model) as run:
            train(model, large, passes=2 * stands)
            act(model)
            train(model, small)
            of_small = planned(run).problem.profile.modules[""].saved.fresh
            train(model, large)
            of_large = planned(run).problem.profile.modules[""].saved.fresh
        assert 7 * of_small < of_large


def test_a_model_that_is_not_trained_is_measured_three_times(measurements: list[weakref.ref[Profiler]]) -> None:
    teacher, [x] = net().requires_grad_(False), data(1)
    expected = teacher(x)
    with offloaded(teacher, trained=False):
        assert all(torch.equal(teacher(x), expected) for _ in range(12))
        gc.collect()
        assert [each() for each in measurements] == [None] * 3


def test_a_model_is_measured_when_it_is_trained_after_all(measurements: list[weakref.ref[Profiler]]) -> None:
    model, [x] = net(), data(1)
    with offloaded(model) as run:
        for _ in range(8):
            evaluate(model)
        assert len(measurements) == 3
        train(model, x, passes=3)
        assert len(measurements) == 4
        assert calls(run) == {1}


class Checkpointed(Layered):
    def __init__(self, reentrant: bool) -> None:
        super().__init__([Layer() for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def test_a_backward_inside_a_backward_ends_no_pass(measurements: list[weakref.ref[Profiler]]) -> None:
    peaks = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        with offloaded(model) as run:
            train(model, data(1)[0])
            peaks.append(planned(run).problem.profile.modules[""].backward_bytes)
    assert len(measurements) == 2
    assert peaks[1] == pytest.approx(peaks[0], rel=0.25)


class CallingItself(Layered):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == ROWS:
            x = torch.cat([x[ROWS // 8 :], self(x[: ROWS // 8])[:, :1].expand(-1, WIDTH)])
        return super().forward(x)


def test_a_model_that_calls_itself_is_measured_once(measurements: list[weakref.ref[Profiler]]) -> None:
    torch.manual_seed(0)
    model = CallingItself([Layer() for _ in range(4)])
    with offloaded(model) as run:
        train(model, data(1)[0], passes=3)
        assert planned(run)
    assert len(measurements) == 1


def test_a_step_whose_forward_is_not_seen_has_no_plan_to_show() -> None:
    """A checkpoint around the model has hooks on saved tensors, which take precedence."""
    torch.manual_seed(0)
    model = net()
    with hydra_ext.offload(model, optimizer_of(model), budget=4 * AMPLE, device=SimulatedDevice()) as run:
        for step in range(2):
            run.step(data(2), lambda x: checkpoint(model, x, use_reentrant=False).mean(), seeds=[step, step])
        with pytest.raises(StateError, match="nothing was planned"):
            run.plan()


class Counting(Layer):
    """Counts its calls in a tensor of four bytes that it is given."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        count.add_(1)
        return super().forward(x)


class Counted(Layered):
    def forward(self, x: Tensor) -> Tensor:
        count = torch.zeros(1, device=x.device)
        for layer in self.layers:
            x = layer(x, count)
        return self.head(x) * count


def test_a_module_that_writes_to_a_small_argument_is_not_to_be_repeated() -> None:
    torch.manual_seed(0)
    model = Counted([Counting() for _ in range(4)])
    with offloaded(model) as run:
        train(model, data(1)[0])
        figures = planned(run).problem.profile.modules
    assert not any(figures[f"layers.{number}"].is_repeatable for number in range(4))
    assert figures["layers.0.up"].is_repeatable
