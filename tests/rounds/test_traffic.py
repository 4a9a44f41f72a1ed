"""What rounds move: each block once per pass, and not again what is there already, however many microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks, optim
from support.models.zoo import FAMILIES
from support.models.zoo_more import MORE_FAMILIES
from support.rounds.rounds import Plan, activations_of_rounds, build_optimizer
from support.runtime.native import LAYERS, WIDTH, stack
from support.training import parameter_bytes

EVERY_FAMILY = {**FAMILIES, **MORE_FAMILIES}
UNTIED = ["llama", "qwen3", "vit", "mixtral"]
STEPS = 4


@dataclass
class Passes:
    """Of one step: loads and bytes of its forward and of its backward, and the blocks that stayed between them."""

    forward_loads: int
    forward_bytes: int
    backward_loads: int
    backward_bytes: int
    stayed: set[int]
    gradient_bytes: int


def slot_bytes(run: hydra_ext.Run, block: int) -> int:
    alignment = _C.PAGE_ALIGNMENT
    return sum(-(-p.nbytes // alignment) * alignment for _, p in run.layout.blocks[block].parameters)


def passes_of_a_step(
    run: hydra_ext.Run, loss_of: Callable[[Any], Tensor], batches: list[Any], max_norm: float | None = None
) -> Passes:
    moments: list[tuple[int, int, set[int]]] = []

    def there() -> set[int]:
        return set(run.core.pager.resident_blocks)

    def fn(batch: Any) -> Tensor:
        loss = loss_of(batch)
        statistics = run.core.pager.statistics
        moments.append((statistics.loads, statistics.loaded_bytes, there()))
        return loss

    before = run.report()
    run.step(batches, fn, round_size=len(batches), recompute=False, max_norm=max_norm)
    after = run.report()
    loads, size, stayed = moments[-1]
    return Passes(
        loads - before.loads,
        size - before.weights_moved_bytes,
        after.loads - loads,
        after.weights_moved_bytes - size,
        stayed,
        after.gradients_moved_bytes - before.gradients_moved_bytes,
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("name", UNTIED)
def test_each_block_is_moved_once_per_pass(name: str, m: int) -> None:
    family, plan = EVERY_FAMILY[name], Plan(m=m)
    batches = family.batches(1, STEPS * m)
    activations = activations_of_rounds(family, plan, family.batches(1, 2 * m), round_size=m, recompute=False)
    model = family.make(0)
    optimizer = build_optimizer(model, plan)
    budget = activations + parameter_bytes(model) // 3
    with hydra_ext.offload(model, optimizer, budget=budget, checks=Checks(poison_hosts=True)) as run:
        steps = [passes_of_a_step(run, partial(family.loss, model), batches[i * m : (i + 1) * m]) for i in range(STEPS)]
        blocks = range(len(run.layout.blocks))
        report = run.report()
        everything = sum(slot_bytes(run, block) for block in blocks)
        order = [block for block, _ in run.core.pager.recorded(_C.PassKind.FORWARD)]
        assert sorted(order) == list(blocks)
        assert [block for block, _ in run.core.pager.recorded(_C.PassKind.BACKWARD)] == order[::-1]
        for step in steps[1:]:
            # The update has changed every block. What the forward ends with is where the backward begins.
            assert (step.forward_loads, step.forward_bytes) == (len(blocks), everything)
            assert order[-1] in step.stayed
            missing = [block for block in blocks if block not in step.stayed]
            assert missing, "there was room for everything"
            # What stayed may have to make room for the backward's own activations before it is used.
            assert len(missing) <= step.backward_loads < len(blocks)
            assert sum(slot_bytes(run, block) for block in missing) <= step.backward_bytes
            assert step.backward_bytes <= everything - slot_bytes(run, order[-1])
            assert step.gradient_bytes == parameter_bytes(model)
    assert (report.refusals, report.fallbacks, report.faults) == (0, 0, 0)
    assert report.order_changes == 0


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).pow(2).mean()
    return loss


def steps_of_a_stack(budget: int, m: int) -> tuple[list[Passes], int, hydra_ext.Report]:
    """Steps of blocks of one size, and the most that activations took."""
    model = stack()
    optimizer = optim.AdamW(model.parameters())
    batches = [torch.ones(8, WIDTH) for _ in range(m)]
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=budget, blocks=list(model), checks=checks) as run:
        steps = [passes_of_a_step(run, partial(loss_of, model), batches, max_norm=1.0) for _ in range(STEPS)]
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
        activations = max(size for kind in kinds for _, size in run.core.pager.recorded(kind))
        return steps, activations, run.report()


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_backward_loads_each_block_once_but_for_those_that_forward_left(slots: int, m: int) -> None:
    _, activations, _ = steps_of_a_stack(2**30, m)
    block = sum(-(-p.nbytes // _C.PAGE_ALIGNMENT) * _C.PAGE_ALIGNMENT for p in stack()[0].parameters())
    steps, _, report = steps_of_a_stack(activations + slots * block, m)
    for step in steps[2:]:
        assert step.forward_loads == LAYERS
        assert step.backward_loads == LAYERS - slots
        assert step.backward_bytes == step.backward_loads * block
        assert LAYERS - 1 in step.stayed
    assert (report.deferred_updates, report.rounds) == (STEPS, STEPS)
    assert (report.refusals, report.fallbacks, report.faults, report.order_changes) == (0, 0, 0, 0)
