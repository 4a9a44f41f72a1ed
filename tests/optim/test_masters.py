"""Exact masters of 16-bit weights, moments of 16 bits, and what they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydra_ext.optim import SGD, AdamW, masters
from support.recurrences import half_up
from support.updates import gradient_like, parameter, same_bits, update


def loss_of(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(inputs @ weights) ** 2).mean()


def test_a_split_master_equals_an_fp32_one_whose_weights_are_rounded_half_up_for_1000_steps() -> None:
    """The reference is an fp32 parameter; its gradients come from compute weights that are rounded here."""
    split = parameter((24, 16), torch.bfloat16)
    reference = nn.Parameter(split.detach().float())
    ours, theirs = AdamW([split], lr=1e-3, weight_decay=0.01), AdamW([reference], lr=1e-3, weight_decay=0.01)
    hidden = 0
    for step in range(1000):
        inputs = gradient_like(torch.empty(8, 24), step, torch.bfloat16)
        compute = half_up(reference).requires_grad_()
        assert same_bits(split, compute)
        loss_of(compute, inputs).backward()
        loss_of(split, inputs).backward()
        before = split.detach().clone()
        update(theirs, [(reference, compute.grad)])
        ours.step()
        ours.zero_grad()
        hidden += int((before == split).sum())
    assert same_bits(ours.master(split), reference)
    assert hidden > 0.5 * 1000 * split.numel(), "the steps were too large for a master to matter"


@pytest.mark.parametrize("make", [AdamW, lambda *a, **o: SGD(*a, momentum=0.9, **o)], ids=["adamw", "sgd"])
def test_both_kinds_of_master_give_the_same_weights(make) -> None:
    trained = {}
    for kind in ("split", "fp32"):
        trained[kind] = parameter((50, 3), torch.bfloat16)
        optimizer = make([trained[kind]], lr=1e-3, master=kind)
        for step in range(20):
            trained[kind].grad = gradient_like(trained[kind], step)
            optimizer.step()
    assert same_bits(trained["split"], trained["fp32"])


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {}, 4 + 8),
        (torch.bfloat16, {}, 2 + 2 + 8),
        (torch.bfloat16, {"master": "fp32"}, 2 + 4 + 8),
        (torch.bfloat16, {"moments": torch.bfloat16}, 2 + 2 + 4),
        (torch.float16, {}, 2 + 4 + 8),
    ],
)
def test_weights_and_state_take_the_bytes_they_should(dtype: torch.dtype, options: dict, expected: int) -> None:
    weights = parameter((100, 100), dtype)
    optimizer = AdamW([weights], **options)
    weights.grad = gradient_like(weights, 0)
    optimizer.step()
    held = weights.nbytes + sum(value.nbytes for name, value in optimizer.state[weights].items() if name != "step")
    assert held == expected * weights.numel()


def test_a_master_is_the_weight_before_the_first_step() -> None:
    weights = parameter((7,), torch.bfloat16)
    assert same_bits(AdamW([weights]).master(weights), weights.detach().float())


def test_a_master_is_a_copy() -> None:
    weights = parameter((7,))
    AdamW([weights]).master(weights).zero_()
    assert weights.abs().min() > 0


@pytest.mark.parametrize("kind", ["split", "fp32"])
def test_a_weight_written_by_someone_else_counts(kind: str) -> None:
    weights = parameter((40,), torch.bfloat16)
    optimizer = SGD([weights], lr=1e-3, master=kind)
    weights.grad = gradient_like(weights, 0)
    optimizer.step()
    before = optimizer.master(weights)
    with torch.no_grad():
        weights[:20] = 3.0
    weights.grad.zero_()
    optimizer.step()
    assert torch.all(weights[:20] == 3.0)
    assert same_bits(optimizer.master(weights)[20:], before[20:])


def second_moments(moments: torch.dtype) -> torch.Tensor:
    """Of gradients that were 1 for long and then are 2 for 1000 steps."""
    weights = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([weights], moments=moments)
    weights.grad = torch.full_like(weights, 2.0)
    optimizer.step()
    state = optimizer.state[weights]
    state["exp_avg_sq"].fill_(1.0)
    for _ in range(1000):
        optimizer.step()
    return state["exp_avg_sq"].float()


def test_nearest_rounding_would_freeze_the_second_moment_and_stochastic_does_not() -> None:
    expected = 4.0 - 3.0 * 0.999**1000
    nearest = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        nearest = (nearest.float() * 0.999 + 0.001 * 4.0).bfloat16()
    assert nearest == 1.0
    assert second_moments(torch.float32).mean().item() == pytest.approx(expected, rel=1e-4)
    assert second_moments(torch.bfloat16).mean().item() == pytest.approx(expected, rel=5e-3)


def test_stochastic_rounding_is_right_on_average_and_its_own_for_every_parameter_and_step() -> None:
    first, second = (nn.Parameter(torch.zeros(20_000)) for _ in range(2))
    optimizer = AdamW([first, second], moments=torch.bfloat16, betas=(0.9, 0.99))
    drawn = []
    for _ in range(2):
        for weights in (first, second):
            optimizer.state[weights].clear()
            weights.grad = torch.full_like(weights, 1.01)
        optimizer.step()
        drawn += [optimizer.state[weights]["exp_avg"].float() for weights in (first, second)]
        optimizer.state[first]["step"] += 1
    value = 1.01 * 0.1
    for moment in drawn:
        assert moment.unique().numel() == 2
        assert moment.mean().item() == pytest.approx(value, rel=1e-4)
    assert not torch.equal(drawn[0], drawn[1])


def test_both_moments_of_an_element_are_rounded_independently() -> None:
    """Both are 0.1, which lies four fifths of the way to the next number of 16 bits."""
    weights = nn.Parameter(torch.zeros(20_000))
    optimizer = AdamW([weights], moments=torch.bfloat16, betas=(0.9, 0.9))
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    state = optimizer.state[weights]
    above = [state[name].float() > 0.1 for name in ("exp_avg", "exp_avg_sq")]
    for one in above:
        assert one.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (above[0] & above[1]).float().mean().item() == pytest.approx(0.8**2, abs=0.02)


def test_stochastic_rounding_repeats_itself() -> None:
    runs = []
    for _ in range(2):
        weights = parameter((999,), torch.bfloat16)
        optimizer = AdamW([weights], moments=torch.bfloat16)
        for step in range(5):
            weights.grad = gradient_like(weights, step)
            optimizer.step()
        runs.append([weights.detach(), *optimizer.state[weights].values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("rest", "kept"), [(-(2**15), True), (-1, True), (2**15 - 1, True), (2**15, False), (-(2**15) - 1, False)]
)
def test_the_lower_half_is_kept_where_the_number_rounds_to_the_weight(rest: int, kept: bool) -> None:
    """Half-up: what lies half a unit above belongs to the next weight."""
    weight = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)
    number = ((weight.view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)
    assert torch.equal(half_up(number) == weight, torch.tensor([kept, kept]))
    lower = masters.lower_of(weight, number)
    assert lower.tolist() == [rest if kept else 0] * 2
    assert torch.equal(masters.merged(weight, lower), number if kept else weight.float())
