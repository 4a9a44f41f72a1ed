"""Rounds that run out of device memory: undone whole, tried another way, and equal to the undisturbed step."""

from __future__ import annotations

import gc
import logging
import pickle
import random
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.errors import BudgetTooSmall, HostBudgetTooSmall
from hydra_ext.runtime.rounds.choice import Choice, Decision
from support.pairwise import covering_rows
from support.rounds.running_out import LAYERS, Case, Net, batches, differences, loss_of, train_disturbed
from support.rounds.squeeze import AUTOMATIC, EVERY_MODE, runs, smallest, train, train_plain
from support.rounds.squeezed import SUBJECTS

FACTORS: dict[str, list[Any]] = {
    "where": ["forward", "backward"],
    "block": list(range(LAYERS + 1)),
    "at": [(1,), (4,), (2, 5)],  # the last: once more, in the second of the smaller rounds
    "optimizer": ["ours", "torch"],
    "scaler": [False, True],
    "clip": [False, True],
    "before": [False, True],
    "home": ["host", "device", "disk"],
    "activations": ["auto", None],
}


def _allowed(row: dict[str, Any]) -> bool:
    on_device_or_disk = row.get("home", "host") != "host"
    if on_device_or_disk and row.get("optimizer") == "torch":
        return False  # its state is made where it likes
    if row.get("home") == "device" and row.get("scaler"):
        return False  # which changes gradients on the host
    return not (row.get("home") == "disk" and row.get("before") and row.get("where") == "backward")  # see below


SAMPLE = [Case(**row) for row in covering_rows(FACTORS, allowed=_allowed)]
EVERY = [
    Case(**row) for values in product(*FACTORS.values()) if _allowed(row := dict(zip(FACTORS, values, strict=True)))
]


