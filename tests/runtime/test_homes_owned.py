"""Whatever is done with tensors whose home is the device is what it is with a plain model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hydra_ext import _C, optim
from hydra_ext.errors import ModelChanged, TransferError
from support.benches import Outcome, assert_same
from support.runtime.at_home import (
    ROOMY,
    Made,
    Reading,
    Shrinking,
    at_home,
    compare,
    in_another_thread,
    loop,
    make,
    offloaded,
)
from support.runtime.native import BATCHES, LAYERS, state, train

Optimizer = torch.optim.Optimizer


# ---- other bytes ----------------------------------------------------------------------------------------------------


def swap_data(a: nn.Parameter, b: nn.Parameter) -> None:
    a.data, b.data = b.data, a.data


DATA: dict[str, Callable[[nn.Sequential], Any]] = {
    "swapped between blocks": lambda model: swap_data(model[2].weight, model[4].weight),
    "another block's": lambda model: setattr(model[2].weight, "data", model[3].weight.data),
    "another's of the block": lambda model: setattr(model[2].bias, "data", model[2].weight.data[1]),
    "its own": lambda model: setattr(model[2].weight, "data", model[2].weight.data),
    "a copy": lambda model: setattr(model[2].weight, "data", model[2].weight.data * 2),
}


@pytest.mark.parametrize("name", DATA)
def test_data_may_be_given_to_a_parameter_at_home(name: str) -> None:
    def work(model: nn.Sequential, optimizer: Optimizer) -> Outcome:
        DATA[name](model)
        return loop(model, optimizer) if name != "another block's" else [model(batch).sum() for batch in BATCHES]

    compare(work, returned=name != "its own")


@pytest.mark.parametrize("first", ["bias", "weight"])
def test_a_parameter_with_another_blocks_memory_waits_when_its_own_block_has_come_home(first: str) -> None:
    def work(model: nn.Sequential, _optimizer: Optimizer) -> Outcome:
        model[2].weight.data = model[3].weight.data
        names = [first, *({"bias", "weight"} - {first})]
        return [getattr(model[2], name).detach().sum() for name in names]

    compare(work, returned=True)


def test_other_strides_are_told_as_ever() -> None:
    made = model, _ = make()
    with at_home(made):
        model[2].weight.data = model[2].weight.data.t()
        with pytest.raises(ModelChanged, match="other strides"):
            model(BATCHES[0])
        model[2].weight.data = model[2].weight.data.t()
        model(BATCHES[0])


def test_a_block_whose_memory_somebody_knows_stays_on_the_host() -> None:
    """An array of numpy's would not see it change any more."""
    plain, ours = make(), make()
    train(*plain)
    train(*plain)
    arrays = [made[0][3].weight.detach().numpy() for made in (plain, ours)]
    with offloaded(ours) as run:
        train(*ours)
        run.sync()
        assert (arrays[0] == plain[0][3].weight.detach().numpy()).all()
        train(*ours)
        run.sync()
        assert (arrays[0] == arrays[1]).all()
        train(*ours)
        assert run.report().homes == tuple(str(layer) for layer in range(LAYERS) if layer != 3)
        assert "memory of '3' has another owner" in run.report().homes_reason
    train(*plain)
    assert_same(state(*plain), state(*ours))


def test_a_block_whose_memory_somebody_gets_to_know_inside_stays_on_the_host() -> None:
    plain, ours = make(), make()
    for _ in range(3):
        train(*plain)
    with offloaded(ours) as run:
        train(*ours)
        assert "3" in run.report().homes
        run.sync()
        array = ours[0][3].weight.detach().numpy()
        for _ in range(2):
            train(*ours)
            run.sync()
            assert (array == ours[0][3].weight.detach().numpy()).all()
        assert (array == plain[0][3].weight.detach().numpy()).all()
        train(*ours)
        assert "3" not in run.report().homes
    train(*plain)
    assert_same(state(*plain), state(*ours))


def test_a_write_of_the_forwards_is_not_lost_on_a_block_that_comes_home_meanwhile() -> None:
    def make_shrinking() -> Made:
        made = make()
        made[0][3].__class__ = Shrinking
        return made

    def work(model: nn.Sequential, optimizer: Optimizer) -> Outcome:
        weight = model[3].weight
        mode = Reading(weight, before=(torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar))
        with mode:
            loss = model(BATCHES[0]).pow(2).mean()
        assert mode.reads == 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [weight.detach().clone()]

    compare(work, make=make_shrinking)


# ---- gradients at home ----------------------------------------------------------------------------------------------


