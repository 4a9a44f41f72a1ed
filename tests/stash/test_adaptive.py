"""The bound that follows the training: where it comes from, and what it does to gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.activations.layers import momentum_over_gradient
from hydra_ext.activations.report import LayerReport
from support.stash.stashed import gradients


def layer(kind: str) -> tuple[nn.Module, Tensor, Callable[[nn.Module], float]]:
    """One of them, what it takes in, and how many elements of its weight's gradient one of its output's adds to."""
    generator = torch.Generator().manual_seed(5)
    if kind == "linear":
        return nn.Linear(96, 48), torch.randn(8, 24, 96, generator=generator), lambda module: 96.0
    x = torch.relu(torch.randn(6, 8, 20, 20, generator=generator))
    if kind == "conv":
        return nn.Conv2d(8, 12, 3, padding=1), x, lambda module: 8.0 * 9
    if kind == "grouped":
        return nn.Conv2d(8, 12, 3, padding=1, groups=4), x, lambda module: 2.0 * 9
    if kind == "strided":
        return nn.ConvTranspose2d(8, 12, 4, stride=(2, 1), padding=1), x, lambda module: 8.0 * 16 / 2
    return nn.ConvTranspose2d(8, 12, 3, padding=1), x, lambda module: 8.0 * 9


class Net(nn.Module):
    """The layer, in the middle of something."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layer = module
        self.others = nn.Sequential(nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.others(self.layer(x * 1))
        return result


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return (result * torch.randn(result.shape, generator=torch.Generator().manual_seed(9))).sum()


KINDS = ("linear", "conv", "grouped", "transposed", "strided")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_that_of_the_formula_and_the_error_what_it_foretells(kind: str) -> None:
    torch.manual_seed(0)
    module, x, touched = layer(kind)
    model, fraction = Net(module), 0.02
    stash = hydra_ext.stash(hydra_ext.Compress(fraction=fraction), model=model, device="simulated")
    expected = gradients(model, lambda: loss_of(model, x))
    seen: list[Tensor] = []
    watch = module.register_forward_hook(lambda module, given, got: got.register_hook(seen.append) and None)
    with stash:
        loss = loss_of(model, x)
    watch.remove()
    assert (stash.report().compressed, stash.report().layers[0].bound) == (0, 0.0)  # nothing is known yet
    assert stash.report().layers[0].gradient_error == 0
    loss.backward()
    names = [name for name, _ in model.named_parameters()]
    at = 1 + names.index("layer.weight")
    share = (x != 0).double().mean().item()
    bound = fraction * expected[at].norm() / seen[0].norm() * math.sqrt(3 / (share * touched(module)))
    assert bound < math.sqrt(2 * fraction) * x[x != 0].square().mean().sqrt()
    for parameter in model.parameters():
        parameter.grad = None
    found = gradients(model, lambda: loss_of(model, x), stash)
    report = stash.report()
    (row,) = report.layers
    assert row.weight == "layer.weight"
    assert row.bound == pytest.approx(float(bound), rel=1e-3)
    assert row.gradient_error == pytest.approx(fraction, rel=1e-3)
    assert (row.forwards, row.samples) == (2, 1)
    assert row.saved_bytes == x.nbytes
    assert row.ratio > 3
    measured = ((found[at] - expected[at]).norm() / expected[at].norm()).item()
    if kind in ("transposed", "strided"):  # fewer pairs at the edges
        assert 0.5 * fraction <= measured <= 1.1 * fraction
    else:
        assert 0.75 * fraction <= measured <= 1.15 * fraction


def rows(
    scales: list[float], *, every: int = 1, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
) -> list[LayerReport]:
    """What is said of the layer in each of some steps, whose loss has these factors."""
    torch.manual_seed(0)
    module, x, _ = layer("linear")
    model = Net(module)
    made = None if optimizer is None else optimizer(model)
    stash = hydra_ext.stash(hydra_ext.Compress(every=every), model=model, optimizer=made, device="simulated")
    found = []
    for scale in scales:
        with stash:
            loss = loss_of(model, x) * scale
        loss.backward()
        if made is not None:
            made.step()
            made.zero_grad()
        found.append(stash.report().layers[0])
    return found


def test_it_is_measured_more_often_at_first() -> None:
    assert [row.samples for row in rows([1.0] * 13, every=4)] == [0, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 5]
    assert [row.samples for row in rows([1.0] * 12, every=20)] == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    assert [row.forwards for row in rows([1.0] * 3)] == [1, 2, 3]


@pytest.mark.parametrize("calls", [2, 3, 5, 7])
def test_a_layer_called_several_times_a_step_is_measured_in_each_of_its_calls(calls: int) -> None:
    torch.manual_seed(0)
    module, x, _ = layer("linear")
    model, every = Net(module), 2 * calls
    stash = hydra_ext.stash(hydra_ext.Compress(every=every), model=model, device="simulated")
    samples = []  # one is seen in the forward after that whose backward it was taken in
    for _ in range(20 * every):
        with stash:
            loss = loss_of(model, x[:1])
        samples.append(stash.report().layers[0].samples)
        loss.backward()
    grown = [forward for forward in range(every, len(samples) - 1) if samples[forward + 1] > samples[forward]]
    assert {forward % calls for forward in grown} == set(range(calls))
    assert len(grown) == 19


def test_a_factor_of_the_loss_changes_nothing() -> None:
    assert rows([1e-3] * 3)[-1].bound == pytest.approx(rows([1e3] * 3)[-1].bound, rel=1e-3)


def test_gradients_that_are_no_numbers_say_nothing() -> None:
    found = rows([float("inf"), float("nan"), 0.0, 1.0, 1.0])
    assert [row.samples for row in found] == [0, 0, 0, 0, 1]
    assert [row.bound > 0 for row in found] == [False] * 4 + [True]


def test_a_bound_moves_by_a_factor_of_two_at_most() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    stash = hydra_ext.stash(hydra_ext.Compress(every=1), model=model, device="simulated")
    x, bounds = torch.randn(64, 64), []
    for scale in (1.0, 1e4, 1e4, 1e-4, 1e-4, 1e-4):
        with stash:
            loss = model(x * scale).square().sum()
        loss.backward()
        bounds.append(stash.report().layers[0].bound)
    changes = [after / before for before, after in itertools.pairwise(bounds[1:])]
    assert max(changes) == pytest.approx(2.0)
    assert min(changes) >= 0.5 * (1 - 1e-6)


@pytest.mark.parametrize("positions", [100, 100_000])
def test_where_all_gradients_agree_the_bound_stays_below_the_numbers(positions: int) -> None:
    """The sum over positions grows as their number, that of independent errors as its root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(positions, 8)
    stash = hydra_ext.stash(hydra_ext.Compress(every=1), model=model, device="simulated")

    def loss() -> Tensor:
        return (model(x) - 3).square().mean()  # type: ignore[no-any-return]

    expected = gradients(model, loss)
    for step in range(4):
        found = gradients(model, loss, stash)
        error = (found[3] - expected[3]).norm() / expected[3].norm()
        assert (error == 0) if step == 0 else (error <= 0.02)
    hidden = torch.relu(model[0](x))
    most = math.sqrt(2 * 0.01) * hidden[hidden != 0].square().mean().sqrt().item()
    bound = stash.report().layers[1].bound
    assert bound == pytest.approx(most, rel=1e-3) if positions == 100_000 else bound < most


def test_an_input_that_becomes_small_is_not_lost() -> None:
    """Its bound follows it, also where nothing of it came back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    stash = hydra_ext.stash(hydra_ext.Compress(every=1), model=model, device="simulated")
    x = torch.randn(256, 64)
    found = []
    for scale in (1.0, 1.0, 1e-4, *[1e-4] * 40):
        with stash:
            loss = model(x * scale).square().sum()
        (gradient,) = torch.autograd.grad(loss, [model[0].weight])
        (wanted,) = torch.autograd.grad(model(x * scale).square().sum(), [model[0].weight])
        found.append(((gradient - wanted).norm() / wanted.norm()).item())
    assert found[2] > 0.5
    assert max(found[-5:]) < 0.03


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-6)


