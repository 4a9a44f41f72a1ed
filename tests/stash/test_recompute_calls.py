"""Calls that are made again in backward: the same numbers as without, or an error that says why not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import InvalidArgument, UnsupportedModel
from support.runtime.footprint import footprint
from support.runtime.leaving import beside
from support.stash.recomputed import X, compare, net, recomputing
from support.stash.stashed import assert_same, gradients


# ---- which modules --------------------------------------------------------------------------------------------------
def test_only_the_inputs_are_saved() -> None:
    model = net()
    stash = compare(model, lambda: model(X).square().sum(), "?", calls=3)
    assert stash.report().saved_bytes == 3 * X.nbytes  # what is squared afterwards stays, as do others of no module
    assert (stash.report().tensors, stash.report().kept) == (4, 1)


def test_of_modules_inside_each_other_the_outermost_is_called_again() -> None:
    model = net()
    outer = compare(model, lambda: model(X).square().sum(), "1", calls=1).report()
    for inner in model[1][0], model[1][2]:  # type: ignore[index]
        inner.calls.clear()
    policies = {"": hydra_ext.Offload(), "1": hydra_ext.Recompute(), "1.0": hydra_ext.Offload()}
    stash = hydra_ext.stash(policies | {"1.2": hydra_ext.Recompute()}, model=model, device="simulated")
    gradients(model, lambda: model(X).square().sum(), stash)
    assert stash.report().recomputed == 1
    assert stash.report().saved_bytes == outer.saved_bytes
    assert model[1][2].calls == [True, True]  # type: ignore[index,union-attr]


def test_the_root_can_be_called_again() -> None:
    model = net()
    stash = compare(model, lambda: model(X).square().sum(), "", calls=1)
    assert (stash.report().tensors, stash.report().kept) == (2, 2)  # X, and what is squared: in no module


def test_a_module_called_often_and_in_several_places() -> None:
    shared = net(1)
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared, nn.Linear(64, 64))})

    def loss() -> Tensor:
        h = model["first"](model["first"](X))
        return model["second"](h).square().sum()

    compare(model, loss, "first", calls=3)


def test_without_names_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="name modules"):
        hydra_ext.stash(hydra_ext.Recompute(), model=nn.Linear(2, 2), device="simulated")
    with pytest.raises(InvalidArgument, match="name modules"):
        hydra_ext.offload(nn.Linear(2, 2), budget="1MiB", activations=hydra_ext.Recompute())


def test_scripted_modules_are_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedModel, match="scripted"):
        hydra_ext.stash({"0": hydra_ext.Recompute()}, model=model, device="simulated")


def test_a_forward_that_goes_backward_through_itself_is_refused() -> None:
    class Gradient(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).tanh()
            return y + torch.autograd.grad(y.sum(), self.weight, create_graph=True)[0]

    model = nn.Sequential(Gradient(8, 8))
    stash = hydra_ext.stash({"0": hydra_ext.Recompute()}, model=model, device="simulated")
    with stash, pytest.raises(UnsupportedModel, match="goes backward through itself before it has ended"):
        model(torch.randn(8, 8))


# ---- what is as it was ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("eager_exit", [True, False])
def test_the_model_is_as_before_after_the_context(eager_exit: bool) -> None:
    model = net()
    before = footprint(model)
    stash = recomputing(model, "?")
    with stash:
        assert footprint(model) != before
        loss = model(X).sum()
        if not eager_exit:
            loss.backward()
    model.zero_grad()
    assert footprint(model) == before
    if eager_exit:
        loss.backward()
    assert stash.report().recomputed == 3


def test_stashes_on_two_threads_that_end_in_another_order() -> None:
    model = net()
    before = footprint(model)
    expected = gradients(model, lambda: model(X).square().sum())
    one, other = recomputing(model, "?"), recomputing(model, "?")
    entered, leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with one:
            entered.set()
            leave.wait()

    for _ in range(2):
        with beside(stay_inside, until=leave) as thread:
            entered.wait()
            with other:
                leave.set()
                thread.join()
                assert_same(gradients(model, lambda: model(X).square().sum()), expected)
        assert footprint(model) == before
        entered.clear()
        leave.clear()
    assert (one.report().recomputed, other.report().recomputed) == (0, 6)


def test_without_gradients_nothing_is_done() -> None:
    model = net()
    stash = recomputing(model, "?")
    with stash, torch.no_grad():
        model(X)
    with stash, torch.inference_mode():
        model(X)
    assert stash.report().tensors == 0
    assert model[0][0].calls == [False, False]  # type: ignore[index,union-attr]


def test_evaluation_mode_between_forward_and_backward_changes_nothing() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Tanh()))

    def step(stash: hydra_ext.stash | None) -> list[Tensor]:
        model.train()

        def loss() -> Tensor:
            result = model(X).square().sum()
            model.eval()
            return result

        return [*gradients(model, loss, stash), *(buffer.clone() for buffer in model.buffers())]

    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = step(None)
    model.load_state_dict(start)
    assert_same(step(recomputing(model, "0")), expected)
    assert not model.training


def test_batch_statistics_are_counted_once() -> None:
    """Over three steps, of a module that is called twice in each."""

    def steps(inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Tanh()))
        stash = recomputing(model, "0") if inside else None
        found: list[Tensor] = []
        for x in X, X + 1, X * 2:
            found += gradients(model, lambda: model(model(x)).square().sum(), stash)  # noqa: B023
            found += [buffer.clone() for buffer in model.buffers()]
        assert stash is None or stash.report().recomputed == 6
        return found

    assert_same(steps(True), steps(False))


class Stateful(nn.Module):
    """Its result depends on what earlier calls have left: in a buffer that is replaced, a number, and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))
        self.mean: Tensor
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x * self.calls) - self.mean
        if self.last is not None:
            y = y + self.last
        self.mean = self.mean * 0.5 + y.detach().mean(0)
        self.last = y.detach() * 0.1
        return y.tanh()