def test_a_gradient_at_home_rises_in_version_with_each_sum() -> None:
    plain, ours = make(), make()

    def versions(made: Made) -> list[int]:
        model, optimizer = made
        seen = []
        for batch in BATCHES[:3]:
            model(batch).pow(2).mean().backward()
            gradient = model[3].weight.grad
            assert gradient is not None
            seen.append(gradient._version)
        optimizer.step()
        optimizer.zero_grad()
        return [one - seen[0] for one in seen]

    train(*plain)
    with at_home(ours) as run:
        assert versions(plain) == versions(ours) == [0, 1, 2]
        assert "3" in run.report().homes
    assert_same(state(*plain), state(*ours))


class Doubled(nn.Linear):
    """Its weight is the sum of two: autograd gives both one gradient, the same tensor."""

    second: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight + self.second, self.bias)


def make_doubled() -> Made:
    model, _ = make()
    model[3].__class__ = Doubled
    model[3].second = nn.Parameter(model[3].weight.detach() / 2)
    return model, optim.AdamW(model.parameters(), lr=1e-2)


def test_a_gradient_that_two_parameters_get_is_summed_for_each() -> None:
    def work(model: nn.Sequential, optimizer: Optimizer) -> Outcome:
        for batch in BATCHES[:3]:
            model(batch).pow(2).mean().backward()
        seen = [weight.grad.clone() for weight in (model[3].weight, model[3].second)]
        return [*seen, *loop(model, optimizer)]

    compare(work, make=make_doubled, returned=None)


# ---- gradients of others --------------------------------------------------------------------------------------------


def swap_gradients(model: nn.Sequential) -> None:
    model[2].weight.grad, model[4].weight.grad = model[4].weight.grad, model[2].weight.grad


def share_gradient(model: nn.Sequential) -> None:
    model[2].weight.grad = model[4].weight.grad


@pytest.mark.parametrize("elsewhere", [None, 2, 4])
@pytest.mark.parametrize("change", [swap_gradients, share_gradient])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_may_be_given_to_other_parameters(
    change: Callable[[nn.Sequential], None], elsewhere: int | None, clip: bool
) -> None:
    """``elsewhere``: the block that has come to the host before."""

    def work(model: nn.Sequential, optimizer: Optimizer) -> Outcome:
        seen: Outcome = []
        for batch in BATCHES:
            if elsewhere is not None:
                model[elsewhere].weight.sum()
            model(batch).pow(2).mean().backward()
            change(model)
            if clip:
                seen.append(optim.clip_grad_norm_(model.parameters(), 1e-3))
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *loop(model, optimizer)]

    compare(work, returned=None)


def test_blocks_stay_at_home_whether_gradients_are_cleared_before_or_after_forward() -> None:
    made = model, optimizer = make()
    with offloaded(made) as run:
        for batch in BATCHES.repeat(2, 1, 1):
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert len(run.report().homes) == LAYERS
        assert run.core.homes.statistics.returned == 0


def test_a_graph_from_before_a_step_is_known_to_be_so_when_blocks_come_home_in_between() -> None:
    def work(model: nn.Sequential, optimizer: Any) -> Outcome:
        loss = model(BATCHES[0]).pow(2).mean()
        loss.backward(retain_graph=True)
        finish = optimizer.finish

        def disturbed(part: Any) -> None:
            finish(part)
            in_another_thread(lambda: [layer.weight.sum() for layer in model])

        with mock.patch.object(optimizer, "finish", disturbed):
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        return []

    compare(work)


# ---- errors ---------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[nn.Sequential, Optimizer], Any]] = {
    "an operation": lambda model, _: model[3].weight.sum(),
    "an operation on all": lambda model, _: torch._foreach_norm([layer.weight for layer in model]),
    "an operation on state": lambda model, optimizer: optimizer.state[model[3].weight]["exp_avg"].sum(),
    "an allocation in backward": lambda model, _: fill_in_backward(model),
}


def fill_in_backward(model: nn.Sequential) -> None:
    handle = model[2].register_full_backward_pre_hook(lambda *_: torch.ones(ROOMY // 5).sum() and None)
    try:
        model(BATCHES[0]).pow(2).mean().backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("name", USES)
def test_what_fails_to_come_home_is_a_transfer_error_and_comes_the_next_time(name: str) -> None:
    faults = _C.testing.FaultScript()

    def work(model: nn.Sequential, optimizer: Optimizer) -> Outcome:
        to_host = _C.testing.Operation.TO_HOST
        if faults.count(to_host) > 0:
            faults.fail(to_host, 1)
            with pytest.raises(TransferError):
                USES[name](model, optimizer)
            optimizer.zero_grad()
        USES[name](model, optimizer)
        optimizer.zero_grad()
        return loop(model, optimizer)

    plain, ours = make(), make()
    train(*plain)
    expected = work(*plain)
    with at_home(ours, faults=faults, activations=None):
        assert_same(expected, work(*ours))
    assert_same(state(*plain), state(*ours))
