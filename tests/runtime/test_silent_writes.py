"""Writes to host parameters that no version counter shows, and gradients that somebody keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydra_ext

INPUTS = torch.randn(4, 61, generator=torch.Generator().manual_seed(0))
UNSAMPLED = (2, 28)  # 600 bytes from the beginning: sampled lines are 64 bytes, 1,248 bytes apart


def stack() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(61, 77), nn.ReLU(), nn.Linear(77, 61))


def first_element(weight: Tensor) -> None:
    weight.detach().numpy()[0, 0] += 1.0


def last_element(weight: Tensor) -> None:
    weight.detach().numpy()[-1, -1] += 1.0


def another_storage(weight: Tensor) -> None:
    fresh = weight.detach().clone()
    fresh[UNSAMPLED] += 1.0
    weight.data = fresh


@pytest.mark.parametrize("write", [first_element, last_element, another_storage])
def test_a_write_that_sampling_has_to_notice(write: Callable[[Tensor], None]) -> None:
    plain = stack()
    model = copy.deepcopy(plain)
    with hydra_ext.offload(model, budget=2**20, blocks=[model[0], model[2]]) as run, torch.no_grad():
        for step in range(2):
            assert torch.equal(model(INPUTS), plain(INPUTS)), f"forward {step}"
            versions = [parameter._version for parameter in model.parameters()]
            write(plain[2].weight)
            write(model[2].weight)
            assert versions == [parameter._version for parameter in model.parameters()]
        assert torch.equal(model(INPUTS), plain(INPUTS))
        assert run.report().windows > 0
        assert run.report().evictions == 0


def test_gradients_that_are_kept_keep_their_numbers() -> None:
    plain = stack()
    model = copy.deepcopy(plain)

    def train(one: nn.Sequential) -> list[Tensor]:
        kept: list[Tensor] = []
        for step in range(3):
            one(INPUTS + step).pow(2).mean().backward()
            kept += [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
            one.zero_grad(set_to_none=True)
        return kept

    expected = train(plain)
    with hydra_ext.offload(model, budget=60_000, blocks=[model[0], model[2]]) as run:
        kept = train(model)
        assert run.report().windows > 0
    assert len(kept) == 12
    assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))


def test_a_graph_that_has_saved_a_gradient_sees_what_is_added_to_it() -> None:
    model = stack()
    with hydra_ext.offload(model, budget=60_000, blocks=[model[0], model[2]]) as run:
        model(INPUTS).pow(2).mean().backward()
        gradient = model[2].weight.grad
        assert gradient is not None
        factor = torch.ones((), requires_grad=True)
        product = (factor * gradient).sum()
        model(INPUTS).pow(2).mean().backward()
        assert model[2].weight.grad is gradient
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        assert run.report().windows > 0