@pytest.mark.parametrize(("make", "shares"), [(sgd, [0.1, 0.19]), (adam, [0.1, 0.19])])
def test_errors_are_measured_by_the_momentum_where_there_is_one(
    make: Callable[[nn.Module], torch.optim.Optimizer], shares: list[float]
) -> None:
    """The same gradient each time: the momentum is a tenth of it after one step, and grows."""
    plain, found = rows([1.0] * 5), rows([1.0] * 5, optimizer=make)
    assert found[1].bound == pytest.approx(plain[1].bound, rel=1e-3)  # there is none before the first step
    assert found[2].bound == pytest.approx(max(0.5, shares[0]) * plain[2].bound, rel=0.01)  # clamped
    assert found[4].bound == pytest.approx(max(0.125, 0.271) * plain[4].bound, rel=0.02)
    assert found[4].gradient_error == pytest.approx(0.01 * found[4].bound / plain[4].bound, rel=1e-3)


def test_buffers_of_other_things_than_gradients_are_no_momentum() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.RMSprop([weight], momentum=0.9)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[weight]
    assert not list(momentum_over_gradient(optimizer, lambda _: True))


def test_momentum_is_a_mean_of_gradients() -> None:
    weight = nn.Parameter(torch.zeros(4))
    for make in (sgd, adam):
        optimizer = make(nn.ParameterList([weight]))
        gradients_of_steps = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        for gradient in gradients_of_steps:
            weight.grad = gradient.clone()
            optimizer.step()
        ((parameter, ratio),) = momentum_over_gradient(optimizer, lambda _: True)
        mean = sum((0.1 * 0.9 ** (5 - n) * gradient for n, gradient in enumerate(gradients_of_steps)), torch.zeros(4))
        if make is sgd:  # whose first buffer is the gradient itself
            mean += 0.9 * 0.9**5 * gradients_of_steps[0] - 0.9**6 * gradients_of_steps[0] + 0.0
        assert parameter is weight
        assert ratio == pytest.approx((mean.norm() / gradients_of_steps[-1].norm()).item(), rel=1e-4)


