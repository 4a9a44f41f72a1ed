"""Compressed saved tensors: errors stay within their bound, and reach the gradients of layers' weights alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import hydra_ext
from hydra_ext import _C, codec
from support.models.zoo import FAMILIES, Family
from support.stash.stashed import assert_empty, assert_same, gradients

# Whose weight is a matrix that inputs are multiplied with.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, Conv1D)
CPU = "simulated"


def compressing(error: float = 0.05, **options: object) -> hydra_ext.stash:
    return hydra_ext.stash(hydra_ext.Compress(error=error), device=CPU, **options)  # type: ignore[arg-type]


def layer_weights(model: nn.Module) -> set[nn.Parameter]:
    return {module.weight for module in model.modules() if isinstance(module, LAYERS)}  # type: ignore[misc]


def save_others() -> None:
    """So that what was saved before is compressed."""
    for _ in range(3):
        (torch.ones(1024, requires_grad=True) * 1).sin()


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 64, 32),
        nn.GELU(),
        nn.Linear(32, 32, bias=False),
    )


def picture(seed: int = 1) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


# ---- what errors reach ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [None, 40_000, 2**30])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_only_weights_of_layers_have_other_gradients(family: Family, budget: int | None) -> None:
    model = family.make(seed=1)
    stash = compressing(0.005, model=model, budget=budget)
    for batch in family.batches(seed=2, count=2):
        expected = gradients(model, lambda: family.loss(model, batch))  # noqa: B023 - called at once
        found = gradients(model, lambda: family.loss(model, batch), stash)  # noqa: B023
        assert torch.equal(found[0], expected[0])
        inexact = {layer.weight for layer in stash.report().layers}
        for (name, parameter), one, other in zip(model.named_parameters(), found[1:], expected[1:], strict=True):
            if name in inexact:
                assert parameter.dim() >= 2
                assert (one - other).norm() <= 0.3 * other.norm()
            else:
                assert torch.equal(one, other)
        assert_empty(stash.report())
    report = stash.report()
    assert report.compressed > 0
    assert report.stream_bytes < report.compressed_bytes / 2
    if budget != 2**30:  # else nothing has to, from the second step on
        assert len(report.layers) == len({layer.weight for layer in report.layers}) > 3
        assert report.exact  # attention, norms
    assert report.to_host_bytes < report.saved_bytes


def test_a_weight_s_gradient_is_that_of_what_came_back() -> None:
    x, bound = picture().requires_grad_(), 0.05
    weight = nn.Parameter(torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(3)))
    with compressing(bound):
        hidden = x * 1  # not the leaf, which stays
        before = hidden.detach().clone()
        y = F.conv2d(hidden, weight, stride=2, padding=1)
        node = y.grad_fn
        save_others()
        del hidden
    came_back = node._saved_input  # type: ignore[union-attr]
    assert 0 < (came_back - before).abs().max() <= bound
    output_gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    (found,) = torch.autograd.grad(y, weight, output_gradient)
    expected = torch.nn.grad.conv2d_weight(came_back, weight.shape, output_gradient, stride=2, padding=1)
    torch.testing.assert_close(found, expected)


def test_no_error_is_too_large_for_everything_but_weights() -> None:
    """A ReLU's mask, a pool's choice, a norm's input, and what flows back through weights are exact."""
    model, x = net(), picture().requires_grad_()
    parameters = [x, *(parameter for parameter in model.parameters() if parameter not in layer_weights(model))]

    def found(stash: hydra_ext.stash | None) -> list[Tensor]:
        if stash is None:
            return list(torch.autograd.grad(model(x).square().sum(), parameters))
        with stash:
            loss = model(x).square().sum()
        return list(torch.autograd.grad(loss, parameters))

    stash = compressing(1e6)
    assert_same(found(stash), found(None))
    assert stash.report().compressed >= 4


