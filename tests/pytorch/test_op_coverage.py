"""The fault path: operations find absent parameters by themselves, whatever evicts them in between.

Each parameter is a block of its own, and no module announces its use. Before every call of torch's, and before every
node of backward, all blocks that nothing pins are evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import hydra_ext
from hydra_ext import _C
from hydra_ext.runtime import engine
from support.models import op_cases

pytestmark = pytest.mark.every_case

BUDGET = 4 * 2**20
CASES = dict(op_cases.all_cases())


class Holder(nn.Module):
    """One parameter, and so one block; never called."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)


class Operation(nn.Module):
    def __init__(self, case: op_cases.Case) -> None:
        super().__init__()
        self.holders = nn.ModuleDict({name: Holder(value) for name, value in op_cases.values().items()})
        self._case = case

    def forward(self) -> torch.Tensor:
        return self._case(op_cases.Parameters(lambda name: self.holders[name].value))

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: holder.value.grad for name, holder in self.holders.items()}


def evict_all() -> None:
    """An allocation that cannot be met takes every block with it that nothing pins."""
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(BUDGET + 1, dtype=torch.uint8)


class EvictBeforeEveryCall(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            evict_all()
        return function(*args, **(kwargs or {}))


def evict_before_every_node(root: torch.Tensor) -> None:
    pending, seen = [root.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        node.register_prehook(lambda _gradients: evict_all())
        pending += [following for following, _ in node.next_functions]


@contextmanager
def offloaded(model: nn.Module, **options: Any) -> Iterator[hydra_ext.Run]:
    blocks = [f"holders.{name}" for name in model.holders]
    with hydra_ext.offload(model, budget=BUDGET, blocks=blocks, **options) as run:
        assert len(run.core.blocks.faces()) == run.report().blocks == len(blocks)
        yield run
        assert not run.core.gate.open
        assert run.core.pager.pins == 0
    assert not engine.installed()


def test_there_are_as_many_cases_as_there_ever_were() -> None:
    assert len(CASES) == 58


@pytest.mark.parametrize("name", CASES)
def test_an_operation_on_absent_parameters_gives_what_plain_pytorch_gives(name: str) -> None:
    plain = Operation(CASES[name])
    expected = plain()
    expected.sum().backward()
    assert not expected.isnan().any()
    model = Operation(CASES[name])
    with offloaded(model, checks=hydra_ext.Checks(poison_hosts=True)) as run:
        with EvictBeforeEveryCall():
            result = model()
        total = result.sum()
        evict_before_every_node(total)
        total.backward()
        report = run.report()
    assert report.windows == 2
    assert report.faults > 0
    assert report.spills > 0
    assert torch.equal(result, expected)
    found = model.gradients()
    for parameter, gradient in plain.gradients().items():
        assert (found[parameter] is None) == (gradient is None), parameter
        assert gradient is None or torch.equal(found[parameter], gradient), parameter


@pytest.mark.parametrize("name", ["linear", "lstm", "multi_head_attention", "foreach_mul"])
def test_without_the_fault_path_an_absent_parameter_is_an_error_of_its_own(name: str) -> None:
    model = Operation(CASES[name])
    with offloaded(model, checks=hydra_ext.Checks(poison_hosts=True, fault_path=False)) as run:
        with pytest.raises(hydra_ext.errors.PageFaultError, match="was read while absent and the fault path is off"):
            model()
        assert run.report().faults == 0


def test_more_parameters_than_the_budget_holds_in_one_operation_are_named() -> None:
    """One operation needs all its inputs at once: what is pinned and how much was asked is in the message."""
    model = Operation(lambda p: torch.cat([p.w, p.v, p.table, p.w_in, p.w_hidden]))
    blocks = [f"holders.{name}" for name in model.holders]
    largest = max(parameter.nbytes for parameter in model.parameters())
    with hydra_ext.offload(model, budget=2 * largest, blocks=blocks) as run:
        with pytest.raises(torch.OutOfMemoryError, match=r"no slot for block 'holders\.\w+'.*in use") as caught:
            model()
        assert "Raise the budget" in str(caught.value)
        assert run.core.pager.pins == 0
        assert not run.core.gate.open


def test_what_an_operation_wrote_comes_home_even_if_all_is_evicted_at_once() -> None:
    def case(p: op_cases.Parameters) -> torch.Tensor:
        with torch.no_grad():
            p.w.mul_(2.0)
            p.w.add_(p.v)
        return p.w @ p.v

    plain, model = Operation(case), Operation(case)
    expected = plain()
    with offloaded(model, checks=hydra_ext.Checks(poison_hosts=True)) as run:
        with EvictBeforeEveryCall():
            result = model()
        assert run.core.pager.statistics.write_backs > 0
    assert torch.equal(result, expected)
    assert torch.equal(model.holders["w"].value, plain.holders["w"].value)


def test_the_allocator_counts_what_operations_took_and_gives_it_back() -> None:
    model = Operation(CASES["linear"])
    with offloaded(model) as run:
        model().sum().backward()
        assert run.core.memory.ledger.peak > 0
        assert run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS) == 0
