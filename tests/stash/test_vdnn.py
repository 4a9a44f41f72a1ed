"""vDNN's policies: what leaves is all, convolutions' inputs, or what has been seen to be fastest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.activations import dynamic
from hydra_ext.errors import InvalidArgument
from support.stash.stashed import assert_empty, assert_same, gradients


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.Sigmoid()]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 256, 4))


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
MAP = 4 * 8 * 256 * 4  # bytes


def stash_of(model: nn.Module, which: str, budget: int | None = None) -> hydra_ext.stash:
    return hydra_ext.stash(hydra_ext.Offload(which), model=model, budget=budget, device="simulated")  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [None, 3 * MAP, 2**30])
@pytest.mark.parametrize("which", ["all", "conv"])
def test_gradients_are_the_same(which: str, budget: int | None) -> None:
    model = net()
    stash = stash_of(model, which, budget)
    for _ in range(3):
        expected = gradients(model, lambda: model(X).square().sum())
        assert_same(gradients(model, lambda: model(X).square().sum(), stash), expected)
        assert_empty(stash.report())
        assert stash.report().resident_bytes == 0


def test_conv_moves_what_convolutions_take_in_and_nothing_else() -> None:
    """Inputs of four of them: the picture is too small a part of it all to matter, a sigmoid's and ReLUs' outputs."""
    model = net()
    stash = stash_of(model, "conv")
    with stash:
        loss = model(X).square().sum()
    report = stash.report()
    # Each batch norm saves its input, the linear layer the last ReLU's output, square what it takes in.
    assert report.to_host_bytes == X.nbytes + 4 * MAP
    assert report.resident_bytes == 4 * MAP + MAP  # and nothing below 1 KiB
    assert report.held_bytes <= 2 * MAP
    loss.backward()
    assert stash.report().to_device_bytes <= X.nbytes + 4 * MAP


def test_what_a_convolution_takes_in_later_leaves_then() -> None:
    weight = nn.Parameter(torch.randn(8, 8, 1, 1))
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    stash = stash_of(nn.Identity(), "conv")
    with stash:
        hidden = (x * 1).sin()
        other = hidden.cos()  # saves it
        assert (stash.report().to_host_bytes, stash.report().resident_bytes) == (0, 2 * MAP)
        loss = torch.conv2d(hidden, weight).sum() + other.sum()
        assert (stash.report().to_host_bytes, stash.report().resident_bytes) == (MAP, MAP)
    loss.backward()
    hidden = (x * 1).sin()
    other = hidden.cos()
    (expected,) = torch.autograd.grad(torch.conv2d(hidden, weight).sum() + other.sum(), [x])
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def clock(monkeypatch: pytest.MonkeyPatch, stash: hydra_ext.stash, seconds: dict[str, float]) -> list[str]:
    """Passes take so long, by what they do; returns what that was."""
    now, done = [0.0], []
    monkeypatch.setattr(dynamic.time, "perf_counter", lambda: now[0])
    chooses = stash._saving._dynamic
    assert chooses is not None
    treatment = chooses.treatment

    def noted() -> object:
        made = treatment()
        done.append(chooses._candidate)
        now[0] += seconds[chooses._candidate]
        return made

    monkeypatch.setattr(chooses, "treatment", noted)
    return done


@pytest.mark.parametrize(
    ("budget", "seconds", "chosen"),
    [
        (2**30, {"keep": 9.0, "conv": 1.0, "all": 1.0}, "keep"),  # it fits
        (8 * MAP, {"conv": 1.0, "all": 2.0}, "conv"),
        (8 * MAP, {"conv": 2.0, "all": 1.0}, "all"),
        (3 * MAP, {"conv": 1.0, "all": 2.0}, "all"),  # what would stay is too much
    ],
)
def test_dynamic_takes_the_fastest_that_fits(
    budget: int, seconds: dict[str, float], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    stash = stash_of(model, "dynamic", budget)
    done = clock(monkeypatch, stash, seconds)
    expected = gradients(model, lambda: model(X).square().sum())
    for step in range(10):
        assert_same(gradients(model, lambda: model(X).square().sum(), stash), expected)
        assert stash.report().chosen == (chosen if step >= (1 if chosen == "keep" else 6) else None)
    if chosen == "keep":
        assert done == ["all"] + ["keep"] * 9
    else:
        assert done == ["all"] * 3 + ["conv"] * 3 + [chosen] * 4
    assert f"chosen   {chosen}" in str(stash.report())


def test_a_forward_without_backward_is_a_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    stash = stash_of(model, "dynamic", 8 * MAP)
    done = clock(monkeypatch, stash, {"all": 1.0, "conv": 1.0, "keep": 1.0})

    def forward() -> Tensor:
        with stash:
            return model(X)  # type: ignore[no-any-return]

    for _ in range(7):
        forward()
    assert done == ["all"] * 3 + ["conv"] * 3 + ["all"]
    kept = [forward() for _ in range(3)]
    assert len(kept) == 3
    assert done[7:] == ["all"] * 3


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="budget="):
        stash_of(net(), "dynamic")
    with pytest.raises(InvalidArgument, match="which='some'"):
        hydra_ext.Offload("some")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="whole model"):
        hydra_ext.stash({"0": hydra_ext.Offload("dynamic")}, model=net(), budget=2**20, device="simulated")
    whole = hydra_ext.offload(net(), budget="64MiB", device="simulated", activations=hydra_ext.Offload("dynamic"))
    with pytest.raises(InvalidArgument, match="budget="), whole:
        pass
