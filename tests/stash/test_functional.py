"""Transforms of torch.func inside a forward whose saved tensors go to a stash: the gradients of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import hydra_ext
from hydra_ext.activations.recompute import Count, RecomputedModule
from hydra_ext.runtime.rounds import fibers

WIDTH = 64


def _energy(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda x: torch.func.grad(_energy)(x),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "jacrev": lambda x: torch.func.jacrev(_energy)(x),
    "hessian": lambda x: torch.func.hessian(_energy)(x[0]).sum() * x,
    "grads of samples": lambda x: torch.func.vmap(torch.func.grad(_energy))(x),
}


class Transformed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.transform = TRANSFORMS[name]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).tanh()
        return torch.tanh(hidden * self.transform(hidden))


def make(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Transformed(name) for _ in range(3)])


X = torch.linspace(-1, 1, 32 * WIDTH).view(32, WIDTH)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == 6
    return found


def expected(name: str) -> list[Tensor]:
    model = make(name)
    model(X).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_in_a_stash_gradients_are_those_of_plain_pytorch(name: str) -> None:
    model = make(name)
    stash = hydra_ext.stash(hydra_ext.Offload(), model=model)
    with stash:
        loss = model(X).square().mean()
    loss.backward()
    assert all(map(torch.equal, gradients(model), expected(name)))
    assert stash.report().to_host_bytes > 0


@pytest.mark.parametrize("name", TRANSFORMS)
def test_with_the_automatic_fit_too(name: str) -> None:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget="1MiB") as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
        report = run.report()
    assert all(map(torch.equal, gradients(model), expected(name)))
    assert report.activations is not None
    assert report.activations.saved_bytes > 0


def test_a_module_with_a_transform_is_not_recomputed_by_a_plan() -> None:
    model = make("grad")
    stash = hydra_ext.stash(hydra_ext.Offload(), model=model)
    again = Count()
    calls = [
        RecomputedModule(
            stash._saving._core, part, lambda _: None if fibers.current() else _nothing(), again, tried_on=X.device
        )
        for part in model
    ]
    for call in calls:
        call.install()
    for _ in range(2):
        model.zero_grad()
        with stash:
            loss = model(X).square().mean()
        loss.backward()
    for call in calls:
        call.remove()
    assert all(call.deviated for call in calls)
    assert again.value == 0
    assert all(map(torch.equal, gradients(model), expected("grad")))


def _nothing() -> torch.enable_grad:
    return torch.enable_grad()


def test_hooks_of_others_are_refused_as_without_a_stash() -> None:
    model = make("grad")
    stash = hydra_ext.stash(hydra_ext.Offload(), model=model)
    with saved_tensors_hooks(lambda x: x, lambda x: x), stash, pytest.raises(RuntimeError, match="saved tensor hooks"):
        model(X)


def test_nothing_of_torch_is_replaced_afterwards() -> None:
    before = torch.autograd.graph.disable_saved_tensors_hooks
    with hydra_ext.stash():
        assert torch.autograd.graph.disable_saved_tensors_hooks is not before
    assert torch.autograd.graph.disable_saved_tensors_hooks is before
