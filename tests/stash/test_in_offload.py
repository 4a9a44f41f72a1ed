"""Inside ``offload``: the same gradients, with less on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from support.models.zoo import FAMILIES, Family
from support.stash.stashed import assert_empty, assert_same

CHECKS = Checks(poison_hosts=True)

Outcome = tuple[list[Tensor], hydra_ext.Report]


def trained(
    family: Family, activations: hydra_ext.Offload | hydra_ext.Compress | None, *, rounds: bool, vectors: bool = False
) -> tuple[list[Tensor], hydra_ext.Report]:
    """``vectors``: only biases and norms are trained, whose gradients no error of a layer's input reaches."""
    model = family.make(seed=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.dim() < 2 or not vectors], lr=0.1)
    batches = family.batches(seed=2, count=4)
    found = []
    with hydra_ext.offload(
        model, optimizer, budget="64MiB", device=SimulatedDevice(), activations=activations, checks=CHECKS
    ) as run:
        torch.manual_seed(5)
        for pair in (batches[:2], batches[2:]):
            if rounds:
                out = run.step(pair, lambda batch: family.loss(model, batch), max_norm=None if vectors else 1.0)
                found.append(out.loss)
            else:
                for batch in pair:
                    loss = family.loss(model, batch)
                    loss.backward()
                    found.append(loss.detach())
                optimizer.step()
                model.zero_grad()
        report = run.report()
    return [*found, *(parameter.detach() for parameter in model.parameters())], report


@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_weights_are_the_same_and_less_is_on_the_device(family: Family, rounds: bool) -> None:
    expected, plain = trained(family, None, rounds=rounds)
    found, report = trained(family, hydra_ext.Offload(), rounds=rounds)
    assert_same(found, expected)
    assert plain.activations is None
    assert report.activations is not None
    assert report.activations.intervals > 3
    assert report.activations.to_device_bytes > 0
    assert report.fallbacks == plain.fallbacks
    assert report.faults == plain.faults
    assert_empty(report.activations)


@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_compressed_reaches_weights_of_layers_alone(family: Family, rounds: bool) -> None:
    expected, _ = trained(family, None, rounds=rounds, vectors=True)
    found, report = trained(family, hydra_ext.Compress(error=1e3), rounds=rounds, vectors=True)
    assert_same(found, expected)
    assert report.activations is not None
    assert report.activations.compressed > 3
    assert len({layer.weight for layer in report.activations.layers}) == len(report.activations.layers) > 3
    assert_empty(report.activations)


def test_the_peak_of_a_deep_model_is_cut() -> None:
    def peak(activations: hydra_ext.Offload | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(24)])
        x = torch.randn(512, 64)
        with hydra_ext.offload(model, budget="64MiB", device="simulated", activations=activations) as run:
            for _ in range(2):
                model(x).square().sum().backward()
            return run.report().peak_activations_bytes

    assert peak(hydra_ext.Offload()) < peak(None) / 3


def test_recomputing_goes_together_with_it() -> None:
    def step(recompute: bool) -> Outcome:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = list(torch.randn(3, 32, 64))
        with hydra_ext.offload(
            model, optimizer, budget="64MiB", device="simulated", blocks=list(model), checks=CHECKS,
            activations=hydra_ext.Offload(),
        ) as run:  # fmt: skip
            for _ in range(2):
                run.step(data, lambda x: model(x).square().sum(), recompute=recompute)
            return [p.detach() for p in model.parameters()], run.report()

    (kept, keeping), (made_again, recomputing) = step(False), step(True)
    assert_same(made_again, kept)
    assert keeping.activations is not None
    assert recomputing.activations is not None
    assert 0 < recomputing.activations.saved_bytes < 0.6 * keeping.activations.saved_bytes


@pytest.mark.parametrize("wrong", ["offload", 3, {"absent": hydra_ext.Offload()}])
def test_what_is_no_policy_is_refused(wrong: object) -> None:
    with pytest.raises(hydra_ext.errors.InvalidArgument):
        hydra_ext.offload(nn.Linear(4, 4), budget="1MiB", activations=wrong)  # type: ignore[arg-type]
