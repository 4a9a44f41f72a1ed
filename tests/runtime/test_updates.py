"""Native optimizer steps that run behind the next forward: the same bits, and nothing sees what is half done."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, BETWEEN, LAYERS, OPTIMIZERS, STEPS, stack, state, train


@contextmanager
def offloaded(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, poison: bool = True, blocks: int = 3
) -> Iterator[Run]:
    device = SimulatedDevice(to_device_bytes_per_second=2e8, to_host_bytes_per_second=2e8)
    checks = Checks(poison_hosts=poison)
    budget = blocks * sum(p.nbytes for p in model.parameters()) // LAYERS + 2**15
    with hydra_ext.offload(model, optimizer, budget=budget, device=device, checks=checks) as run:
        yield run
        assert run.report().windows > 0
        assert run.report().deferred_updates > 0


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_behind_the_next_forward_gives_the_bits_of_a_step_at_once(
    name: str, dtype: torch.dtype, poison: bool
) -> None:
    plain, model = stack(dtype), stack(dtype)
    ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    expected = train(plain, theirs)
    with offloaded(model, ours, poison=poison) as run:
        assert_same(expected, train(model, ours))
        assert run.report().evictions > 0
        assert run.report().deferred_updates == STEPS
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_comes_between_steps_sees_whole_tensors(name: str) -> None:
    plain, model = stack(), stack()
    ours, theirs = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](plain.parameters())
    expected = train(plain, theirs, between=lambda: BETWEEN[name](plain, theirs))
    with offloaded(model, ours):
        assert_same(expected, train(model, ours, between=lambda: BETWEEN[name](model, ours)))
    assert_same(state(plain, theirs), state(model, ours))


def pending(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leaves a step under way: it is not asked for."""
    model(BATCHES[0]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "access",
    [
        lambda tensor: tensor.data_ptr(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage().data_ptr(),
        lambda tensor: torch.save(tensor, io.BytesIO()),
    ],
    ids=["data_ptr", "numpy", "storage", "save"],
)
@pytest.mark.parametrize("of", ["weight", "gradient", "state"])
def test_raw_access_to_what_is_being_written_raises_and_works_after_sync(access: Callable[[Any], Any], of: str) -> None:
    model = stack()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with offloaded(model, optimizer) as run:
        pending(model, optimizer)
        weight = model[3].weight
        tensor = {"weight": weight, "gradient": weight.grad, "state": optimizer.state[weight]["exp_avg"]}[of].detach()
        with pytest.raises(RuntimeError, match=r"run\.sync\(\)"):
            access(tensor)
        run.sync()
        access(weight.grad if of == "gradient" else tensor)


@pytest.mark.parametrize("clear", ["to zero", "never", "by hand"])
def test_gradients_that_are_kept_are_those_of_the_plain_loop(clear: str) -> None:
    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        seen = []
        for batch in BATCHES:
            model(batch).pow(2).mean().backward()
            optimizer.step()
            if clear == "to zero":
                optimizer.zero_grad(set_to_none=False)
            elif clear == "by hand":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return seen

    plain, model = stack(), stack()
    ours, theirs = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](plain.parameters())
    expected = work(plain, theirs)
    with offloaded(model, ours):
        assert_same(expected, work(model, ours))
    assert_same(state(plain, theirs), state(model, ours))


def test_parameters_that_are_not_the_models_are_stepped_too() -> None:
    def work(model: nn.Module, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> Outcome:
        for batch in BATCHES:
            (model(batch).pow(2).mean() * other.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [other.detach().clone()]

    outcomes = []
    for inside in (False, True):
        model, other = stack(), nn.Parameter(torch.ones(3))
        optimizer = OPTIMIZERS["adamw"]([*model.parameters(), other])
        if inside:
            with offloaded(model, optimizer):
                outcomes.append(work(model, other, optimizer) + state(model, optimizer))
        else:
            outcomes.append(work(model, other, optimizer) + state(model, optimizer))
    assert_same(*outcomes)


def test_the_context_ends_with_the_step_that_is_under_way() -> None:
    plain, model = stack(), stack()
    ours, theirs = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](plain.parameters())
    pending(plain, theirs)
    with offloaded(model, ours):
        pending(model, ours)
    assert_same(state(plain, theirs), state(model, ours))
    model[3].weight.detach().numpy()
    pending(model, ours)
    model[3].weight.detach().numpy()  # outside the context a step is taken at once


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_through_a_graph_from_before_the_step_raises(inside: bool) -> None:
    model = stack()
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def work() -> None:
        for _ in range(2):
            first, second = model(BATCHES[0]).sum(), model(BATCHES[1]).sum()
            first.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.backward()
            optimizer.zero_grad()

    if not inside:
        work()
        return
    with offloaded(model, optimizer):
        work()


def test_nothing_is_allocated_for_a_step_once_all_have_been_seen() -> None:
    model = stack()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with offloaded(model, optimizer, poison=False) as run:
        sizes = []
        for _ in range(3):
            train(model, optimizer)
            run.sync()
            sizes.append(run.core.memory.arena_bytes)
        assert sizes[0] == sizes[1] == sizes[2]


def test_one_optimizer_of_two_offloaded_models_steps_both() -> None:
    def work(first: nn.Module, second: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in BATCHES:
            (first(batch).pow(2).mean() + second(batch).pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, models = (stack(), stack()), (stack(), stack())
    theirs = OPTIMIZERS["adamw"]([p for one in plain for p in one.parameters()])
    ours = OPTIMIZERS["adamw"]([p for one in models for p in one.parameters()])
    for _ in range(3):
        work(*plain, theirs)
    with hydra_ext.offload(models[0], ours, budget="1MiB"):
        work(*models, ours)
        with hydra_ext.offload(models[1], ours, budget="1MiB"):
            work(*models, ours)
        work(*models, ours)
    for ending, other in zip(models, plain, strict=True):
        assert_same(state(other, theirs), state(ending, ours))


def test_a_slow_memory_of_the_host_makes_steps_later_and_changes_no_bit() -> None:
    speed = 1e7
    plain, model = stack(torch.bfloat16), stack(torch.bfloat16)
    ours, theirs = OPTIMIZERS["adamw"](model.parameters()), OPTIMIZERS["adamw"](plain.parameters())
    expected = train(plain, theirs)
    device = SimulatedDevice(host_memory_bytes_per_second=speed)
    budget = 3 * sum(parameter.nbytes for parameter in model.parameters()) // LAYERS + 2**15
    with hydra_ext.offload(model, ours, budget=budget, device=device, checks=Checks(poison_hosts=True)) as run:
        assert_same(expected, train(model, ours))
        run.sync()
        report = run.report()
        assert report.windows == 2 * STEPS
        # A split master: 4 bytes of weight and 4 of master, a gradient of 2, two moments of 8.
        assert report.update_bytes == STEPS * 26 * sum(parameter.numel() for parameter in model.parameters())
        assert report.update_seconds >= report.update_bytes / speed
    assert_same(state(plain, theirs), state(model, ours))
