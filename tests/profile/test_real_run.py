"""A real microbatch gives the figures of a dry run, also where there is none, and leaves everything as it was."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ext.errors import NotOnFakeTensors
from hydra_ext.plan import fit
from hydra_ext.profile import ModuleFigures, Profile
from hydra_ext.profile.cards import Speed
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.profile.real_run import has_numbers, real_run
from support.models.zoo import FAMILIES
from support.models.zoo_more import MORE_FAMILIES
from support.profile.real_run import saved_by_modules
from support.profile.unchanged import is_same, random_states, state_of

ROWS = 8
SPEED = Speed(flops_per_second=1e12, bytes_per_second=1e11)


def convolutions() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )
    return model, torch.randn(ROWS, 3, 16, 16), lambda x: model(x).square().mean()


def transformer() -> tuple[nn.Module, Any, Callable[[Any], Any]]:
    family = FAMILIES["gpt2"]
    model = family.make(0)
    return model, family.batches(1, 1)[0], lambda mb: family.loss(model, mb)


def without_seconds(profile: Profile) -> Profile:
    def timeless(figures: ModuleFigures) -> ModuleFigures:
        return dataclasses.replace(figures, forward_seconds=0.0, again_seconds=None)

    return dataclasses.replace(
        profile,
        modules={name: timeless(each) for name, each in profile.modules.items()},
        backward_ratio=0.0,
        chains={
            name: [
                # The numbers of storages and of their versions are each run's own.
                (timeless(link.figures), [*link.fresh.values()], [*link.saved.values()], len(link.inputs))
                for link in chain.links
            ]
            for name, chain in profile.chains.items()
        },
    )


@pytest.mark.parametrize(("make", "dtype"), [(convolutions, None), (transformer, None), (transformer, torch.bfloat16)])
def test_it_gives_the_bytes_of_a_dry_run(make: Callable[[], Any], dtype: torch.dtype | None) -> None:
    model, example, fn = make()
    dry = dry_run(model, example, fn, speed=SPEED, param_dtype=dtype)
    real = real_run(model, example, fn, speed=SPEED, param_dtype=dtype)
    assert without_seconds(real) == without_seconds(dry)
    whole = dry.modules[""].forward_seconds  # a model may read its mask
    assert real.modules[""].forward_seconds == pytest.approx(whole, rel=1e-3)


def test_examples_of_any_layout() -> None:
    layer = nn.Linear(8, 8)
    wide = torch.randn(64, 16)
    for example in (wide[:, ::2], wide[:, 0:1].expand(64, 8), wide.unfold(1, 8, 4), torch.empty(0, 8)):
        dry, real = (run(layer, example, lambda x: layer(x).sum(), speed=SPEED) for run in (dry_run, real_run))
        assert real == dry


def test_backward_reads_the_numbers_that_were_saved() -> None:
    layer, x = nn.Linear(32, 32), torch.randn(32, 32)
    gradients: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        y = layer(x)
        y.register_hook(gradients.append)
        loss: Tensor = (y.tanh() + y.tanh().square()).mean()
        return loss

    fn(x).backward()
    real_run(layer, x, fn, speed=SPEED)
    plain, watched = gradients
    assert torch.equal(plain, watched)


def test_a_path_that_depends_on_numbers() -> None:
    family = MORE_FAMILIES["experts"]
    model, batch = family.make(0), family.batches(1, 1)[0]
    profile = real_run(model, batch, lambda mb: family.loss(model, mb), speed=SPEED)
    counted = saved_by_modules(model, batch, lambda mb: family.loss(model, mb))
    assert profile.modules[""].saved.fresh == sum(counted[""].fresh.values()) > 0
    assert {name for name, each in profile.modules.items() if each.calls} == {
        name for name, each in counted.items() if each.calls
    }


# ---- nothing is changed ---------------------------------------------------------------------------------------------
class Stateful(nn.Module):
    """Changes everything that a forward may change, and reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.register_buffer("steps", torch.zeros(()))
        self.seen: list[Any] = [torch.zeros(3)]
        self.counts = {"array": np.zeros(2), "deep": [[0]]}
        self.table = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
            self.seen[0].add_(1)
            self.table.mul_(2)
            x.add_(1)
        self.counts["array"] += 1
        self.counts["deep"][0][0] += 1
        self.last = self.norm(self.first(x)) * self.table
        self.seen.append(self.last)
        self.register_buffer("made", x.mean())
        random.random(), np.random.rand(), torch.rand(3)
        found: Tensor = self.drop(self.last).sum()
        self.number = found.item()
        return found


def _state(model: Stateful, x: Tensor) -> list[Any]:
    return [
        *state_of(model),
        [id(model.table), model.table._version, model.table.clone()],
        [[p._backward_hooks, len(p._post_accumulate_grad_hooks or ())] for p in model.parameters()],
        [id(each) for each in model.seen] + [model.seen[0].clone(), x.clone(), x._version],
        [model.counts["array"].tolist(), str(model.counts["deep"])],
        random_states(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_changed(fails: bool) -> None:
    model, stepped = Stateful(), []
    model(torch.randn(4, 8)).backward()  # gradients that are there already
    model.first.weight.data.uniform_(-1, 1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    x = torch.randn(4, 8)
    before = _state(model, x)

    def fn(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        if fails:
            raise KeyError("of the user")
        return loss

    if fails:
        with pytest.raises(KeyError, match="of the user"):
            real_run(model, x, fn, speed=SPEED)
    else:
        real_run(model, x, fn, speed=SPEED)
    assert not stepped
    for one, other in zip(before, _state(model, x), strict=True):
        assert is_same(one, other)


# ---- a plan ---------------------------------------------------------------------------------------------------------
def test_a_plan_says_that_a_real_microbatch_gave_its_figures_and_why() -> None:
    model, x, fn = convolutions()
    losses: list[float] = []

    def reads(x: Tensor) -> Tensor:
        loss = fn(x)
        losses.append(loss.item())
        return loss

    dry = fit(model, x, fn, device="t4-16")
    plan = fit(model, x, reads, device="t4-16")
    assert plan.measured_because is not None
    assert "_local_scalar_dense" in plan.measured_because
    assert "test_real_run.py" in plan.measured_because
    assert "losses.append(loss.item())" in plan.measured_because
    assert plan.measured_because in str(plan)
    assert dataclasses.replace(plan, measured_because=None) == dry
    assert "real microbatch" not in str(dry)
    assert len(losses) == 1


def test_without_numbers_the_reason_is_an_error() -> None:
    model, x, fn = convolutions()
    with torch.device("meta"):
        absent, _, of_absent = convolutions()
    for given, example, loss in ((absent, x, of_absent), (model, x.to("meta"), fn)):
        assert not has_numbers(given, example)
        with pytest.raises(NotOnFakeTensors, match="_local_scalar_dense") as caught:
            fit(given, example, lambda x, loss=loss: (loss(x), loss(x).item()))
        assert caught.value.reason in str(caught.value)
