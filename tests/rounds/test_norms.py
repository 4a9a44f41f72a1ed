"""The squares of gradients are summed as they leave: the same norm to the bit, and no sum of what has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks, optim
from hydra_ext.optim import threads
from hydra_ext.runtime.placement import homes
from support.benches import Outcome, assert_same
from support.runtime.native import WIDTH, stack, state

STEPS = 3
MICROBATCHES = 4
ROOMY = 2**24
BATCHES = list(torch.randn(STEPS * MICROBATCHES, 8, WIDTH, generator=torch.Generator().manual_seed(1)))
Prepare = Callable[[nn.Module], object]


@pytest.fixture(autouse=True)
def _no_homes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There gradients do not leave."""
    monkeypatch.setattr(homes, "STEPS_TO_SEE", 2**20)


class Ways(nn.Module):
    """Layers of which a batch takes some, and a first one that is the last one, too."""

    def __init__(self, *, divergent: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.layers = stack()
        if tied:
            self.layers[-1].weight = self.layers[0].weight
        self._divergent = divergent
        self._seen = 0

    def forward(self, x: Tensor) -> Tensor:
        odd = bool(x.view(-1)[0] > 0)
        for number, layer in enumerate(self.layers):
            if not (self._divergent and number in ((1, 4) if odd else (2,))):
                x = torch.tanh(layer(x))
        return x


class Sharing(nn.Module):
    """Its batches share a graph, so that they cannot be run together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()
        self._kept = torch.zeros(())
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self._calls % 2 == 0:
            self._kept = torch.zeros(1, requires_grad=True) + 1
        self._calls += 1
        return self.layers(x) * self._kept


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def train_loop(model: nn.Module) -> Outcome:
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    seen: Outcome = []
    for step in range(STEPS):
        for batch in BATCHES[step * MICROBATCHES : (step + 1) * MICROBATCHES]:
            (loss_of(model, batch) / MICROBATCHES).backward()
        seen.append(optim.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *state(model, optimizer)]


def train_rounds(model: nn.Module, **choices: Any) -> tuple[Outcome, list[int], hydra_ext.Report]:
    """What the loop gives, and how many sums each step took of those made as gradients left."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    seen: Outcome = []
    taken: list[int] = []
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run:
        for step in range(STEPS):
            batches = BATCHES[step * MICROBATCHES : (step + 1) * MICROBATCHES]
            before = run.core.gradients.norm.taken
            out = run.step(batches, lambda batch: loss_of(model, batch), max_norm=1e-3, recompute=False, **choices)
            assert out.grad_norm is not None
            seen.append(out.grad_norm)
            taken.append(run.core.gradients.norm.taken - before)
        report = run.report()
    assert report.windows > 0
    return [*seen, *state(model, optimizer)], taken, report


def count(model: nn.Module) -> int:
    return len(list(model.parameters()))


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_size", [MICROBATCHES, 3, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameters_sum_is_made_as_its_last_gradient_leaves(round_size: int, tied: bool) -> None:
    model = Ways(tied=tied)
    seen, taken, report = train_rounds(model, round_size=round_size)
    assert_same(train_loop(Ways(tied=tied)), seen)
    assert taken == [count(model)] * STEPS
    assert (report.refusals, report.fallbacks) == (0, 0)


def test_microbatches_that_take_different_ways_have_their_sums_too() -> None:
    seen, taken, report = train_rounds(Ways(divergent=True), round_size=MICROBATCHES)
    assert_same(train_loop(Ways(divergent=True)), seen)
    assert taken == [count(Ways())] * STEPS
    assert (report.refusals, report.fallbacks) == (0, 0)


def test_what_the_last_round_does_not_reach_is_summed_afterwards() -> None:
    seen, taken, report = train_rounds(Ways(divergent=True), round_size=1)
    assert_same(train_loop(Ways(divergent=True)), seen)
    skipped = [4 if bool(BATCHES[(step + 1) * MICROBATCHES - 1].view(-1)[0] > 0) else 2 for step in range(STEPS)]
    assert taken == [count(Ways()) - number for number in skipped]
    assert (report.refusals, report.fallbacks) == (0, 0)


def test_microbatches_that_run_one_at_a_time_have_their_sums_too() -> None:
    seen, taken, report = train_rounds(Sharing(), round_size=MICROBATCHES)
    assert_same(train_loop(Sharing()), seen)
    assert taken == [count(Ways())] * STEPS
    assert (report.refusals, report.fallbacks) == (1, STEPS * MICROBATCHES)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


def double_unseen(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(2.0)


@pytest.mark.parametrize("change", [double, double_unseen])
@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_a_hook_that_changes_gradients_voids_the_sums(change: Callable[[Tensor], None], which: str) -> None:
    def hooked(model: Ways) -> Ways:
        layers = {"all": model.layers, "first": model.layers[:1], "last": model.layers[-1:]}[which]
        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(change)
        return model

    seen, taken, report = train_rounds(hooked(Ways()), round_size=MICROBATCHES)
    assert_same(train_loop(hooked(Ways())), seen)
    # Backward comes to the first layer last.
    assert taken == [count(Ways()) - 2 if which == "last" else 0] * STEPS
    assert (report.refusals, report.fallbacks) == (0, 0)


def test_a_hook_that_changes_another_parameters_gradient_voids_its_sum() -> None:
    def hooked(model: Ways) -> Ways:
        last = model.layers[-1].weight
        model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: double_unseen(last))
        return model

    seen, taken, _ = train_rounds(hooked(Ways()), round_size=1)
    assert_same(train_loop(hooked(Ways())), seen)
    assert max(taken) <= 1  # the bias beside the weight may come after its hook


def norm_of_gradients(model: nn.Module) -> float:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return _C.norm_of_sums(_C.sums_of_squares(gradients, threads.pool(None)))


@pytest.mark.parametrize("round_size", [MICROBATCHES, 1])
def test_gradients_that_leave_in_another_type_have_the_sums_of_what_arrived(round_size: int) -> None:
    model = Ways()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(norm_of_gradients(model)))
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, grad_dtype=torch.bfloat16, checks=checks) as run:
        for step in range(STEPS):
            out = run.step(BATCHES[:MICROBATCHES], lambda b: loss_of(model, b), max_norm=1e-3, round_size=round_size)
            assert out.grad_norm == torch.tensor(norms[step], dtype=torch.float32)
        assert run.core.gradients.norm.taken == STEPS * count(model)
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
        assert run.report().windows > 0