def test_a_frozen_weight_saves_no_input_and_a_product_of_activations_is_exact() -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))

    def found(stash: hydra_ext.stash | None) -> list[Tensor]:
        def forward() -> Tensor:
            hidden = (x @ weight).tanh()
            return (hidden @ hidden.t()).sin().sum()

        if stash is None:
            return list(torch.autograd.grad(forward(), [x]))
        with stash:
            loss = forward()
        return list(torch.autograd.grad(loss, [x]))

    stash = compressing(1.0)
    assert_same(found(stash), found(None))
    assert stash.report().compressed == 0
    assert {exact.operator for exact in stash.report().exact} >= {"aten::mm"}


@pytest.mark.every_case
@pytest.mark.parametrize("first", ["layer", "other"])
@pytest.mark.parametrize("between", [0, 4])
def test_who_needs_it_exactly_has_it_exactly(first: str, between: int) -> None:
    """Before the layer has saved the same tensor or after it, before that is compressed or after it."""
    weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    leaf = torch.randn(64, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)

    def loss() -> Tensor:
        hidden = leaf * 1

        def others() -> Tensor:
            return sum(((leaf * 1).sin().sum() for _ in range(between)), torch.zeros(()))

        if first == "layer":
            return (hidden @ weight).sum() + others() + hidden.sin().sum()
        return hidden.sin().sum() + others() + (hidden @ weight).sum()

    (expected,) = torch.autograd.grad(loss(), [leaf])
    stash = compressing(10.0)
    with stash:
        result = loss()
    assert torch.equal(torch.autograd.grad(result, [leaf])[0], expected)
    assert stash.report().compressed == (1 if first == "layer" and between else 0)


def test_a_function_of_users_gets_what_it_saved() -> None:
    """Also inside a layer's place: what it does with it is not known."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
            return gradients[0] @ weight.t() + x.sin(), x.t() @ gradients[0]

    weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    leaf = torch.randn(64, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    expected = torch.autograd.grad(Product.apply(leaf * 1, weight).sum(), [leaf, weight])
    stash = compressing(10.0)
    with stash:
        loss = Product.apply(leaf * 1, weight).sum()
    assert_same(list(torch.autograd.grad(loss, [leaf, weight])), list(expected))
    assert stash.report().compressed == 0


# ---- how -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_s_copies_of_weights_are_exact(dtype: torch.dtype) -> None:
    model, x = net(), picture()
    fixed = [parameter for parameter in model.parameters() if parameter not in layer_weights(model)]

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x).float().square().mean()

    expected = torch.autograd.grad(loss(), fixed)
    stash = compressing(0.5)
    with stash:
        result = loss()
    assert_same(list(torch.autograd.grad(result, fixed)), list(expected))
    assert stash.report().compressed >= 5
    assert [layer.saved_bytes > 0 for layer in stash.report().layers].count(True) >= 3


def test_graphs_that_are_kept_give_the_same_again_and_dropped_ones_go() -> None:
    model, x = net(), picture()
    stash = compressing(0.1, model=model)
    with stash:
        loss = model(x).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert_same(list(first), list(second))
    assert stash.report().host_bytes > 0
    del loss
    assert_empty(stash.report())


def test_gradients_of_gradients_are_near() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1, bias=False)
    )
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    expected = torch.autograd.grad(penalty(), list(model.parameters()))
    stash = compressing(1e-3, model=model)
    with stash:
        loss = penalty()
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)
    assert stash.report().compressed > 0


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 1}, {"dilation": 2, "ceil_mode": True}])
@pytest.mark.parametrize("channels_last", [False, True])
def test_indices_of_pools_take_a_few_bits(options: dict[str, int], channels_last: bool) -> None:
    x = torch.randn(3, 5, 19, 23, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()
    pool = nn.MaxPool2d(3, **options)  # type: ignore[arg-type]
    expected = torch.autograd.grad(pool(x * 1).sin().sum(), [x])
    stash = compressing()
    with stash:
        y = pool(x * 1)
        save_others()
        loss = y.sin().sum()
    assert_same(list(torch.autograd.grad(loss, [x])), list(expected))
    report = stash.report()
    indices = 8 * y.numel()
    assert report.compressed == 2
    assert indices / 16 <= report.stream_bytes <= indices / 16 + x.nbytes / 64 + 512


def test_what_is_compressed_stays_while_there_is_room() -> None:
    model, x = net(), picture()
    plain = hydra_ext.stash(hydra_ext.Offload(), model=model, device=CPU)
    gradients(model, lambda: model(x).square().sum(), plain)
    saved = plain.report().saved_bytes
    stash = compressing(0.5, model=model, budget=saved * 3 // 4)
    for _ in range(3):
        gradients(model, lambda: model(x).square().sum(), stash)
    before = stash.report()
    gradients(model, lambda: model(x).square().sum(), stash)
    after = stash.report()
    assert after.compressed - before.compressed >= 4
    assert after.to_host_bytes == before.to_host_bytes
    assert after.peak_held_bytes <= saved


def test_less_is_on_the_device_with_the_codec_than_without() -> None:
    """By the bytes of all tensors there are, its own memory to work in included."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())])
    x = torch.randn(8, 8, 24, 24)

    def peak(stash: hydra_ext.stash) -> int:
        gradients(model, lambda: model(x).square().sum(), stash)
        charged = _C.Charged(2**40)
        try:
            with charged:
                gradients(model, lambda: model(x).square().sum(), stash)
            return charged.ledger.peak
        finally:
            stash.report()

    budget = 2**19
    without = peak(hydra_ext.stash(hydra_ext.Keep(), model=model, device=CPU))
    with_codec = peak(compressing(0.1, model=model, budget=budget))
    assert with_codec < without / 2


