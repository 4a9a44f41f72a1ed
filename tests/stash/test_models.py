"""Gradients with a stash are those without, bit for bit, whatever the model and however little stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.calls import standing_in
from support.models.picture_models import PICTURES
from support.models.zoo import FAMILIES, Family
from support.stash.stashed import assert_empty, assert_same, gradients, stashed

MODELS = FAMILIES | PICTURES
BUDGETS: dict[str, int | None] = {"none": None, "little": 40_000, "half": 400_000, "ample": 2**30}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS)
def test_gradients_are_the_same(family: Family, budget: str) -> None:
    model = family.make(seed=1)
    batches = family.batches(seed=2, count=3)
    stash = stashed(budget=BUDGETS[budget], model=model)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for batch in batches:
        expected = gradients(model, lambda: family.loss(model, batch))  # noqa: B023 - called at once
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.load_state_dict(state, strict=False)
        assert_same(gradients(model, lambda: family.loss(model, batch), stash), expected)  # noqa: B023
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        assert all(torch.equal(after[name], buffer) for name, buffer in state.items())
        assert_empty(stash.report())
    report = stash.report()
    assert report.intervals > 3
    assert report.kept > 0
    if budget in ("none", "little"):  # with a budget the newest stay from the second step on
        least = report.saved_bytes - len(batches) * (BUDGETS[budget] or 0)
        assert least <= report.to_host_bytes <= report.saved_bytes
        assert report.saved_bytes / 2 < report.to_device_bytes < 2 * report.saved_bytes
        assert report.prefetched > 0
    if budget == "ample":
        assert report.to_device_bytes == 0
        assert report.to_host_bytes <= report.saved_bytes / len(batches)  # the first step cannot know
    if budget == "little":
        assert report.peak_held_bytes < report.saved_bytes / len(batches)
    assert report.stayed == 0


@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS)
def test_gradients_are_the_same_where_everything_stays(family: Family) -> None:
    model = family.make(seed=1)
    stash = hydra_ext.stash(hydra_ext.Keep(), model=model, device="simulated")
    batch = family.batches(seed=2, count=1)[0]
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = [*gradients(model, lambda: family.loss(model, batch)), *(buffer.clone() for buffer in model.buffers())]
    model.load_state_dict(state, strict=False)
    assert_same([*gradients(model, lambda: family.loss(model, batch), stash), *model.buffers()], expected)
    assert stash.report().kept == stash.report().tensors > 0


def test_weights_are_never_moved() -> None:
    """Linear layers save a view of their weight, which is no leaf."""
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(2, 64, requires_grad=True)  # a leaf, too
    stash = stashed()
    with stash:
        layer(x).sum().backward()
    assert stash.report().kept == stash.report().tensors == 2


@pytest.mark.parametrize("policy", [hydra_ext.Keep(), {"0": hydra_ext.Keep()}, lambda name, _: None])
def test_what_is_to_stay_stays(policy: object) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64))
    stash = hydra_ext.stash(policy, model=model, device="simulated")  # type: ignore[arg-type]
    x = torch.randn(32, 64)
    expected = gradients(model, lambda: model(x).sum())
    assert_same(gradients(model, lambda: model(x).sum(), stash), expected)
    assert stash.report().kept == stash.report().tensors > 0


def test_the_innermost_module_with_a_policy_decides() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Tanh())
    inner = {"0": hydra_ext.Offload(), "0.1": hydra_ext.Keep(), "1": hydra_ext.Keep()}
    stash = hydra_ext.stash(inner, model=model, device="simulated")
    x = torch.randn(64, 64, requires_grad=True)
    with stash:
        model(x).sum().backward()
    report = stash.report()
    assert (report.tensors, report.kept, report.intervals) == (3, 2, 1)


def test_a_policy_by_function_gets_names_and_modules() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    asked = []

    def policy(name: str, module: nn.Module) -> hydra_ext.Offload | None:
        asked.append(name)
        return hydra_ext.Offload() if isinstance(module, nn.Tanh) else None

    stash = hydra_ext.stash(policy, model=model, device="simulated")
    with stash:
        model(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert asked == ["", "0", "1"]
    assert (stash.report().tensors, stash.report().intervals) == (2, 1)


def test_modules_are_as_before_after_the_context() -> None:
    model = nn.Sequential(nn.Tanh())
    with hydra_ext.stash({"0": hydra_ext.Offload()}, model=model, device="simulated"):
        assert [*standing_in(model[0])]
    assert not [*standing_in(model[0])]
