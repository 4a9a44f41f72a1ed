"""The seconds of a second call are those until its last tensor is saved: there a checkpoint ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext import SimulatedDevice
from hydra_ext.profile import ModuleFigures, Profile
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.profile.real_run import real_run
from support.models.zoo import FAMILIES

# Of some: the last one saves a mask behind its last product, or nothing behind its first operator.
MODULES = {
    "gpt2": ("transformer.h.1", "transformer.h.0.mlp", "transformer.h.0.mlp.act", "transformer.h.0.ln_1"),
    "llama": ("model.layers.1", "model.layers.0.mlp", "model.layers.0.self_attn", "model.layers.0.mlp.down_proj"),
    "unet": ("middle", "merge.1"),
}


def cost_of(func: Any, *_: Any) -> tuple[float, int]:
    """A second for each operator, but for one that a checkpoint adds to the second call."""
    return float(func is not torch.ops.aten.detach.default), 0


class Count(TorchDispatchMode):
    """Counts the seconds of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.value += cost_of(func)[0]
        return func(*args, **(kwargs or {}))


def made(name: str) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build().train()
    return model, family.batches(1, 1)[0], lambda given: family.loss(model, given)


def seconds_of_calls(name: str, module: str) -> list[float]:
    """Of the first call of a module, and of the second one, which a checkpoint makes."""
    model, batch, loss = made(name)
    called = model.get_submodule(module)
    inner, counts = called.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        count = Count()
        counts.append(count)
        with count:
            return inner(*args, **kwargs)

    called.forward = lambda *args, **kwargs: checkpoint(counted, *args, use_reentrant=False, **kwargs)
    loss(batch).backward()
    return [count.value for count in counts]


@pytest.fixture
def _each_operator_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (dry_run, real_run):
        monkeypatch.setitem(place.__globals__, "costs_on", lambda *_: cost_of)


def seconds(figures: ModuleFigures) -> list[float | None]:
    return [figures.forward_seconds, figures.again_seconds]


@pytest.mark.usefixtures("_each_operator_takes_a_second")
@pytest.mark.parametrize("run", [dry_run, real_run])
@pytest.mark.parametrize("name", MODULES)
def test_they_are_those_of_the_operators_that_a_checkpoint_runs_again(name: str, run: Callable[..., Profile]) -> None:
    model, batch, loss = made(name)
    profile = run(model, batch, loss)
    counted = {module: seconds_of_calls(name, module) for module in MODULES[name]}
    assert {module: seconds(profile.modules[module]) for module in counted} == counted
    assert any(second < first for first, second in counted.values())


def test_a_step_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts operators. The device's own ones run outside of what is timed."""
    name = "llama"
    counted = {module: seconds_of_calls(name, module) for module in MODULES[name]}
    model, batch, loss = made(name)
    with Count() as count, hydra_ext.offload(model, budget=2**26, device=SimulatedDevice()) as run:
        monkeypatch.setattr(time, "thread_time", lambda: count.value)
        loss(batch).backward()
        assert run.fit is not None
        profile = run.fit.planner.profile
    assert profile is not None
    assert {module: seconds(profile.modules[module]) for module in counted} == counted


def test_a_group_s_second_call_ends_in_the_last_of_its_calls_that_saves() -> None:
    """The last linear layer saves its input before it computes; dropout without effect saves nothing."""
    children = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.0), nn.Linear(64, 64)]
    model = nn.Sequential(*children)
    profile = dry_run(model, torch.randn(32, 64), lambda x: model(x).square().mean())
    chain, times = profile.chains[""], [profile.modules[str(at)].forward_seconds for at in range(5)]
    assert min(times[at] for at in (0, 1, 2, 4)) > 0
    assert chain.again_seconds(0, 3) == chain.again_seconds(0, 4) == pytest.approx(times[0] + times[1])
    assert chain.again_seconds(0, 5) == pytest.approx(sum(times[:4]))
    assert chain.again_seconds(3, 4) is None
    assert chain.group(0, 3).again_seconds == chain.again_seconds(0, 3)


def test_of_cuts_with_as_few_bytes_the_one_with_the_shortest_second_calls_is_taken() -> None:
    """A group ends with a convolution, which does not run again."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    model = nn.Sequential(*layers)
    profile = dry_run(model, torch.randn(4, 16, 16, 16), lambda x: model(x).square().mean())
    cut = profile_cut(profile)
    chain = profile.chains[""]
    again = sum(chain.again_seconds(*place) or 0.0 for place in cut)
    ends = [end for _, end in cut[:-1]]
    assert len(cut) > 1
    assert all(isinstance(layers[end - 1], nn.Conv2d) for end in ends)
    assert again < 0.7 * sum(profile.modules[str(at)].forward_seconds for at in range(9))


def profile_cut(profile: Profile) -> list[tuple[int, int]]:
    """The places of the groups of the cut into two or three."""
    cuts = [cut for cut in hydra_ext.profile.cuts_of(profile) if len(cut) in (2, 3)]
    places = [profile.place_of(name) for name in cuts[0]]
    return [(place.first, place.end) for place in places if place is not None]
