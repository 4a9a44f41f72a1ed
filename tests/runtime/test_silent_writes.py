"""Writes to host parameters that no version counter shows, and gradients that the user keeps."""

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


def test_a_refused_change_does_not_forget_that_weights_are_to_be_read_anew() -> None:
    model = stack()
    model[2] = nn.Linear(77, 61, bias=False)  # nothing else of its block is brought up to date
    with hydra_ext.offload(model, budget=2**20, blocks=[model[0], model[2]]) as run, torch.no_grad():
        model(INPUTS)
        weight = model[2].weight
        weight.detach().numpy()[UNSAMPLED] += 1.0
        run.refresh()
        data = weight.data
        weight.data = data.t()
        with pytest.raises(hydra_ext.errors.ModelChanged, match="other strides"):
            model(INPUTS)
        weight.data = data
        seen = model(INPUTS)
    assert torch.equal(seen, model(INPUTS))


class WritesOnce(nn.Linear):
    """Scales its weight in its first call."""

    written = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.written:
            with torch.no_grad():
                self.weight.mul_(0.5)
            self.written = True
        return super().forward(inputs)


def test_a_write_of_one_forward_is_none_of_the_next() -> None:
    """A graph on the host's side that has saved the weight goes backward after another forward."""
    torch.manual_seed(1)
    plain = nn.Sequential(WritesOnce(61, 77), nn.ReLU(), WritesOnce(77, 61))
    model = copy.deepcopy(plain)

    def work(one: nn.Sequential) -> list[Tensor]:
        one(INPUTS)
        penalty = one[2].weight.pow(2).sum()
        loss = one(INPUTS).pow(2).mean()
        penalty.backward()
        loss.backward()
        return [parameter.grad for parameter in one.parameters() if parameter.grad is not None]

    expected = work(plain)
    with hydra_ext.offload(model, budget=90_000, blocks=[model[0], model[2]]) as run:
        found = work(model)
        assert run.report().windows > 0
    assert len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # a penalty on the host adds in another order
