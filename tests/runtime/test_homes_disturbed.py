"""Blocks at home on the device that are used elsewhere, lack room or fail to move at the worst moments: nothing is
lost, and the bits are those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hydra_ext import _C, Run, optim
from hydra_ext.errors import TransferError
from support.benches import Outcome, assert_same
from support.runtime.at_home import (
    ROOMY,
    Made,
    Reading,
    Shrinking,
    Work,
    at_home,
    compare,
    in_another_thread,
    loop,
    make,
    offloaded,
)
from support.runtime.native import BATCHES, LAYERS, OPTIMIZERS, stack, state, train

# ---- between the preparation of a step and its end ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_that_follows_what_the_forward_has_written_is_looked_at_on_the_host(dtype: torch.dtype) -> None:
    def make_shrinking() -> Made:
        model, _ = make(dtype)
        model[3].__class__ = Shrinking
        return model, optim.AdamW(model.parameters(), lr=1e-2, master="fp32")

    compare(loop, make=make_shrinking)


def test_state_that_somebody_has_removed_is_made_anew() -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        del optimizer.state[model[4].weight]["exp_avg"]
        return loop(model, optimizer)

    compare(work)


@pytest.mark.parametrize("moment", ["parts", "prepare", "finish"])
def test_a_thread_that_reads_a_weight_while_a_step_is_made_reads_it_before_or_after(moment: str) -> None:
    def work(model: nn.Sequential, optimizer: Any) -> Outcome:
        owner = optimizer if moment != "parts" or optimizer.runner is None else optimizer.runner
        if not hasattr(owner, moment):
            return loop(model, optimizer)
        plain = getattr(owner, moment)

        def disturbed(*arguments: Any) -> Any:
            result = plain(*arguments)
            in_another_thread(lambda: model[3].weight.sum())
            return result

        with mock.patch.object(owner, moment, disturbed):
            return loop(model, optimizer)

    compare(work)


# ---- in the middle of forward and backward --------------------------------------------------------------------------


def during_backward(action: Callable[[nn.Sequential, torch.optim.Optimizer], Any]) -> Work:
    """When backward is at the fourth block."""

    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        def act(*_: Any) -> None:
            action(model, optimizer)

        handle = model[3].register_full_backward_pre_hook(act)
        try:
            return loop(model, optimizer)
        finally:
            handle.remove()

    return work


@pytest.mark.parametrize(
    ("of", "index"),
    # Not the gradient of a block that backward has passed: it may be on its way.
    [("weight", 1), ("weight", 3), ("weight", 5), ("state", 1), ("state", 5), ("gradient", 1), ("gradient", 3)],
)
def test_a_thread_may_read_what_is_at_home_while_backward_runs(of: str, index: int) -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        weight = model[index].weight  # while backward runs the module has a device parameter there
        seen: Outcome = []

        def read(*_: Any) -> None:
            tensor = {"weight": weight, "state": optimizer.state[weight]["exp_avg"], "gradient": weight.grad}[of]
            if tensor is not None:
                in_another_thread(lambda: seen.append(tensor.detach().clone()))

        result = during_backward(read)(model, optimizer)
        assert seen
        return [*result, *seen]

    compare(work)


def test_gradients_may_be_cleared_by_another_thread_while_backward_runs() -> None:
    def clear(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        in_another_thread(optimizer.zero_grad)

    compare(during_backward(clear), returned=False)


def test_gradients_may_be_cleared_between_forward_and_backward() -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        seen: Outcome = []
        for batch in BATCHES:
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach().clone())
        return seen

    compare(work, returned=False)


def test_a_gradient_that_is_kept_while_more_of_it_comes_is_the_sum() -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        kept: list[torch.Tensor] = []
        weight = next(iter(model[2].parameters()))
        for batch in BATCHES:
            for part, microbatch in enumerate(batch.split(4)):
                model(microbatch).pow(2).mean().backward()
                if part == 0:
                    assert weight.grad is not None
                    kept.append(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in kept]

    compare(work)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_gradients_is_made_on_the_host_with_what_was_at_home() -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        model(BATCHES[0]).pow(2).mean().backward()
        model(BATCHES[1]).pow(2).mean().backward(create_graph=True)
        seen: Outcome = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        return seen

    compare(work)


def test_a_weight_may_be_read_between_any_two_operations() -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        mode = Reading(model[3].weight)
        with mode:
            seen = loop(model, optimizer)
        assert mode.reads > 0
        return seen

    compare(work)


def test_parameters_that_are_frozen_and_trained_again_are_followed() -> None:
    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        seen: Outcome = []
        for trained in (False, True):
            for parameter in (model[3].weight, model[4].bias):
                parameter.requires_grad_(trained)
            seen += loop(model, optimizer)
            if not trained:
                model(BATCHES[0]).sum().backward()
                seen += [torch.tensor(p.grad is None) for p in model.parameters()]
                optimizer.zero_grad()
        return seen

    compare(work, returned=False)


# ---- room -----------------------------------------------------------------------------------------------------------


def test_homes_are_given_up_for_activations_in_the_middle_of_a_backward() -> None:
    """The gradients that are at home already go to the host with the rest, and more is added to them there."""

    def work(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Outcome:
        seen: Outcome = []

        def fill(*_: Any) -> None:
            seen.append(torch.ones(ROOMY // 5).sum())

        handle = model[2].register_full_backward_pre_hook(fill)
        try:
            return [*loop(model, optimizer), *seen]
        finally:
            handle.remove()

    compare(work)


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_an_end_that_cannot_bring_a_block_home_at_once_tells_so_and_loses_nothing() -> None:
    plain, ours = make(), make()
    train(*plain)
    faults = _C.testing.FaultScript()
    with pytest.raises(TransferError), at_home(ours, faults=faults):
        faults.fail(_C.testing.Operation.TO_HOST, 1)
    assert_same(state(*plain), state(*ours))
    train(*plain)
    train(*ours)
    assert_same(state(*plain), state(*ours))


def test_an_end_whose_transfers_all_fail_leaves_a_plain_model_and_says_what_is_lost() -> None:
    ours = model, optimizer = make()
    faults = _C.testing.FaultScript()
    with pytest.raises(TransferError), at_home(ours, faults=faults) as run:
        faults.fail(_C.testing.Operation.TO_HOST, 1, persistent=True)
    assert type(model) is nn.Sequential
    assert run.core.memory.slot_bytes == 0
    assert run.core.memory.ledger.in_use_by(_C.MemoryClass.OPTIMIZER) == 0
    for lost in (model[0].weight.detach(), optimizer.state[model[0].weight]["exp_avg"]):
        with pytest.raises(RuntimeError, match="ended"):
            lost.sum()
        with pytest.raises(RuntimeError, match="bytes are lost"):
            lost.numpy()
    fresh = stack()
    for parameter, value in zip(model.parameters(), fresh.parameters(), strict=True):
        parameter.data = value.data.clone()  # another checkpoint's, say
    model(BATCHES[0]).sum().backward()


def test_a_block_that_cannot_be_moved_stays_on_the_host() -> None:
    plain, ours = make(), make()
    train(*plain)
    train(*plain)
    faults = _C.testing.FaultScript()

    def fail_moves(settle: Any) -> Any:
        def failing(self: Any, *arguments: Any) -> Any:
            faults.fail(_C.testing.Operation.TO_DEVICE, 1)
            return settle(self, *arguments)

        return failing

    with offloaded(ours, faults=faults) as run:
        with mock.patch.object(_C.HomeMoves, "settle_on_device", fail_moves(_C.HomeMoves.settle_on_device)):
            train(*ours)
        assert run.report().homes == ()
        assert "could not be moved" in run.report().homes_reason
        train(*ours)
        assert len(run.report().homes) == LAYERS
    assert_same(state(*plain), state(*ours))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_whose_block_has_left_in_between_is_made_on_the_host(name: str) -> None:
    """Clipped, so that the factor is to reach it there, too."""

    def make_named() -> Made:
        model = stack()
        return model, OPTIMIZERS[name](model.parameters())

    plain, ours = make_named(), make_named()

    def steps(model: nn.Sequential, optimizer: torch.optim.Optimizer, run: Run | None) -> Outcome:
        seen: Outcome = []
        for batch in BATCHES:
            if run is None:
                model(batch).pow(2).mean().backward()
                seen.append(optim.clip_grad_norm_(model.parameters(), 1e-3))
                optimizer.step()
                optimizer.zero_grad()
            else:
                out = run.step([batch], lambda one: model(one).pow(2).mean(), max_norm=1e-3)
                assert out.grad_norm is not None
                seen.append(out.grad_norm)
        return seen

    train(*plain)
    expected = steps(*plain, None)
    with at_home(ours) as run:
        finish = ours[1].finish

        def disturbed(part: Any) -> None:
            finish(part)
            in_another_thread(lambda: ours[0][3].weight.sum())

        with mock.patch.object(ours[1], "finish", disturbed):
            assert_same(expected, steps(*ours, run))
        assert run.core.homes.statistics.returned > 0
    assert_same(state(*plain), state(*ours))