@pytest.mark.every_case
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_step_that_ran_out_of_memory_is_equal_to_one_that_did_not(case: Case, tmp_path: Path) -> None:
    assert differences(case, tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_step_that_ran_out_of_memory_anywhere_is_equal(case: Case, tmp_path: Path) -> None:
    assert differences(case, tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_the_smallest_round_that_keeps_activations_comes_one_that_makes_them_again(
    where: str, tmp_path: Path
) -> None:
    case = Case(where=where, block=2, at=(1, 2, 3), recorded=False, activations=None)
    assert differences(case, tmp_path) == []


class Lazy(Net):
    """Makes some of itself in the first forward, and notes that it has."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = True
            self.register_buffer("calls", torch.zeros(()), persistent=False)
            self.layers[0].register_forward_hook(lambda _module, _args, output: output * 1.1)
        self.calls += 1
        return super().forward(x * (1 + self.calls / 100))


@pytest.mark.cases(1)
@pytest.mark.parametrize("failing", [False, True])
def test_what_the_first_forward_made_is_made_again(failing: bool) -> None:
    data, values = batches()[0], []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = Lazy(recorded=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        one = nn.Parameter(torch.ones(()))
        if not offloaded:
            for index, batch in enumerate(data):
                torch.manual_seed(index)
                (loss_of(model, one, batch) / len(data)).backward()
            optimizer.step()
            values.append([parameter.detach().clone() for parameter in model.parameters()])
            continue
        left = [failing]

        def fn(batch: Any, model: Lazy = model, one: nn.Parameter = one, left: list[bool] = left) -> Tensor:
            loss = loss_of(model, one, batch)
            if left[0]:
                left[0] = False
                _fail()
            return loss

        checks = Checks(poison_hosts=True)
        with hydra_ext.offload(model, optimizer, budget=2**21, checks=checks, activations=None) as run:
            run.step(data, fn, seeds=range(len(data)))
            assert run.report().retries == failing
        values.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


# ---- what is tried --------------------------------------------------------------------------------------------------


def test_smaller_rounds_are_tried_then_recomputation_and_what_was_learned_stays() -> None:
    choice = Choice(budget=1000, largest_block=50)
    choice.learn(Decision(1, False), held=10, peak=20)

    def following() -> Decision:
        return choice.next(8, size=None, recompute=None)

    for size in (8, 4, 2, 1):
        assert following() == Decision(size, False)
        assert not choice.fail(following(), size=None, recompute=None, looped=False)
    assert following() == Decision(1, True)
    choice.learn(Decision(1, True), held=10, peak=20)
    assert following() == Decision(8, True)
    assert not choice.fail(following(), size=None, recompute=None, looped=False)
    assert following() == Decision(4, True)
    assert choice.next(8, size=8, recompute=True) == Decision(8, True)  # what is given is done
    assert choice.next(8, size=None, recompute=False) == Decision(1, False)
    for size in (4, 2):
        assert not choice.fail(Decision(size, True), size=None, recompute=None, looped=False)
    assert choice.fail(Decision(1, True), size=None, recompute=None, looped=False)
    assert following() == Decision(8, False)  # other microbatches may fit


def _disturbed_by(
    fn: Any, *, steps: int = 2, activations: Literal["auto"] | None = None, **choices: Any
) -> tuple[hydra_ext.Report, Net]:
    """Two steps of run.step in a roomy budget; ``fn(model, batch)`` may raise."""
    model, temperature, optimizer = Case(recorded=False).make()
    with hydra_ext.offload(model, optimizer, budget=2**21, activations=activations) as run:
        for step in range(steps):
            run.step(batches()[step], lambda batch: fn(model, temperature, batch), **choices)
        return run.report(), model


class Failing:
    """Fails so often, from its n-th call on."""

    def __init__(
        self, times: int, first: int = 1, message: str = "CUDA out of memory. Tried to allocate 2 MiB"
    ) -> None:
        self.left = times
        self.calls = 0
        self._first = first
        self._message = message

    def __call__(self, model: Net, temperature: nn.Parameter, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls >= self._first and self.left:
            self.left -= 1
            raise torch.OutOfMemoryError(self._message)
        return loss_of(model, temperature, batch)


def test_it_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hydra_ext"):
        report, _ = _disturbed_by(Failing(2, first=5), recompute=False)
    told = [record.getMessage() for record in caplog.records if "happen twice" in record.getMessage()]
    assert len(told) == 1
    assert (report.retries, report.refusals, report.fallbacks) == (2, 0, 0)
    assert "2 run again" in str(report)


def test_with_a_round_size_given_nothing_else_is_tried() -> None:
    failing = Failing(1)
    with pytest.raises(torch.OutOfMemoryError, match=r"round_size=4 was given, and so nothing else was tried"):
        _disturbed_by(failing, round_size=4)
    assert failing.calls == 1


def test_the_last_error_names_the_options_and_what_was_tried() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 2 MiB") as caught:
        _disturbed_by(Failing(10))
    text = str(caught.value)
    assert "run.step tried rounds down to one microbatch, keeping activations and making them again" in text
    assert all(option in text for option in ("activations=", "recompute=", "blocks=", "round_size=", "budget="))
    assert should_reduce_batch_size(caught.value)


def test_memory_that_the_users_own_graph_takes_is_not_had_back() -> None:
    model, temperature, optimizer = Case().make()
    data = batches()
    with hydra_ext.offload(model, optimizer, budget=2**21) as run:
        kept = [loss_of(model, temperature, batch) for batch in data[0]]
        run.core.memory.ledger.set_limit(run.core.memory.ledger.in_use)
        with pytest.raises(torch.OutOfMemoryError, match=r" out of memory\. .*round_size="):
            run.step(data[1], lambda batch: loss_of(model, temperature, batch))
        del kept
        gc.collect()
        run.core.memory.ledger.set_limit(run.budget)
        run.step(data[1], lambda batch: loss_of(model, temperature, batch))


# ---- what cannot be undone ------------------------------------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("scripted: the device is out of memory.")


def _failing_in_backward(model: Net, temperature: nn.Parameter, batch: Any) -> Tensor:
    """When most of the blocks have their gradients."""
    handle = model.layers[0].register_forward_hook(lambda _module, _args, output: output.register_hook(_fail) and None)
    try:
        return loss_of(model, temperature, batch)
    finally:
        handle.remove()


def test_where_hooks_have_seen_gradients_the_step_is_not_made_again() -> None:
    seen: list[Tensor] = []
    model, temperature, optimizer = Case().make()
    data = batches()
    with hydra_ext.offload(model, optimizer, budget=2**21, activations=None) as run:
        run.step(data[0], lambda batch: loss_of(model, temperature, batch))
        model.head.weight.register_post_accumulate_grad_hook(seen.append)
        with pytest.raises(torch.OutOfMemoryError, match=r"the step cannot be undone: hooks run when gradients"):
            run.step(data[1], lambda batch: _failing_in_backward(model, temperature, batch))
        assert run.report().retries == 0


def test_gradients_from_before_the_step_that_no_budget_has_room_to_copy_are_kept(tmp_path: Path) -> None:
    case = Case(where="backward", block=1, before=True, home="disk")
    with pytest.raises(torch.OutOfMemoryError, match=r"there were gradients before the step, and host_budget="):
        train_disturbed(case, tmp_path)


# ---- random numbers of the host -------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_python_and_numpy_go_on_as_if_nothing_had_failed(where: str) -> None:
    states = []
    for times in (0, 1):
        random.seed(3)
        np.random.seed(4)
        left, calls = [times], []

        def fn(model: Net, temperature: nn.Parameter, batch: Any, left: Any = left, calls: Any = calls) -> Tensor:
            factor = 1 + random.random() + float(np.random.rand())
            calls.append(batch)
            fails = left[0] > 0 and len(calls) > 5  # in the second step
            left[0] -= fails
            if fails and where == "forward":
                _fail()
            return (_failing_in_backward if fails else loss_of)(model, temperature, batch) * factor

        report, _ = _disturbed_by(fn, recompute=False)
        assert report.retries == times
        states.append((random.getstate(), np.random.get_state()[1].tolist()))
    assert states[0] == states[1]


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_batch_finder_knows_what_the_library_raises_and_bytes_are_bytes_in_every_process() -> None:
    model, temperature, optimizer = Case().make()
    with pytest.raises(BudgetTooSmall) as small:
        hydra_ext.offload(model, optimizer, budget=1000)
    with hydra_ext.offload(model, optimizer, budget=2**21, activations=None) as run:
        run.core.memory.ledger.set_limit(20000)
        with pytest.raises(torch.OutOfMemoryError) as out:
            loss_of(model, temperature, batches()[0][0])
    for error in (small.value, out.value):
        assert should_reduce_batch_size(error)
        assert len(error.args) == 1
        assert all(option in str(error) for option in ("activations=", "recompute=", "blocks=", "round_size="))
    again = pickle.loads(pickle.dumps(small.value))  # noqa: S301
    assert (type(again), again.args, again.needed) == (BudgetTooSmall, small.value.args, small.value.needed)
    assert isinstance(small.value.needed, int)
    assert small.value.needed == small.value.smallest_budget > 1000
    assert pickle.loads(pickle.dumps(HostBudgetTooSmall("text", needed=5))).needed == 5  # noqa: S301


# ---- the smallest budgets -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_little_above_the_smallest_budget_steps_run_by_themselves(name: str) -> None:
    subject = SUBJECTS[name]
    least, mode = smallest(subject)
    budget = int(1.06 * least)
    plain = train_plain(subject, 4)
    assert not any(runs(subject, int(0.9 * least), other) for other in EVERY_MODE)
    for tried in (mode, AUTOMATIC):
        trained = train(subject, budget, tried, 4)
        assert trained.equals(plain)
        assert trained.retries[1] == trained.retries[-1]  # what was learned stays
