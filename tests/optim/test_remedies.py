"""Optimizers for gradients that are one step late: their rules as recurrences, and torch optimizers as all are."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import InvalidOptimizer
from hydra_ext.optim import DelayCorrectedAdamW, Muon, NAdamW
from hydra_ext.optim.muon import orthogonalized
from support.updates import gradient_like, parameter, same_bits

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.98), "eps": 1e-6, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: DelayCorrectedAdamW(params, **ADAM),
    "nadamw": lambda params: NAdamW(params, lr=1e-2),
    "nadamw, corrected": lambda params: NAdamW(params, lr=1e-2, correction=0.5),
    "muon": lambda params: Muon(params, lr=1e-2),
    "muon, corrected": lambda params: Muon(params, lr=1e-2, correction=1.0),
}


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for step in steps:
        for ordinal, each in enumerate(parameters):
            each.grad = gradient_like(each, 100 * step + ordinal)
        optimizer.step()


def pair(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [parameter((13, 7), dtype, 1), parameter((4, 9), dtype, 2)]


# ---- the rules ------------------------------------------------------------------------------------------------------


def adam_recurrence(w: Tensor, gradients: list[Tensor], correction: float) -> Tensor:
    (b1, b2), lr, before = ADAM["betas"], ADAM["lr"], None
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + ADAM["eps"])
        w = w - lr * ADAM["weight_decay"] * w - u
        w = w if before is None else w - correction * (u - before)
        before = u
    return w


def nadam_recurrence(w: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    m, v, product = torch.zeros_like(w), torch.zeros_like(w), 1.0
    for t, g in enumerate(gradients, 1):
        mu, after = (0.99 * (1 - 0.5 * 0.96 ** (0.004 * k)) for k in (t, t + 1))
        product *= mu
        m, v = 0.99 * m + 0.01 * g, 0.999 * v + 0.001 * g * g
        ahead = after * m / (1 - product * after) + (1 - mu) * g / (1 - product)
        w = w - lr * decay * w - lr * ahead / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return w


def muon_recurrence(w: Tensor, gradients: list[Tensor], correction: float) -> Tensor:
    lr, momentum, before, b = MUON["lr"], MUON["momentum"], None, torch.zeros_like(w)
    for g in gradients:
        b = momentum * b + g
        x = g + momentum * b
        x = x / x.pow(2).sum().sqrt()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        u = lr * 0.2 * math.sqrt(max(w.shape)) * x
        w = w - lr * MUON["weight_decay"] * w - u
        w = w if before is None else w - correction * (u - before)
        before = u
    return w


@pytest.mark.parametrize("correction", [0.0, 0.3, 1.0])
def test_delay_corrected_adamw_is_its_recurrence(correction: float) -> None:
    weights = parameter((13, 7), torch.float64)
    gradients = [gradient_like(weights, step) for step in range(10)]
    expected = adam_recurrence(weights.detach().clone(), gradients, correction)
    run(DelayCorrectedAdamW([weights], **ADAM, correction=correction), weights, gradients)
    torch.testing.assert_close(weights.detach(), expected, rtol=1e-12, atol=1e-12)


def test_nadamw_is_its_recurrence() -> None:
    weights = parameter((13, 7), torch.float64)
    gradients = [gradient_like(weights, step) for step in range(10)]
    expected = nadam_recurrence(weights.detach().clone(), gradients, 1e-2, 0.1)
    run(NAdamW([weights], lr=1e-2, weight_decay=0.1), weights, gradients)
    torch.testing.assert_close(weights.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(13, 7), (7, 13), (5, 5), (1, 6)])
@pytest.mark.parametrize("correction", [0.0, 1.0])
def test_muon_is_its_recurrence(shape: tuple[int, int], correction: float) -> None:
    weights = parameter(shape, torch.float64)
    gradients = [gradient_like(weights, step) for step in range(6)]
    expected = muon_recurrence(weights.detach().clone(), gradients, correction)
    run(Muon([weights], **MUON, correction=correction), weights, gradients)
    torch.testing.assert_close(weights.detach(), expected, rtol=1e-9, atol=1e-9)


def run(optimizer: torch.optim.Optimizer, weights: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        weights.grad = gradient
        optimizer.step()


def test_without_correction_they_are_torchs() -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1}
    kinds: list[tuple[Any, Any]] = [
        (DelayCorrectedAdamW([w := parameter((9, 5), torch.float64)], **options, correction=0.0), w),
        (torch.optim.AdamW([w := parameter((9, 5), torch.float64)], **options), w),
        (NAdamW([w := parameter((9, 5), torch.float64)], **options), w),
        (torch.optim.NAdam([w := parameter((9, 5), torch.float64)], betas=(0.99, 0.999), momentum_decay=4e-3,
                           decoupled_weight_decay=True, **options), w),
        (Muon([w := parameter((9, 5), torch.float64)], **options), w),
        (torch.optim.Muon([w := parameter((9, 5), torch.float64)], adjust_lr_fn="match_rms_adamw", **options), w),
    ]  # fmt: skip
    for optimizer, _ in kinds:
        train(optimizer, range(10))
    adamw, torchs_adamw, nadamw, torchs_nadam, muon, torchs_muon = (w.detach() for _, w in kinds)
    torch.testing.assert_close(adamw, torchs_adamw, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nadamw, torchs_nadam, rtol=1e-7, atol=1e-9)  # torch's keeps the product of mu in fp32
    moved = (torchs_muon - parameter((9, 5), torch.float64).detach()).norm()
    assert (muon - torchs_muon).norm() < 0.02 * moved  # torch's iterates in bf16


@pytest.mark.parametrize("maker", ["adamw", "nadamw", "muon"])
def test_corrected_weights_run_one_update_ahead_of_those_made_of_the_same_gradients(maker: str) -> None:
    weights, uncorrected = parameter((13, 7), torch.float64), parameter((13, 7), torch.float64)
    pairs = [(MAKERS[maker]([weights]), 1.0), (MAKERS[maker]([uncorrected]), 0.0)]
    for optimizer, correction in pairs:
        optimizer.param_groups[0].update(weight_decay=0.0, correction=correction)
    seen = [uncorrected.detach().clone()]
    for step in range(8):
        for optimizer, _ in pairs:
            train(optimizer, range(step, step + 1))
        seen.append(uncorrected.detach().clone())
        first, last = seen[0] - seen[1], seen[-2] - seen[-1]
        torch.testing.assert_close(weights.detach(), seen[-1] + first - last, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [DelayCorrectedAdamW, Muon])
def test_with_late_gradients_the_correction_keeps_nearer_to_training_without_delay(make: Any) -> None:
    curvature = torch.logspace(-2, 0, 35, dtype=torch.float64).view(7, 5)

    def trained(delayed: bool, correction: float) -> Tensor:
        weights = parameter((7, 5), torch.float64)
        optimizer = make([weights], lr=2e-2, weight_decay=0.0, correction=correction)
        older = weights.detach().clone()
        path = []
        for _ in range(60):
            newest = weights.detach().clone()
            weights.grad = curvature * (older if delayed else newest)
            optimizer.step()
            older = newest
            path.append(newest)
        return torch.stack(path)

    plain = trained(delayed=False, correction=0.0)
    off = (trained(delayed=True, correction=0.0) - plain).norm()
    assert (trained(delayed=True, correction=1.0) - plain).norm() < 0.5 * off


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (20, 20)])
def test_an_orthogonalized_matrix_keeps_its_singular_vectors_and_has_singular_values_near_one(
    shape: tuple[int, int],
) -> None:
    matrix = gradient_like(torch.empty(shape), 3, torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ orthogonalized(matrix) @ vh.mT
    values = inner.diagonal()
    assert ((values > 0.6) & (values < 1.3)).all()
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-9)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    for maker in MAKERS.values():
        weights = parameter((3, 4))
        optimizer = maker([{"params": [weights], "weight_decay": 0.0}])
        before = weights.detach().clone()
        run(optimizer, weights, [torch.zeros(3, 4)] * 2)
        assert same_bits(weights, before)


# ---- as torch optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_exactly_from_a_saved_file(maker: str) -> None:
    straight = pair()
    first = MAKERS[maker](straight)
    train(first, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "weights": straight}, file)
    train(first, range(3, 6))
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    second = MAKERS[maker](loaded["weights"])
    second.load_state_dict(loaded["optimizer"])
    train(second, range(3, 6))
    assert all(same_bits(a, b) for a, b in zip(straight, loaded["weights"], strict=True))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_copy_goes_on_by_itself_with_the_same_bits(maker: str) -> None:
    weights = pair()
    optimizer = MAKERS[maker](weights)
    train(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    train(optimizer, range(2, 4))
    train(twin, range(2, 4))
    assert all(same_bits(a, b) for a, b in zip(weights, twin.param_groups[0]["params"], strict=True))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (DelayCorrectedAdamW, lambda params: torch.optim.AdamW(params, lr=1e-2)),
        (NAdamW, lambda params: torch.optim.NAdam(params, lr=1e-2, betas=(0.99, 0.999), decoupled_weight_decay=True)),
    ],
)
def test_the_state_of_torchs_optimizer_of_the_same_rule_is_taken(ours: Any, theirs: Any) -> None:
    mixed, plain = pair(torch.float64), pair(torch.float64)
    before, reference = theirs(mixed), theirs(plain)
    train(before, range(3))
    train(reference, range(4))
    after = ours(mixed, lr=99.0)
    after.load_state_dict(before.state_dict())
    train(after, range(3, 4))  # the first one after loading is not corrected
    assert "fused" not in after.param_groups[0]
    for a, b in zip(mixed, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (torch.optim.AdamW([parameter((5, 5))], amsgrad=True), "amsgrad"),
        (torch.optim.Adam([parameter((5, 5))], weight_decay=0.1), "part of the gradient"),
        (Muon([parameter((5, 5))]), "another rule"),
        (torch.optim.SGD([parameter((5, 5))], momentum=0.9), "another rule"),
    ],
)
def test_state_of_another_rule_is_refused_and_nothing_changed(saved: torch.optim.Optimizer, message: str) -> None:
    train(saved, range(1))
    weights = parameter((5, 5))
    optimizer = DelayCorrectedAdamW([weights], lr=0.5)
    train(optimizer, range(1))
    with pytest.raises(InvalidOptimizer, match=message):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[weights]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_group_of_muon_that_is_not_orthogonalized_is_adamw() -> None:
    matrix, rest, twin = parameter((6, 4)), parameter((9,)), parameter((9,))
    groups: list[dict[str, Any]] = [{"params": [matrix]}, {"params": [rest], "orthogonalize": False, "lr": 1e-3}]
    muon = Muon(groups, lr=1e-2, weight_decay=0.1)
    adamw = DelayCorrectedAdamW([twin], lr=1e-3, weight_decay=0.1, correction=0.0)
    for step in range(4):
        matrix.grad, rest.grad = gradient_like(matrix, step), gradient_like(rest, 50 + step)
        twin.grad = rest.grad
        muon.step()
        adamw.step()
    assert same_bits(rest, twin)
    assert set(muon.state[matrix]) == {"step", "momentum_buffer"}
    assert set(muon.state[rest]) == {"step", "exp_avg", "exp_avg_sq"}


def test_only_a_correction_takes_memory_for_the_update_before() -> None:
    weights, other = pair()
    optimizer = NAdamW([{"params": [weights], "correction": 1.0}, {"params": [other]}])
    train(optimizer, range(2))
    assert "previous_update" in optimizer.state[weights]
    assert "previous_update" not in optimizer.state[other]
    optimizer.param_groups[0]["correction"] = 0.0
    train(optimizer, range(2, 3))
    assert "previous_update" not in optimizer.state[weights]


@pytest.mark.parametrize("maker", MAKERS)
def test_schedules_closures_and_missing_gradients_work_as_everywhere(maker: str) -> None:
    weights, unused = pair()
    optimizer = MAKERS[maker]([weights, unused])
    before = unused.detach().clone()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weights**2).sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(2):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[1] < losses[0]
    assert optimizer.step() is None
    frozen = weights.detach().clone()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    optimizer.param_groups[0]["correction"] = 0.0  # an update of a rate before is taken back even at a rate of zero
    optimizer.step()
    assert same_bits(weights, frozen)
    assert same_bits(unused, before)
    assert list(optimizer.state) == [weights]


@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_read_back_from_the_device_of_the_weights(maker: str) -> None:
    """A meta tensor has no numbers, and raises where one is asked for."""
    weights = nn.Parameter(torch.empty(6, 4, device="meta"))
    optimizer = MAKERS[maker]([weights])
    run(optimizer, weights, [torch.empty_like(weights)] * 3)
    assert all(value.is_meta for name, value in optimizer.state[weights].items() if name not in ("step", "mu_product"))


@pytest.mark.parametrize("maker", MAKERS)
def test_offloaded_training_is_bit_for_bit_the_plain_one(maker: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU()) for _ in range(6)))
    plain = copy.deepcopy(model)
    optimizer, reference = MAKERS[maker](model.parameters()), MAKERS[maker](plain.parameters())
    budget = 3 * sum(each.nbytes for each in model.parameters()) // 4 + 2**16

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with hydra_ext.offload(model, optimizer, budget=budget, checks=hydra_ext.Checks(poison_hosts=True)) as run:
        steps(model, optimizer)
        report = run.report()
    assert report.windows == 8
    steps(plain, reference)
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DelayCorrectedAdamW, {"lr": -1.0}, "lr=-1.0 is negative"),
        (DelayCorrectedAdamW, {"correction": -0.5}, "correction=-0.5 is negative"),
        (DelayCorrectedAdamW, {"betas": (0.9, 1.0)}, "0 <= beta < 1"),
        (NAdamW, {"momentum_decay": -1.0}, "momentum_decay"),
        (NAdamW, {"eps": -1.0}, "eps"),
        (Muon, {"momentum": 1.0}, "0 <= momentum < 1"),
        (Muon, {"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_impossible_options_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptimizer, match=message):
        kind([parameter((3, 3))], **options)


@pytest.mark.parametrize("kind", [DelayCorrectedAdamW, NAdamW, Muon])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_weights_that_would_lose_small_updates_are_refused_with_a_way_out(kind: Any, dtype: torch.dtype) -> None:
    with pytest.raises(InvalidOptimizer, match=r"parameter 1 of shape \(3, 3\).*autocast"):
        kind([parameter((3, 3)), parameter((3, 3), dtype)])


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_muon_refuses_what_is_no_matrix_and_the_group_is_not_added(shape: tuple[int, ...]) -> None:
    optimizer = Muon([parameter((3, 3))])
    with pytest.raises(InvalidOptimizer, match='"orthogonalize": False'):
        optimizer.add_param_group({"params": [parameter(shape)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [parameter(shape)], "orthogonalize": False})


def test_a_sparse_gradient_is_refused_before_anything_is_changed() -> None:
    table, dense = nn.Embedding(4, 3, sparse=True), parameter((3, 3))
    optimizer = DelayCorrectedAdamW([dense, table.weight])
    table(torch.tensor([1])).sum().backward()
    dense.grad = torch.ones(3, 3)
    with pytest.raises(InvalidOptimizer, match=r"shape \(4, 3\) is sparse"):
        optimizer.step()
    assert not optimizer.state