def test_what_calls_leave_on_the_module() -> None:
    def run(inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Stateful())
        stash = recomputing(model, "0")
        found: list[Tensor] = []
        for _ in range(3):
            loss = lambda: model(model(X)).square().sum()  # noqa: E731
            found += gradients(model, loss, stash if inside else None)
        assert stash.report().recomputed == 6 * inside
        own: Any = model[0]
        return [*found, own.mean, own.last, torch.tensor(own.calls)]

    assert_same(run(True), run(False))


class Cached(nn.Module):
    """Appends to a list that is handed to it, and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, *, cache: dict[str, list[Tensor]]) -> Tensor:
        cache["seen"].append(x)
        return self.linear(torch.stack(cache["seen"]).sum(0)).sin()


def test_containers_among_the_arguments() -> None:
    model = nn.ModuleList(Cached() for _ in range(3))

    def loss() -> Tensor:
        cache: dict[str, list[Tensor]] = {"seen": []}
        h = X
        for layer in model:
            h = layer(h, cache=cache)
        assert len(cache["seen"]) == 3
        return h.sum()

    compare(model, loss, "?", calls=3)


class Alike(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * 2 if query is key else query * 3).sin()


def test_a_tensor_given_twice_is_one_tensor_again() -> None:
    model = nn.ModuleList([Alike()])
    x = X.clone().requires_grad_()

    def loss() -> Tensor:
        return model[0](x, x).sum()

    (expected,) = torch.autograd.grad(loss(), [x])
    with recomputing(model, "0"):
        (found,) = torch.autograd.grad(loss(), [x])
    assert torch.equal(found, expected)


class Hooking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)
        return x.sin()


def test_hooks_on_inputs_run_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Hooking())
    compare(model, lambda: model(X).sum(), "1", calls=1)


@pytest.mark.parametrize("norm", ["weight", "spectral"])
def test_weights_that_hooks_make(norm: str) -> None:
    """Before each call, from numbers that a call changes."""
    made = {"weight": torch.nn.utils.weight_norm, "spectral": torch.nn.utils.spectral_norm}[norm]
    model = nn.Sequential(nn.Sequential(made(nn.Linear(64, 64)), nn.Tanh()))
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def loss() -> Tensor:
        model.load_state_dict(start)
        return model(model(X)).square().sum()

    expected = gradients(model, loss)
    stash = recomputing(model, "0", "0.0")
    assert_same(gradients(model, loss, stash), expected)
    assert stash.report().recomputed == 2


def test_autocast() -> None:
    model = net()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(X).float().square().sum()

    compare(model, loss, "?", calls=3)


def test_a_compiled_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64))
    expected = gradients(model, lambda: model(X).square().sum())
    model[0].compile(backend="aot_eager")
    before = footprint(model)
    stash = recomputing(model, "0")
    assert_same(gradients(model, lambda: model(X).square().sum(), stash), expected)
    assert stash.report().recomputed == 1
    assert footprint(model) == before
