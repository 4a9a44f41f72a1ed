"""Buffers that are too large to stay on the device are paged as weights are; forwards may still write to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from support.benches import assert_same
from support.composites import packed
from support.runtime.outcomes import POISONED

WIDTH = 64
BUDGET = 64 * 1024  # of six buffers of 16 KiB, and weights of the same size
PLACES = [hydra_ext.SimulatedDevice(poison=True), hydra_ext.SimulatedDevice(poison=True, asynchronous=True, seed=1)]


class Layer(nn.Module):
    """A trained layer beside a buffer as large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", (100 * torch.randn(WIDTH, WIDTH)).to(torch.int32))

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(self.inner(given) + given @ (self.table / 100))


class Writing(Layer):
    """Keeps what it has seen, as normalisation layers do."""

    def forward(self, given: Tensor) -> Tensor:
        result = super().forward(given)
        with torch.no_grad():
            self.table.add_((100 * result.mean()).int() + 1)
        return result


class Replacing(Layer):
    def forward(self, given: Tensor) -> Tensor:
        result = super().forward(given)
        self.table = self.table + (100 * result.detach().mean()).int() + 1
        return result


class Adding(Layer):
    """Makes a buffer in its first forward."""

    def forward(self, given: Tensor) -> Tensor:
        result = super().forward(given)
        if not hasattr(self, "late"):
            self.register_buffer("late", result.detach().mean())
        return result + self.late


class Lending(nn.Module):
    """Reads the buffer of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.lender, self.own = Layer(), Layer()

    def forward(self, given: Tensor) -> Tensor:
        return self.own(given) @ (self.lender.table / 100)


def model_of(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(6)))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Layer, Writing, Replacing, Adding, Lending])
def test_large_buffers_have_the_bits_of_plain_pytorch(
    kind: Callable[[], nn.Module], place: hydra_ext.SimulatedDevice
) -> None:
    plain, model = model_of(kind), model_of(kind)
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Buffers that replace others stay on the device.
    budget = 3 * BUDGET if kind is Replacing else BUDGET
    with hydra_ext.offload(model, optimizer, budget=budget, device=place, checks=POISONED) as run:
        found = steps(model, optimizer)
        report = run.report()
        assert report.evictions > 0
        assert len(run.layout.buffers) >= 5
        assert report.peak_buffers_bytes <= budget // 8
        assert (report.weights_written_back_bytes > 0) == (kind is Writing)
        inside = [tensor.clone() for tensor in model.state_dict().values()]
    assert_same([*expected, *plain.state_dict().values()], [*found, *inside])
    assert_same([*plain.state_dict().values()], [*model.state_dict().values()])


def test_a_round_sees_writes_to_paged_buffers_as_a_loop_does() -> None:
    plain, model = model_of(Writing), model_of(Writing)
    torch.manual_seed(5)
    batches = [torch.randn(2, WIDTH) for _ in range(4)]
    expected = []
    for batch in batches:
        loss = plain(batch).square().mean()
        (loss / 4).backward()
        expected.append(loss.detach())
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=2 * BUDGET, checks=POISONED) as run:
        assert run.layout.buffers
        found = run.step(batches, lambda batch: model(batch).square().mean()).losses
    assert_same(
        [*expected, *plain.state_dict().values()], [*(each.detach() for each in found), *model.state_dict().values()]
    )


def test_a_repeated_forward_that_finds_other_numbers_is_refused() -> None:
    model = model_of(Writing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {name: hydra_ext.Recompute() for name, _ in model.named_children()}
    with hydra_ext.offload(model, optimizer, budget=3 * BUDGET, activations=policy, checks=POISONED) as run:
        assert run.layout.buffers
        with pytest.raises(UnsupportedModel, match=r"gives something else when it is called a second time"):
            steps(model, optimizer)


def test_statistics_of_large_normalisations_stay_on_the_device() -> None:
    """Their kernel counts no version, so paged ones would lose what it writes."""

    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            torch.manual_seed(step)
            loss = (model(torch.randn(4, 2048)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    plain, model = (nn.Sequential(*(nn.BatchNorm1d(2048) for _ in range(4))) for _ in range(2))
    statistics = sum(buffer.nbytes for buffer in model.buffers())
    expected = trained(plain)
    with hydra_ext.offload(model, budget=5 * statistics, checks=POISONED) as run:
        assert statistics > run.budget // 8
        assert not run.layout.buffers
        found = trained(model)
    assert_same([*expected, *plain.state_dict().values()], [*found, *model.state_dict().values()])


def test_a_materialized_model_has_paged_buffers() -> None:
    plain = model_of(Layer)
    model = hydra_ext.materialize(lambda: model_of(Layer))
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=BUDGET, checks=POISONED) as run:
        assert run.layout.buffers
        assert_same(expected, steps(model, optimizer))


def test_small_buffers_and_those_seen_elsewhere_stay_on_the_device() -> None:
    model = model_of(Layer)
    with hydra_ext.offload(model, budget="2MiB") as run:
        assert not run.layout.buffers
    model[0].alias = model[0].table
    model[1].view = model[1].table[:2]
    model[4].held = {"tables": [model[4].table]}
    model[2].register_buffer("small", torch.zeros(8))
    model[2].register_buffer("sparse", torch.eye(8).to_sparse())
    model[3].packed = packed(torch.ones(2, 2))
    with hydra_ext.offload(model, budget=BUDGET + 4 * WIDTH * WIDTH) as run:
        assert set(run.layout.buffers) == {f"{number}.table" for number in (2, 3, 5)}
        assert run.report().peak_buffers_bytes == 3 * 4 * WIDTH * WIDTH + 32 + 8 * (2 * 8 + 4)