@pytest.mark.parametrize("last", [False, True])
def test_a_gradient_that_the_loss_gives_to_the_parameter_itself_has_no_sum(last: bool) -> None:
    """But what comes from the device after it has, and is the whole."""
    model = Ways()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(norm_of_gradients(model)))
    bias = model.layers[2].bias

    def loss(batch: Tensor) -> Tensor:
        early = bias.sum() if last else None  # backward ends with what forward began with
        value = loss_of(model, batch)
        return value + (bias.sum() if early is None else early)

    with hydra_ext.offload(model, optimizer, budget=ROOMY) as run:  # poisoned hosts may not be used by a loss
        for batch in BATCHES[:STEPS]:
            out = run.step([batch], loss, max_norm=1e-3)
            assert out.grad_norm == torch.tensor(norms[-1], dtype=torch.float32)
        assert run.core.gradients.norm.taken == STEPS * (count(model) - last)
        assert run.report().windows > 0
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)


def test_a_scaler_or_a_step_without_a_norm_wants_no_sums() -> None:
    model = Ways()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        plain = run.step(BATCHES[:2], lambda b: loss_of(model, b))
        scaled = run.step(BATCHES[:2], lambda b: loss_of(model, b), max_norm=1e-3, scaler=scaler)
        assert plain.grad_norm is None
        assert scaled.grad_norm is not None
        assert run.core.gradients.norm.taken == 0


def test_a_step_that_failed_leaves_no_sums_behind() -> None:
    model = Ways()

    def stop(*_: Any) -> None:
        raise RuntimeError("by the user's code")

    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        handle = model.layers[1].register_full_backward_hook(stop)
        with pytest.raises(RuntimeError, match="by the user's code"):
            run.step(BATCHES[:2], lambda b: loss_of(model, b), max_norm=1e-3)
        handle.remove()
        loss_of(model, BATCHES[0]).backward()
        assert run.core.gradients.norm.take(list(model.parameters())) == [None] * count(model)


# ---- what voids a sum -----------------------------------------------------------------------------------------------


@contextmanager
def summed_as_they_left(model: nn.Module) -> Iterator[hydra_ext.Run]:
    """After one backward."""
    with hydra_ext.offload(model, budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        run.core.gradients.norm.begin(threads.pool(None))
        loss_of(model, BATCHES[0]).backward()
        yield run


def replace(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def turn(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.t()


@pytest.mark.parametrize("change", [double, replace, turn], ids=lambda change: change.__name__)
def test_a_gradient_that_is_not_what_arrived_has_no_sum(change: Callable[[Tensor], None]) -> None:
    model = stack()
    parameters = list(model.parameters())
    with summed_as_they_left(model) as run:
        norm = run.core.gradients.norm
        change(parameters[4])
        known = norm.take(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        expected: list[float | None] = list(_C.sums_of_squares(gradients, threads.pool(None)))
        expected[4] = None
        assert known == expected
        assert norm.take(parameters) == [None] * len(parameters)


def test_sums_can_be_voided_by_who_writes_unseen() -> None:
    model = stack()
    parameters = list(model.parameters())
    with summed_as_they_left(model) as run:
        norm = run.core.gradients.norm
        norm.forget()
        loss_of(model[3:], BATCHES[0].to(run.device)).backward()
        assert [known is None for known in norm.take(parameters)] == [True] * 6 + [False] * 6