def test_a_stream_is_what_the_codec_makes() -> None:
    x = torch.relu(torch.randn(64, 640, generator=torch.Generator().manual_seed(0)))
    weight = nn.Parameter(torch.ones(640, 8))
    stash = compressing(0.01)
    with stash:
        y = x @ weight
        save_others()
    stored = codec.compress(x, error_bound=0.01)
    del x
    assert stash.report().stream_bytes == stored.nbytes
    y.sum().backward()
    assert torch.equal(weight.grad, codec.decompress(stored).t() @ torch.ones(64, 8))  # type: ignore[arg-type]


def test_modules_have_policies_of_their_own() -> None:
    """A request for less error is met, also of what others have saved before."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    names = ("coarse", "fine", "exact")
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})
    model["others"] = nn.Sequential(*[nn.Sigmoid() for _ in range(4)])
    policies = {"coarse": hydra_ext.Compress(error=0.5), "fine": hydra_ext.Compress(error=1e-3)}
    offloaded = {"exact": hydra_ext.Offload(), "others": hydra_ext.Offload()}
    stash = hydra_ext.stash({**policies, **offloaded}, model=model, device=CPU)
    others = torch.randn(64, 64, requires_grad=True)
    with stash:
        hidden = x * 1
        results = []
        for name in names:
            results.append(model[name](hidden))
            model["others"](others)
        del hidden
    errors = {}
    for name, result in zip(names, results, strict=True):
        result.sum().backward()
        weight = model[name].weight
        errors[name] = (weight.grad - torch.ones(64, 64) @ x).abs().max().item()  # type: ignore[operator]
    assert errors["coarse"] > 64e-3 >= errors["fine"] > errors["exact"] - 1e-5
    assert errors["exact"] < 1e-5


@pytest.mark.every_case
@pytest.mark.parametrize("wrong", [{"error": 0}, {"error": "small"}, {"fraction": 1.5}, {"every": 0}, {"error": True}])
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(hydra_ext.errors.InvalidArgument, match=next(iter(wrong))):
        hydra_ext.Compress(**wrong)  # type: ignore[arg-type]
