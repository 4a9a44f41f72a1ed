"""Compressed saved tensors where several stashes, threads, graphs or hooks meet."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hydra_ext
from support.stash.stashed import assert_same, gradients

LOSSY = hydra_ext.Compress(error=1e3)


def stash_of(policy: object, **options: object) -> hydra_ext.stash:
    return hydra_ext.stash(policy, device="simulated", **options)  # type: ignore[arg-type]


def net(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.ReLU())])


X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


# ---- several stashes ------------------------------------------------------------------------------------------------
def test_a_stash_does_not_follow_another_one_s_policies() -> None:
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    lossy, exact = stash_of({"*": LOSSY}, model=model), stash_of(hydra_ext.Offload(), model=model)
    with lossy:
        found = gradients(model, lambda: model(X).square().sum(), exact)
    assert_same(found, expected)
    assert exact.report().compressed == lossy.report().tensors == 0
    with stash_of({"*": hydra_ext.Keep()}, model=model):
        gradients(model, lambda: model(X).square().sum(), lossy)
    assert lossy.report().compressed > 3


def test_nor_does_one_on_another_thread() -> None:
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    lossy, exact = stash_of({"*": LOSSY}, model=model), stash_of(hydra_ext.Offload(), model=model)
    found: list[Tensor] = []
    with lossy:  # its hooks are on the modules, for all threads
        thread = threading.Thread(target=lambda: found.extend(gradients(model, lambda: model(X).square().sum(), exact)))
        thread.start()
        thread.join()
    assert_same(found, expected)


def test_parts_are_those_of_the_stash_s_own_model() -> None:
    model = net()
    with stash_of(hydra_ext.Offload(), model=model), stash_of(hydra_ext.Offload()) as inner:
        model(X).sum().backward()
    assert [part.name for part in inner.report().parts] == [""]


@pytest.mark.parametrize("outer", [LOSSY, hydra_ext.Offload()], ids=["compress", "offload"])
def test_a_hook_that_fails_ahead_of_ours_changes_nothing_for_what_comes_then(outer: object) -> None:
    """torch calls what is to be called always, also where the begin never was."""
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    policies = {"": outer, "2": hydra_ext.Keep()}
    stash = stash_of(policies, model=model)
    failing = [True]

    def fail(_module: nn.Module, _args: object) -> None:
        if failing[0]:
            raise ValueError("asked for")

    def loss() -> Tensor:
        failing[0] = True
        with pytest.raises(ValueError, match="asked for"):
            model[2](X)
        failing[0] = False
        return model(X).square().sum()  # type: ignore[no-any-return]

    with stash:  # so that our hooks are there, and this one comes before them
        handle = model[2].register_forward_pre_hook(fail, prepend=True)
        result = loss()
    found = [result.detach(), *torch.autograd.grad(result, list(model.parameters()))]
    handle.remove()
    if outer is LOSSY:
        assert stash.report().compressed > 0
        expected, found = expected[2::2], found[2::2]  # of biases
    assert_same(found, expected)


# ---- several threads ------------------------------------------------------------------------------------------------
def test_threads_of_one_stash_get_back_what_they_saved() -> None:
    """With so little room that each makes room of what the others are about to compress."""
    steps, wrong = 12, []
    stash = stash_of(LOSSY, budget=200_000)

    def train(seed: int) -> None:
        pool, weight = nn.MaxPool2d(2), nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        x = torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(seed))

        def loss(leaf: Tensor) -> Tensor:
            hidden = torch.relu(torch.conv2d(leaf * 1, weight, padding=1))
            return pool(torch.conv2d(pool(hidden), weight, padding=1)).sin().sum()  # type: ignore[no-any-return]

        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf), [leaf])
        for _ in range(steps):
            with stash:
                result = loss(leaf)
            (found,) = torch.autograd.grad(result, [leaf])
            if not torch.equal(found, expected):
                wrong.append(seed)

    threads = [threading.Thread(target=train, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert stash.report().compressed > 3 * steps


# ---- what is a weight -----------------------------------------------------------------------------------------------
def embedded(dtype: torch.dtype | None) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    if dtype is None:
        parametrizations.weight_norm(layers[1])
    return layers, torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["autocast", "weight norm"])
def test_what_a_layer_takes_in_first_is_no_weight(dtype: torch.dtype | None) -> None:
    """An embedding is made of one parameter, too; the layer's own weight is not its input."""
    model, tokens = embedded(dtype)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            return model(tokens).float().square().sum()  # type: ignore[no-any-return]

    names = [name for name, _ in model.named_parameters()]
    expected, stash = gradients(model, loss), stash_of(LOSSY, model=model)
    found = gradients(model, loss, stash)
    inexact = {"1.weight", "3.weight"}
    for name, one, other in zip(names, found[1:], expected[1:], strict=True):
        assert name in inexact or torch.equal(one, other), name
    assert stash.report().compressed > 0


def test_a_factor_of_the_product_makes_it_exact() -> None:
    weight, bias = nn.Parameter(torch.randn(64, 64)), torch.zeros(64)
    stash = stash_of(LOSSY)
    with stash:
        loss = torch.addmm(bias, (X * 1).sin(), weight, alpha=10.0).sum()
        (X.clone().requires_grad_() * 1).sin()
    loss.backward()
    assert torch.equal(weight.grad, 10.0 * (X.sin().t() @ torch.ones(64, 64)))  # type: ignore[arg-type]
    assert stash.report().compressed == 0


# ---- measurements ---------------------------------------------------------------------------------------------------
def test_a_forward_is_measured_once_however_often_its_graph_is_walked() -> None:
    model = net()
    stash = stash_of(hydra_ext.Compress(), model=model)
    with stash:
        loss = model(X).square().sum()
    for _ in range(5):
        loss.backward(retain_graph=True)
    with stash:
        model(X)
    assert [layer.samples for layer in stash.report().layers] == [1] * 4


def test_batches_of_gradients_are_not_measured() -> None:
    model = net()
    stash = stash_of(hydra_ext.Compress(), model=model)
    rows = torch.eye(64)[:4]
    with stash:
        result = model(X)[0]
    found = torch.autograd.grad(result, list(model.parameters()), rows, is_grads_batched=True)
    result = model(X)[0]
    assert_same(list(found), list(torch.autograd.grad(result, list(model.parameters()), rows, is_grads_batched=True)))
    with stash:
        model(X).sum().backward()
    assert [layer.samples for layer in stash.report().layers] == [0] * 4


def test_an_optimizer_with_sparse_gradients_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64, sparse=True), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stash = stash_of(hydra_ext.Compress(every=1), model=model, optimizer=optimizer)
    tokens = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        with stash:
            loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stash.report().compressed > 0
