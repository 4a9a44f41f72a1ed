"""Blocks whose home is the device: the bits of the plain loop, nothing moves, and it does not show where they are."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, Checks, Run, SimulatedDevice, optim
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, BETWEEN, LAYERS, OPTIMIZERS, WIDTH, stack, state, train

ROOMY = 2**20
BLOCK = 512 * (-(-WIDTH * WIDTH * 4 // 512) + 1)  # a slot of the fp32 stack: weight and bias
GRADIENTS = 4 * (WIDTH * WIDTH + WIDTH)
MOMENTS = 2 * BLOCK


@contextmanager
def offloaded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    budget: int = ROOMY,
    poison: bool = True,
    faults: Any = None,
    **options: Any,
) -> Iterator[Run]:
    blocks = list(model.children())
    device, checks = SimulatedDevice(faults=faults), Checks(poison_hosts=poison)
    with hydra_ext.offload(
        model, optimizer, budget=budget, blocks=blocks, device=device, checks=checks, **options
    ) as run:
        yield run
        assert run.report().windows > 0
        assert run.core.pager.pins == 0
        assert run.report().peak_bytes <= budget
    assert run.core.memory.slot_bytes == 0
    for cls in (_C.MemoryClass.WEIGHTS, _C.MemoryClass.GRADIENTS, _C.MemoryClass.OPTIMIZER):
        assert run.core.memory.ledger.in_use_by(cls) == 0
    for parameter in model.parameters():
        parameter.data_ptr()  # its own bytes, on the host


def pair(name: str = "adamw", dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, Any]:
    plain, model = stack(dtype), stack(dtype)
    return plain, OPTIMIZERS[name](plain.parameters()), model, OPTIMIZERS[name](model.parameters())


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_whose_blocks_are_all_at_home_gives_the_bits_of_the_plain_one(
    name: str, dtype: torch.dtype, poison: bool
) -> None:
    plain, theirs, model, ours = pair(name, dtype)
    expected = train(plain, theirs) + train(plain, theirs)
    with offloaded(model, ours, poison=poison) as run:
        seen = train(model, ours)
        assert run.report().homes == tuple(str(layer) for layer in range(LAYERS))
        before = run.report()
        assert_same(expected, seen + train(model, ours))
        after = run.report()
        assert after.weights_moved_bytes == before.weights_moved_bytes
        assert after.gradients_moved_bytes == before.gradients_moved_bytes
        assert after.homes_moved_bytes == before.homes_moved_bytes
        assert after.deferred_updates == before.deferred_updates == 2
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_so_does_a_step_over_several_microbatches(max_norm: float | None) -> None:
    plain, theirs, model, ours = pair()
    expected: Outcome = []
    for batch in BATCHES:
        for microbatch in batch.split(2):
            loss = plain(microbatch).pow(2).mean()
            (loss / 4).backward()
            expected.append(loss.detach())
        if max_norm is not None:
            expected.append(optim.clip_grad_norm_(plain.parameters(), max_norm))
        theirs.step()
        theirs.zero_grad()
    seen: Outcome = []
    with offloaded(model, ours) as run:
        for batch in BATCHES:
            out = run.step(batch.split(2), lambda microbatch: model(microbatch).pow(2).mean(), max_norm=max_norm)
            seen += out.losses
            seen += [] if out.grad_norm is None else [out.grad_norm]
        report = run.report()
        assert len(report.homes) == LAYERS
        assert report.refusals == report.fallbacks == 0
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_comes_between_steps_sees_whole_tensors(name: str) -> None:
    plain, theirs, model, ours = pair()
    expected = train(plain, theirs) + train(plain, theirs, between=lambda: BETWEEN[name](plain, theirs))
    with offloaded(model, ours) as run:
        seen = train(model, ours)
        assert len(run.report().homes) == LAYERS
        assert_same(expected, seen + train(model, ours, between=lambda: BETWEEN[name](model, ours)))
    assert_same(state(plain, theirs), state(model, ours))


def test_the_last_blocks_are_at_home_as_far_as_the_budget_reaches() -> None:
    plain, theirs, model, ours = pair()
    expected = train(plain, theirs) + train(plain, theirs)
    with offloaded(model, ours) as run:
        train(model, ours)
        activations = max(
            size for kind in (_C.PassKind.FORWARD, _C.PassKind.BACKWARD) for _, size in run.core.pager.recorded(kind)
        )
    model, ours = pair()[2:]
    budget = activations + LAYERS * BLOCK + 2 * GRADIENTS + 2 * (GRADIENTS + MOMENTS) + 100
    with offloaded(model, ours, budget=budget) as run:
        assert_same(expected, train(model, ours) + train(model, ours))
        report = run.report()
        assert report.homes == ("4", "5")
        assert report.homes_bytes == 2 * (BLOCK + GRADIENTS + MOMENTS)
        assert report.homes_reason == f"'3' needs {_C.human_bytes(GRADIENTS + MOMENTS)} more, and 100 bytes are left"
        assert "2 blocks on the device (4, 5)" in str(report)
        before = run.report()
        train(model, ours)
        after = run.report()
        steps = len(BATCHES)
        assert after.gradients_moved_bytes - before.gradients_moved_bytes == steps * 4 * GRADIENTS
        assert after.weights_moved_bytes - before.weights_moved_bytes == steps * 4 * BLOCK
    train(plain, theirs)
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("missing", [0, 1], ids=["fits", "is one byte too large"])
@pytest.mark.parametrize("count", [1, LAYERS])
def test_a_block_goes_home_where_it_fits_to_the_byte(count: int, missing: int) -> None:
    """And not where it does not: it would come back for want of room, again and again."""
    _, _, model, ours = pair()
    with offloaded(model, ours) as run:
        train(model, ours)
        activations = max(
            size for kind in (_C.PassKind.FORWARD, _C.PassKind.BACKWARD) for _, size in run.core.pager.recorded(kind)
        )
    model, ours = pair()[2:]
    budget = activations + LAYERS * BLOCK + 2 * GRADIENTS + count * (GRADIENTS + MOMENTS) - missing
    with offloaded(model, ours, budget=budget) as run:
        train(model, ours)
        train(model, ours)
        assert len(run.report().homes) == count - missing
        assert run.core.homes.statistics.settled == count - missing
        assert run.core.homes.statistics.returned == 0


def test_blocks_make_room_for_activations_and_come_back() -> None:
    def work(model: nn.Module, optimizer: torch.optim.Optimizer, repeats: int) -> Outcome:
        seen: Outcome = []
        for batch in BATCHES:
            loss = model(batch.repeat(repeats, 1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
        return seen

    plain, theirs, model, ours = pair()
    expected = [*work(plain, theirs, 1), *work(plain, theirs, 16), *work(plain, theirs, 1)]
    with offloaded(model, ours, budget=2**19, activations=None) as run:
        seen = work(model, ours, 1)
        settled = run.report().homes
        assert len(settled) > 1
        seen += work(model, ours, 16)
        assert run.core.homes.statistics.returned > 0
        assert len(run.report().homes) < len(settled)
        assert "came back" in run.report().homes_reason or "needs" in run.report().homes_reason
        assert_same(expected, seen + work(model, ours, 1))
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("of", ["weight", "gradient", "state"])
@pytest.mark.parametrize(
    "access",
    [
        lambda tensor: tensor.data_ptr(),
        lambda tensor: tensor.numpy(),
        lambda tensor: torch.save(tensor, io.BytesIO()),
    ],
    ids=["data_ptr", "numpy", "save"],
)
def test_raw_access_to_what_is_on_the_device_raises_and_works_after_sync(access: Callable[[Any], Any], of: str) -> None:
    model, optimizer = pair()[2:]
    with offloaded(model, optimizer) as run:
        train(model, optimizer)
        model(BATCHES[0]).sum().backward()
        weight = model[3].weight
        tensor = {"weight": weight, "gradient": weight.grad, "state": optimizer.state[weight]["exp_avg"]}[of].detach()
        with pytest.raises(RuntimeError, match=r"home of this tensor is the device now.*run\.sync\(\)"):
            access(tensor)
        run.sync()
        assert run.report().homes == ()
        access(tensor)


def gradients_of(model: nn.Module) -> Outcome:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


# What user code does with gradients of blocks at home, between backward and the step or after it.
WITH_GRADIENTS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "accumulates": lambda model, _: model(BATCHES[1]).pow(2).mean().backward(),
    "scales": lambda model, _: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "clips as torch does": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-2),
    "replaces": lambda model, _: [setattr(p, "grad", torch.ones_like(p)) for p in model.parameters()],
    "removes one": lambda model, _: setattr(model[4].bias, "grad", None),
    "zeroes": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "takes them without backward": lambda model, _: torch.autograd.grad(
        model(BATCHES[1]).sum(), list(model.parameters())
    ),
    "penalises the weights": lambda model, _: sum(p.pow(2).sum() for p in model.parameters()).backward(),
    "keeps a graph": lambda model, _: model(BATCHES[1]).pow(2).mean().backward(create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_are_the_users_as_ever(name: str) -> None:
    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        seen = train(model, optimizer)
        for batch in BATCHES:
            model(batch).pow(2).mean().backward()
            WITH_GRADIENTS[name](model, optimizer)
            optimizer.step()
            seen += [gradient.detach() for gradient in gradients_of(model)]
            optimizer.zero_grad()
        return seen

    plain, theirs, model, ours = pair()
    expected = work(plain, theirs)
    with offloaded(model, ours) as run:
        assert_same(expected, work(model, ours))
        assert run.core.homes.statistics.settled > 0
    assert_same(state(plain, theirs), state(model, ours))


def test_a_gradient_that_somebody_has_kept_stays_what_it_was() -> None:
    plain, theirs, model, ours = pair()
    kept: list[list[torch.Tensor]] = []

    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer)
        model(BATCHES[0]).pow(2).mean().backward()
        kept.append([parameter.grad.detach() for parameter in model.parameters() if parameter.grad is not None])
        optimizer.zero_grad()
        train(model, optimizer)

    work(plain, theirs)
    with offloaded(model, ours) as run:
        work(model, ours)
        assert run.core.homes.statistics.returned > 0
        assert_same(*[[gradient.clone() for gradient in one] for one in kept])
    assert_same(*[list(one) for one in kept])


def test_a_hook_on_a_gradient_brings_its_block_to_the_host() -> None:
    def work(model: nn.Module, optimizer: torch.optim.Optimizer, seen: Outcome) -> None:
        train(model, optimizer)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        train(model, optimizer)

    plain, theirs, model, ours = pair()
    expected: Outcome = []
    seen: Outcome = []
    work(plain, theirs, expected)
    with offloaded(model, ours, poison=False) as run:
        work(model, ours, seen)
        assert "2" not in run.report().homes
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


def test_frozen_blocks_and_blocks_with_adapters_stay_on_the_device() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = stack()
        for layer in model[:-1]:
            layer.weight.requires_grad_(False)
        return model, OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])

    (plain, theirs), (model, ours) = build(), build()
    expected = train(plain, theirs) + train(plain, theirs)
    with offloaded(model, ours) as run:
        assert_same(expected, train(model, ours) + train(model, ours))
        assert len(run.report().homes) == LAYERS
    assert_same(state(plain, theirs), state(model, ours))


def test_a_transfer_that_fails_on_the_way_home_is_told_and_may_be_tried_again() -> None:
    plain, theirs, model, ours = pair()
    faults = _C.testing.FaultScript()
    train(plain, theirs)
    with offloaded(model, ours, faults=faults) as run:
        train(model, ours)
        assert len(run.report().homes) == LAYERS
        faults.fail(_C.testing.Operation.TO_HOST, 1)
        with pytest.raises(hydra_ext.errors.TransferError):
            run.sync()
        assert len(run.report().homes) == LAYERS
        run.sync()
        assert run.report().homes == ()
        assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"param_dtype": torch.bfloat16}, "param_dtype="), ({"grad_dtype": torch.bfloat16}, "grad_dtype=")],
)
def test_types_that_change_on_the_way_keep_every_block_on_the_host(options: dict[str, Any], reason: str) -> None:
    model, optimizer = pair()[2:]
    with hydra_ext.offload(model, optimizer, budget=ROOMY, **options) as run:
        for batch in BATCHES:
            model(batch.to(options.get("param_dtype", torch.float32))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.report().homes == ()
        assert reason in run.report().homes_reason


def test_an_optimizer_of_torch_keeps_every_block_on_the_host() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with hydra_ext.offload(model, optimizer, budget=ROOMY) as run:
        train(model, optimizer)
        assert run.report().homes == ()
        assert "hydra_ext.optim" in run.report().homes_reason