@pytest.mark.parametrize("native", [False, True])
def test_in_offload_layers_have_their_names_and_the_rest_of_the_gradients_is_exact(native: bool) -> None:
    def trained(policy: hydra_ext.Compress | None) -> tuple[list[Tensor], hydra_ext.Report, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64)) for _ in range(4)], nn.Linear(64, 8)
        )
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        kind = hydra_ext.optim.AdamW if native else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.0)  # so that all steps have the same gradients
        checks = hydra_ext.Checks(poison_hosts=True)
        with hydra_ext.offload(
            model, optimizer, budget="8MiB", device="simulated", activations=policy, checks=checks
        ) as run:
            for step in range(4):
                model(x).square().mean().backward()
                if step < 3:
                    optimizer.step()
                    optimizer.zero_grad()
            found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            report = run.report()
        return found, report, model

    expected, _, _ = trained(None)
    found, report, model = trained(hydra_ext.Compress(every=1))
    assert report.activations is not None
    names = {row.weight for row in report.activations.layers}
    assert names == {f"{block}.0.weight" for block in range(4)} | {"4.weight"}
    assert report.activations.compressed > 0
    for (name, _), one, other in zip(model.named_parameters(), found, expected, strict=True):
        if name in names - {"4.weight"}:  # whose input backward asks for at once
            assert 0 < (one - other).norm() <= 0.02 * other.norm()
        else:
            assert torch.equal(one, other)
    assert "4 of 5, whose inputs became" in str(report)
    assert str(report.activations.layers[-1]).startswith("4.weight: bound")
