"""What rounds move: each block once per pass, and not again what is there already, however many microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks
from support.rounds import Plan, activations_of_rounds, build_optimizer
from support.training import parameter_bytes
from support.zoo import FAMILIES
from support.zoo_more import MORE_FAMILIES

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


def passes_of_a_step(run: hydra_ext.Run, model: nn.Module, family: Any, batches: list[Any]) -> Passes:
    moments: list[tuple[int, int, set[int]]] = []

    def there() -> set[int]:
        return set(run.core.resident_blocks)

    def fn(batch: Any) -> Tensor:
        loss: Tensor = family.loss(model, batch)
        statistics = run.core.pager_statistics
        moments.append((statistics.loads, statistics.loaded_bytes, there()))
        return loss

    before = run.report()
    run.step(batches, fn, round_size=len(batches), recompute=False)
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
        steps = [passes_of_a_step(run, model, family, batches[i * m : (i + 1) * m]) for i in range(STEPS)]
        blocks = range(len(run.layout.blocks))
        report = run.report()
        everything = sum(slot_bytes(run, block) for block in blocks)
        order = [block for block, _ in run.core.recorded(_C.PassKind.FORWARD)]
        assert sorted(order) == list(blocks)
        assert [block for block, _ in run.core.recorded(_C.PassKind.BACKWARD)] == order[::-1]
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
