"""New weights written beside the old ones: the same numbers, and the old ones stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.errors import InvalidOptimizer, StateError
from hydra_ext.optim import SGD, Adam, AdamW
from hydra_ext.optim.host_optimizer import HostOptimizer
from support.updates import gradient_like, parameter, same_bits, update

pytestmark = pytest.mark.every_case

RULES: dict[str, tuple[type[HostOptimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-2}),
    "adam": (Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
STORAGE = {
    "fp32": (torch.float32, "split"),
    "bf16, split": (torch.bfloat16, "split"),
    "bf16, fp32 master": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
}
SHAPES = ((37, 5), (1,), (0, 3), (129,))


def update_into(optimizer: HostOptimizer, gradients: list[tuple[Tensor, Tensor]], new: dict[Tensor, Tensor]) -> None:
    (prepared,) = optimizer.prepare([gradients], new)
    prepared.plan.run(optimizer.pool, 0.3)
    optimizer.finish(prepared)


def state_of(optimizer: HostOptimizer, weights: Tensor) -> list[Tensor]:
    return [value for value in optimizer.state[weights].values() if value.dim()]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("rule", RULES)
def test_two_buffers_by_turns_hold_the_weights_of_steps_in_place(rule: str, storage: str, moments: torch.dtype) -> None:
    make, options = RULES[rule]
    dtype, master = STORAGE[storage]
    plain, shown = ([parameter(shape, dtype, seed) for seed, shape in enumerate(SHAPES)] for _ in range(2))
    first, second = (make(each, **options, master=master, moments=moments) for each in (plain, shown))
    retired = {weights: torch.full_like(weights, torch.nan) for weights in shown}
    for step in range(5):
        gradients = [gradient_like(weights, step) for weights in shown]
        update(first, list(zip(plain, gradients, strict=True)), 0.3)
        before = [weights.detach().clone() for weights in shown]
        update_into(second, list(zip(shown, gradients, strict=True)), retired)
        for old, weights in zip(before, shown, strict=True):
            assert same_bits(old, weights)
            weights.data, retired[weights] = retired[weights], weights.data
    for a, b in zip(plain, shown, strict=True):
        assert same_bits(a, b)
        assert same_bits(first.master(a), second.master(b))
        assert all(map(same_bits, state_of(first, a), state_of(second, b)))


@pytest.mark.parametrize("instructions", _C.supported_instruction_sets(), ids=lambda chosen: chosen.name)
@pytest.mark.parametrize("count", [1, 15, 17, 100_003])
def test_a_plan_writes_new_weights_as_it_would_in_place(count: int, instructions: _C.InstructionSet) -> None:
    step = _C.AdamStep(
        learning_rate=1e-2, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, decoupled=True, step=2
    )

    def run(instructions: _C.InstructionSet, beside: bool) -> tuple[Tensor, list[Tensor]]:
        weights, first, second = (parameter((count,), torch.bfloat16, seed).detach() for seed in range(3))
        lower = torch.arange(count).remainder(65_536).sub(32_768).to(torch.int16)
        new = torch.empty_like(weights) if beside else None
        plan, state = _C.TensorPlan(instructions), {"first_moment": first, "second_moment": second.abs_()}
        plan.add(step, weights, gradient_like(weights, 3), master=lower, **state, seed=5, new_weights=new)
        plan.run(_C.ThreadPool(2), 0.7)
        return weights, [weights if new is None else new, lower, first, second]

    _, expected = run(_C.InstructionSet.PORTABLE, beside=False)
    old, got = run(instructions, beside=True)
    assert same_bits(old, parameter((count,), torch.bfloat16, 0))
    assert all(map(same_bits, got, expected))


def test_only_what_is_written_counts_as_changed() -> None:
    weights, other = parameter((5,)), parameter((5,), seed=1)
    new = torch.empty_like(weights)
    optimizer = AdamW([weights, other])
    old_graph, new_graph = (weights**2).sum(), (new.requires_grad_() ** 2).sum()
    versions = weights._version, other._version, new._version
    gradients = [(weights, gradient_like(weights, 1)), (other, gradient_like(other, 2))]
    update_into(optimizer, gradients, {weights: new})
    assert weights._version == versions[0]
    assert other._version > versions[1]
    assert new._version > versions[2]
    old_graph.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        new_graph.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_fp32_master_still_follows_what_somebody_writes_to_the_newest_weights(dtype: torch.dtype) -> None:
    weights = parameter((50,), dtype)
    new = torch.empty_like(weights)
    optimizer = AdamW([weights], lr=1e-4, master="fp32")
    update_into(optimizer, [(weights, gradient_like(weights, 1))], {weights: new})
    kept = optimizer.master(weights)
    weights.data, new = new, weights.data
    with torch.no_grad():
        weights[:10] = 7.0
    update_into(optimizer, [(weights, torch.zeros_like(weights))], {weights: new})
    exact = optimizer.master(weights)
    assert (exact[:10] > 6.9).all()
    assert (exact[10:] - kept[10:]).abs().max() < 1e-3
    assert not same_bits(exact[10:], weights[10:].float()), "nothing is left of the master"


def test_what_a_step_touches_includes_where_it_writes() -> None:
    weights = parameter((5,))
    new = torch.empty_like(weights)
    optimizer = AdamW([weights])
    (prepared,) = optimizer.prepare([[(weights, gradient_like(weights, 1))]], {weights: new})
    assert any(each is new for each in optimizer.tensors_of(prepared))
    assert len(optimizer.tensors_of(prepared)) == 5  # old, new, gradient, two moments


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (torch.empty(4, 3), "differs from the parameter"),
        (torch.empty(4, 3).t(), "differs from the parameter"),
        (torch.empty(3, 4, dtype=torch.bfloat16), "differs from the parameter"),
        (torch.empty(3, 4, device="meta"), "differs from the parameter"),
        (None, "is the parameter itself"),
    ],
)
def test_a_destination_that_is_not_like_the_parameter_is_refused_and_nothing_changed(
    new: Tensor | None, message: str
) -> None:
    weights = nn.Parameter(torch.zeros(3, 4))
    optimizer = AdamW([weights])
    with pytest.raises(InvalidOptimizer, match=message):
        optimizer.prepare([[(weights, torch.ones(3, 4))]], {weights: weights if new is None else new})
    assert not optimizer.state


def test_a_destination_made_in_inference_mode_is_refused() -> None:
    weights = parameter((5,))
    with torch.inference_mode():
        new = torch.empty(5)
    with pytest.raises(InvalidOptimizer, match="inference mode"):
        AdamW([weights]).prepare([[(weights, torch.ones(5))]], {weights: new})


def test_new_weights_that_share_memory_with_the_old_are_refused() -> None:
    memory = torch.zeros(10)
    weights = nn.Parameter(memory[:6])
    with pytest.raises(StateError, match="share memory"):
        AdamW([weights]).prepare([[(weights, torch.ones(6))]], {weights: memory[4:]})
    beside = nn.Parameter(memory[:5])
    AdamW([beside]).prepare([[(beside, torch.ones(5))]], {beside: memory[5:]})
