"""Every other operation of a convolutional network in strips, next to the same at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import hydra_ext
from hydra_ext import tiled
from hydra_ext.errors import UnsupportedOperation
from support.strips import assert_close, assert_equal, in_strips, outcome

HEIGHT, WIDTH = 61, 23


def maps(count: int = 1, *, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, 3, HEIGHT, WIDTH, generator=generator, dtype=dtype) for _ in range(count)]


def in_place(x: torch.Tensor) -> torch.Tensor:
    return F.relu((x * 2).add_(1), inplace=True)


def dropped(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return F.dropout(x, 0.4) + F.dropout2d(x, 0.4)


SAME_BITS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "relu": (1, F.relu),
    "in place": (1, in_place),
    "sum and product": (2, lambda x, y: x * y + 0.5 * x - y),
    "by a channel": (2, lambda x, y: x * y[:, :, :1, :1] + y[0, :, :1, :1]),
    "by a column": (2, lambda x, y: x / y[:1, :1, :1, :]),
    "activations": (1, lambda x: F.leaky_relu(x, 0.1) + F.hardtanh(x) + F.hardswish(x) + F.hardsigmoid(x)),
    "chosen": (2, lambda x, y: torch.where(x > y, x, y) + x.clamp(min=-0.5) + torch.maximum(x, y)),
    "concatenated": (2, lambda x, y: torch.cat([x, y], dim=1) * 2),
    "cropped": (2, lambda x, y: x[:, :, 2:-3, 1:] * y[:, :, :-5, :-1]),
    "padded": (1, lambda x: F.pad(x, (1, 2, 3, 4)) + F.pad(x, (1, 2, 3, 4), mode="reflect")),
    "dropout": (1, dropped),
    "max pooling": (1, lambda x: F.max_pool2d(x, 3, stride=2, padding=1)),
    "average pooling": (1, lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)),
    "nearest": (1, lambda x: F.interpolate(x, scale_factor=3)),
    "bilinear": (1, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "bilinear by four": (1, lambda x: F.interpolate(x, size=(4 * HEIGHT, 50), mode="bilinear")),
    "shuffled": (1, lambda x: F.pixel_unshuffle(x[:, :, :60, :20], 2) * 2),
    "a flat view": (1, lambda x: (x.flatten(1) * 2).view_as(x) * 2),
    "no batch": (1, lambda x: F.relu(x[0] * 2)),
}


@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.parametrize("name", SAME_BITS)
def test_bits_of_the_whole_map(name: str, rows: int) -> None:
    count, function = SAME_BITS[name]
    tensors = maps(count)
    assert_equal(in_strips(function, tensors, rows=rows), outcome(function, tensors))


FLAT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an image in one row": lambda x: F.relu(x.flatten(1) * 2) + 1,
    "an image in one column": lambda x: (x.reshape(-1, 1) * 2).view(x.shape[0], -1),
    "channels in rows": lambda x: x.flatten(2) * x.flatten(2)[:, :1],
    "rows one after the other": lambda x: (x.flatten(2).unsqueeze(2) * 2).add_(x[:, :, :1, :1]),
    "curved": lambda x: torch.tanh(x.flatten(1)),
    "without a batch": lambda x: x.flatten() * 2,
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FLAT)
def test_maps_that_were_flattened_are_cut_elsewhere(name: str, batch: int) -> None:
    source = torch.randn(batch, 3, 256, 64, generator=torch.Generator().manual_seed(12))
    expected = outcome(FLAT[name], [source])
    made = in_strips(FLAT[name], [source], rows=100, budget="64KiB")  # a channel has as many
    assert_equal(made, expected)


def test_other_operations_on_a_flat_map_are_named() -> None:
    weight = torch.randn(3 * 256 * 64, 2)
    with (
        tiled.strips(budget="64KiB", device="simulated"),
        pytest.raises(UnsupportedOperation, match=r"aten\.mm\.default on a map of shape \(1, 49152\)"),
    ):
        torch.randn(1, 3, 256, 64).flatten(1) @ weight


# torch's vectors and what is left over at their end differ in the last bit of exp and its kin.
CURVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transcendental": lambda x: torch.tanh(x) + torch.sigmoid(x) * F.silu(x) + F.gelu(x) + F.softplus(x),
    "activations": lambda x: F.elu(x) + F.mish(x) + F.selu(x) + F.celu(x) + F.logsigmoid(x),
    "softmax": lambda x: F.softmax(x, dim=1) + F.log_softmax(x, dim=1),
    "softmax along a row": lambda x: F.softmax(x, dim=3) * F.log_softmax(x, dim=-1),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", CURVED)
def test_functions_differ_by_the_last_bit_at_most_at_the_ends_of_strips(name: str) -> None:
    made, plain = in_strips(CURVED[name], maps(), rows=7), outcome(CURVED[name], maps())
    for one, other in zip([made.value, *made.gradients], [plain.value, *plain.gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-20, atol=2.0**-22)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CURVED)
def test_functions_have_the_same_bits_in_strips_of_whole_vectors(name: str) -> None:
    source = torch.randn(1, 3, 211, 11, generator=torch.Generator().manual_seed(8))
    assert_equal(in_strips(CURVED[name], [source], rows=70), outcome(CURVED[name], [source]))


def classes() -> torch.Tensor:
    return torch.randint(0, 3, (2, HEIGHT, WIDTH), generator=torch.Generator().manual_seed(6))


# The loss has the bits of the whole map; some gradients are divided by the number of elements a step earlier.
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "weighted cross entropy": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor(3.0)),
    "cross entropy of probabilities": lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y.detach())),
    "squares": lambda x, y: F.mse_loss(x, y),
    "sum of squares": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "squares of each": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "absolute": lambda x, y: F.l1_loss(x, y),
    "smooth": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5) + F.huber_loss(x, y),
    "classes": lambda x, y: F.cross_entropy(x, classes()) + 0 * y.sum(),
    "classes with labels smoothed": lambda x, y: F.cross_entropy(x, classes(), label_smoothing=0.1) + 0 * y.sum(),
    "by hand": lambda x, y: ((x - y).square() * torch.sigmoid(x)).mean() + x.abs().sum() / y.numel(),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    function, tensors = LOSSES[name], maps(2)
    # 32 rows are whole vectors here: exp and its kin have the same bits.
    made, plain = in_strips(function, tensors, rows=32), outcome(function, tensors)
    assert torch.equal(made.value, plain.value)
    for one, other in zip(made.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.every_case
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation(training: bool, affine: bool) -> None:
    def run(dtype: torch.dtype, rows: int | None) -> tuple[torch.Tensor, ...]:
        norm = nn.BatchNorm2d(3, affine=affine).to(dtype).train(training)
        source = maps(dtype=dtype)[0] * 3 + 100
        norm.running_mean.copy_(torch.tensor([100.0, 99.0, 101.0]))
        norm.running_var.copy_(torch.tensor([9.0, 4.0, 16.0]))
        function = norm if rows is None else lambda x: norm(x)
        made = outcome(function, [source]) if rows is None else in_strips(function, [source], rows=rows)
        numbers = [made.value, *made.gradients, *(parameter.grad for parameter in norm.parameters())]
        return (*numbers, norm.running_mean, norm.running_var, norm.num_batches_tracked)

    exact, double, plain, made = (
        run(torch.float64, None),
        run(torch.float64, 7),
        run(torch.float32, None),
        run(torch.float32, 7),
    )
    for one, other in zip(double, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other, truth in zip(made, plain, exact, strict=True):
        rounding = 2.0**-23 * truth.double().abs().max()
        assert (one.double() - truth).abs().max() <= 2 * (other.double() - truth).abs().max() + rounding


def test_statistics_far_from_zero() -> None:
    # Of an image of bytes they are merged over strips, as on a GPU. Squares of 1e8 leave nothing of a variance of 1.
    pixels = torch.randint(0, 256, (1, 2, 400, 30), dtype=torch.uint8)
    norm = nn.BatchNorm2d(2, momentum=1.0).double()
    with tiled.strips(budget="1GiB", rows=13, device="simulated"):
        made = norm(tiled.image(pixels, mean=(-3e7,), std=(0.3,), dtype=torch.float64))
    numbers = pixels.double() / 255 / 0.3
    torch.testing.assert_close(norm.running_var, numbers.var((0, 2, 3)), rtol=1e-8, atol=0)
    torch.testing.assert_close(norm.running_mean, numbers.mean((0, 2, 3)) + 1e8, rtol=1e-15, atol=0)
    assert made.mean().abs() < 1e-7
    assert 0.99 < made.var() < 1.01


def test_a_stash_that_compresses_may_be_inside() -> None:
    """It looks at the norms and zeros of the maps that it keeps; from the second step on it compresses them."""
    source = torch.rand(1, 3, 64, 40, generator=torch.Generator().manual_seed(10))

    def losses(rows: int) -> list[float]:
        torch.manual_seed(11)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kept = hydra_ext.stash(hydra_ext.Compress(), model=model, optimizer=optimizer, device="simulated")
        found = []
        for _ in range(3):
            with tiled.strips(budget="1GiB", rows=rows, device="simulated") as run:
                with kept:
                    loss = model(source).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        assert (run.report().strips > run.report().operations) == (rows < 64)
        assert any(layer.ratio > 1.5 for layer in kept.report().layers), "nothing was compressed"
        return found

    made, at_once = losses(16), losses(64)
    assert made[0] == at_once[0]
    assert made == pytest.approx(at_once, rel=1e-3)


def test_copies_and_comparisons_are_made_on_the_host() -> None:
    source = maps()[0].to(memory_format=torch.channels_last)
    with tiled.strips(budget="1GiB", rows=7, device="simulated") as run:
        copied = source.clone()
        assert torch.equal(copied, source)
        copied[0, 0, -1, -1] += 1
        assert not torch.equal(copied, source)
    assert copied.stride() == source.stride()
    assert run.report().operations == 0


STEPS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "one by one": lambda weights: torch.optim.AdamW(weights, foreach=False),
    "lists": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "fused Adam": lambda weights: torch.optim.Adam(weights, fused=True),
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, fused=True),
    "fused SGD": lambda weights: torch.optim.SGD(weights, momentum=0.9, fused=True),
    "fused Adagrad": lambda weights: torch.optim.Adagrad(weights, fused=True),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", STEPS)
def test_optimizers_of_weights_higher_than_a_strip(kind: str) -> None:
    def trained(rows: int) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 2 * 3 * 7 * 7).view(2, 3, 7, 7).requires_grad_()
        with tiled.strips(budget="1GiB", rows=rows, device="simulated"):
            optimizer = STEPS[kind]([weight])
            for step in range(2):
                weight.grad = torch.full((2, 3, 7, 7), step + 0.5)
                torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=True)
                optimizer.step()
        return weight.detach()

    assert torch.equal(trained(4), trained(100))


POOLS = st.tuples(
    st.integers(3, 40),  # height
    st.integers(1, 6),  # kernel
    st.integers(1, 5),  # stride
    st.integers(0, 3),  # padding
    st.booleans(),  # ceil mode
    st.integers(1, 9),  # rows
)


@settings(deadline=None)
@given(POOLS, st.integers(1, 3))
def test_any_max_pooling(shape: tuple[int, ...], dilation: int) -> None:
    height, kernel, stride, padding, ceil_mode, rows = shape

    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode=bool(ceil_mode))

    assert_pooled_as_at_once(pool, height, rows)


@settings(deadline=None)
@given(POOLS, st.booleans(), st.sampled_from([None, 3]))
def test_any_average_pooling(shape: tuple[int, ...], padding_counts: bool, divisor: int | None) -> None:
    height, kernel, stride, padding, ceil_mode, rows = shape

    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, kernel, stride, padding, bool(ceil_mode), padding_counts, divisor)

    assert_pooled_as_at_once(pool, height, rows)


def assert_pooled_as_at_once(pool: Callable[[torch.Tensor], torch.Tensor], height: int, rows: int) -> None:
    # Few values, so that there are ties, and infinities, which padding has as well.
    source = torch.randint(-2, 3, (2, 2, height, 17), generator=torch.Generator().manual_seed(7)).double()
    source[source == -2] = 0 if pool.__code__.co_freevars.count("divisor") else -torch.inf
    try:
        expected = outcome(pool, [source])
    except RuntimeError:
        assume(False)
    with tiled.strips(budget="1GiB", rows=rows, device="simulated"):
        made = outcome(pool, [source])
    assert_close(made, expected) if torch.isfinite(source).all() else assert_equal(made, expected)


def test_indices_of_pooling_count_in_the_whole_map_beyond_32_bits() -> None:
    source = torch.arange(40_001, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 1, -1, 64_000)
    with tiled.strips(budget="64MiB", rows=1, device="simulated"):
        _, indices = F.max_pool2d(source, 1, stride=8_000, return_indices=True)
    expected = 8_000 * (torch.arange(6).view(-1, 1) * 64_000 + torch.arange(8))
    assert expected.max() > 2**31
    assert torch.equal(indices[0, 0], expected)
