"""What ``run.step`` takes and gives, and what of the process around it microbatches see."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hydra_ext
from hydra_ext import Checks
from hydra_ext.errors import StateError
from hydra_ext.runtime.rounds.microbatch import draw_seeds
from support.models.zoo import FAMILIES
from support.models.zoo_more import MORE_FAMILIES
from support.rounds.rounds import (
    Plan,
    Seen,
    assert_nothing_left,
    build_optimizer,
    differences,
    train_loop,
    train_rounds,
)

PLAN = Plan(m=3)
ROOMY = 2**23
GPT2, RESIDUAL = FAMILIES["gpt2"], MORE_FAMILIES["residual"]


@contextmanager
def an_offloaded(model: nn.Module, plan: Plan = PLAN, *, budget: int = ROOMY) -> Iterator[hydra_ext.Run]:
    optimizer = build_optimizer(model, plan)
    with hydra_ext.offload(model, optimizer, budget=budget, checks=Checks(poison_hosts=True)) as run:
        yield run
        assert_nothing_left(run)
        report = run.report()
        assert report.windows > 0
        assert (report.refusals, report.fallbacks) == (0, 0)


def losses_of(out: hydra_ext.StepOutput) -> list[Tensor]:
    return list(out.losses)


def compare(
    loss: Callable[[nn.Module, Any], Any], plan: Plan = PLAN, around: Any = nullcontext, **choices: Any
) -> None:
    """The same loss in the loop and in rounds, on the same model; ``around`` makes a context around each training."""
    batches = GPT2.batches(1, 5 * plan.m)

    def inside(train: Callable[[], Seen]) -> Seen:
        context: AbstractContextManager[Any] = around()
        with context:
            return train()

    plain, model = GPT2.make(0), GPT2.make(0)
    expected = inside(lambda: train_loop(plain, loss, batches, plan))
    with an_offloaded(model, plan) as run:
        seen = inside(lambda: train_rounds(run, model, loss, batches, plan, **{"round_size": plan.m, **choices}))
    assert differences(seen, expected) == []


# ---- what goes in and comes out -------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_and_the_metrics_are_what_fn_returned_beside() -> None:
    model = GPT2.make(0)
    batches = GPT2.batches(1, 3)
    with an_offloaded(model) as run:
        pair = run.step(batches, lambda b: (GPT2.loss(model, b), {"tokens": b["input_ids"].numel()}))
        assert torch.equal(pair.loss, torch.stack(losses_of(pair)).mean())
        assert pair.metrics == ({"tokens": 48},) * 3
        assert pair.grad_norm is None
        mapping = run.step(batches, lambda b: {"loss": GPT2.loss(model, b), "extra": torch.ones(1)}, max_norm=1.0)
        assert [list(metrics) for metrics in mapping.metrics] == [["extra"]] * 3
        assert mapping.grad_norm is not None
        total = run.step(batches, lambda b: GPT2.loss(model, b), reduction="sum")
        assert torch.equal(total.loss, torch.stack(losses_of(total)).sum())
        assert total.metrics == (None, None, None)


def test_seeds_are_drawn_from_the_present_random_state() -> None:
    batches = GPT2.batches(1, 3)
    torch.manual_seed(7)
    seeds = draw_seeds(3)
    after = torch.get_rng_state()
    expected, model = GPT2.make(0), GPT2.make(0)
    reference = []
    for seed, batch in zip(seeds, batches, strict=True):
        torch.manual_seed(seed)
        reference.append(GPT2.loss(expected, batch).detach())
    with an_offloaded(model) as run:
        torch.manual_seed(7)
        out = run.step(batches, lambda b: GPT2.loss(model, b))
        assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b) for a, b in zip(losses_of(out), reference, strict=True))


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"microbatches": []}, ValueError),
        ({"round_size": 0}, ValueError),
        ({"reduction": "median"}, ValueError),
        ({"seeds": [1]}, ValueError),
        ({"fn": lambda _batch: 3.0}, TypeError),
        ({"fn": lambda _batch: torch.ones(())}, ValueError),
    ],
)
def test_what_makes_no_step_is_refused(choices: dict[str, Any], error: type[Exception]) -> None:
    model = GPT2.make(0)
    with an_offloaded(model) as run:
        arguments = {"microbatches": GPT2.batches(1, 2), "fn": lambda b: GPT2.loss(model, b), **choices}
        with pytest.raises(error):
            run.step(**arguments)
        run.step(GPT2.batches(1, 2), lambda b: GPT2.loss(model, b))


def test_a_run_without_an_optimizer_makes_no_steps() -> None:
    model = GPT2.make(0)
    with hydra_ext.offload(model, budget=ROOMY) as run, pytest.raises(StateError, match="needs the optimizer"):
        run.step(GPT2.batches(1, 2), lambda b: GPT2.loss(model, b))


def test_losses_are_summed_when_asked_for() -> None:
    compare(GPT2.loss, Plan(m=3, reduction="sum", clip=True))


def test_gradients_that_are_there_already_are_added_to() -> None:
    batches = GPT2.batches(1, 6)
    plain, model = GPT2.make(0), GPT2.make(0)
    seen, ours = Seen(), Seen()
    optimizer = build_optimizer(plain, PLAN)
    seen.watch(plain, optimizer)
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        GPT2.loss(plain, batch).backward()
    optimizer.step()
    with an_offloaded(model) as run:
        assert run.optimizer is not None
        ours.watch(model, run.optimizer)
        for seed, batch in enumerate(batches[:3]):
            torch.manual_seed(seed)
            GPT2.loss(model, batch).backward()
        run.step(batches[3:], lambda b: GPT2.loss(model, b), reduction="sum", seeds=[3, 4, 5])
    assert differences(ours, seen) == []


@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_scales_and_decides_about_the_step(overflow: bool) -> None:
    plain, model = GPT2.make(0), GPT2.make(0)
    batches = GPT2.batches(1, 3)
    factor = float("inf") if overflow else 1.0
    plain_optimizer, plain_scaler = build_optimizer(plain, PLAN), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        plain_scaler.scale(GPT2.loss(plain, batch) * factor / 3).backward()
    plain_scaler.unscale_(plain_optimizer)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    plain_scaler.step(plain_optimizer)
    plain_scaler.update()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with an_offloaded(model) as run:
        out = run.step(batches, lambda b: GPT2.loss(model, b) * factor, max_norm=0.5, scaler=scaler, seeds=[0, 1, 2])
        assert out.grad_norm is not None
        assert torch.equal(out.grad_norm, norm) or overflow
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert scaler.get_scale() == plain_scaler.get_scale()
    assert (scaler.get_scale() < 1024.0) is overflow


# ---- the process around ---------------------------------------------------------------------------------------------


def test_a_context_inside_fn_that_sets_switches_of_the_process_is_each_microbatchs_own() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        backends = [SDPBackend.MATH] if int(batch["input_ids"][0, 0]) % 2 else [SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel([*backends, SDPBackend.MATH]):
            return GPT2.loss(model, batch)

    before = torch.backends.cuda.flash_sdp_enabled()
    compare(loss)
    assert torch.backends.cuda.flash_sdp_enabled() == before


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("made", ["inside", "outside", "around"])
def test_autocast_wherever_its_context_was_made(made: str, recompute: bool) -> None:
    cacheless = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    caching = torch.autocast("cpu", torch.bfloat16)  # the cache is off in rounds all the same
    batches = GPT2.batches(1, 15)
    plain, model = GPT2.make(0), GPT2.make(0)

    def reference(model: nn.Module, batch: Any) -> Tensor:
        with cacheless:
            return GPT2.loss(model, batch)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        context = {"inside": torch.autocast("cpu", torch.bfloat16), "outside": caching, "around": nullcontext()}[made]
        with context:
            return GPT2.loss(model, batch)

    everything = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with everything if made == "around" else nullcontext():  # backward and update, too
        expected = train_loop(plain, reference, batches, PLAN)
    with an_offloaded(model) as run:
        around = torch.autocast("cpu", torch.bfloat16) if made == "around" else nullcontext()

        def fn(batch: Any) -> Tensor:
            return loss(model, batch)

        seen = Seen()
        assert run.optimizer is not None
        seen.watch(model, run.optimizer)
        for step in range(5):
            with around:
                out = run.step(batches[3 * step : 3 * step + 3], fn, seeds=PLAN.seeds(step), recompute=recompute)
            seen.losses += losses_of(out)
            seen.step_ended(model)
        assert (run.core.arrivals.dropped_copies > 0) is not recompute  # then no graph holds them
    assert differences(seen, expected) == []


def test_hooks_on_saved_tensors_around_the_step_see_every_tensor() -> None:
    counts = [0, 0]

    def pack(tensor: Tensor) -> Tensor:
        counts[0] += 1
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        counts[1] += 1
        return tensor

    seen: list[tuple[int, int]] = []

    def around() -> AbstractContextManager[Any]:
        seen.append((counts[0], counts[1]))
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    compare(GPT2.loss, around=around, recompute=False)
    middle, end = seen[1], (counts[0], counts[1])
    assert middle == (end[0] - middle[0], end[1] - middle[1])


def test_context_variables_and_the_default_device_are_those_of_the_caller() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    found: list[tuple[int, str]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found.append((variable.get(), str(torch.empty(1).device)))
        return GPT2.loss(model, batch)

    variable.set(7)
    compare(loss, around=lambda: torch.device("cpu"))
    assert set(found) == {(7, "cpu")}


@pytest.mark.full
def test_the_profiler_sees_the_operations_of_all_microbatches() -> None:
    model = GPT2.make(0)
    with an_offloaded(model) as run:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            run.step(GPT2.batches(1, 3), lambda b: GPT2.loss(model, b), round_size=3, recompute=False)
        counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["AddmmBackward0"] == counts["aten::addmm"] == 3 * 16


def test_users_hooks_fire_as_often_as_in_the_loop() -> None:
    counts: list[dict[str, int]] = []

    def count(name: str) -> Callable[..., None]:
        here = counts[-1]
        return lambda *_: here.__setitem__(name, here.get(name, 0) + 1)

    def hooked(model: nn.Module) -> nn.Module:
        counts.append({})
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient: gradient * 2 + 1)
            parameter.register_post_accumulate_grad_hook(count(f"accumulated {name}"))
        for name, module in model.named_modules():
            module.register_forward_pre_hook(count(f"before {name}"))
            module.register_forward_hook(count(f"after {name}"))
            if isinstance(module, nn.LayerNorm):
                module.register_full_backward_hook(count(f"backward {name}"))
        return model

    batches = GPT2.batches(1, 15)
    expected = train_loop(hooked(GPT2.make(0)), GPT2.loss, batches, PLAN)
    model = hooked(GPT2.make(0))
    with an_offloaded(model) as run:
        seen = train_rounds(run, model, GPT2.loss, batches, PLAN, round_size=3, recompute=False)
    assert differences(seen, expected) == []
    assert counts[1] == counts[0]
