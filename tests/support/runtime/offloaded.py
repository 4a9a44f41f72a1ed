"""An offloaded run for tests, with poisoned hosts and reports step by step, that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, Checks, Report, Run
from hydra_ext.runtime import engine


@dataclass
class Observed:
    """The run inside its context, and a report after every noted step."""

    run: Run
    reports: list[Report] = field(default_factory=list)

    def note(self, _step: int = 0) -> None:
        self.reports.append(self.run.report())


@contextmanager
def offloaded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    budget: int,
    fault_path: bool = True,
    alone: bool = True,
) -> Iterator[Observed]:
    """Calls ``hydra_ext.offload`` with poisoned hosts. At the end asserts that it was used and left nothing behind.

    Args:
        alone: Whether no other context is open around it, so that the plain engine must be back afterwards.
    """
    checks = Checks(poison_hosts=True, fault_path=fault_path)
    with hydra_ext.offload(model, optimizer, budget=budget, checks=checks) as run:
        yield Observed(run)
        assert run.core.gate.opens > 0, "nothing ran on the device, so that equality proves nothing"
        assert not run.core.gate.open
        assert run.core.pager.pins == 0
        assert run.core.gate.foreign_entries == 0, "parameters that the window did not replace"
        assert run.report().peak_bytes <= budget
    assert not (alone and engine.installed())
    assert run.core.pager.resident_bytes == run.core.memory.slot_bytes == 0
    assert run.core.memory.ledger.in_use_by(_C.MemoryClass.WEIGHTS) == 0
    assert run.core.memory.ledger.in_use_by(_C.MemoryClass.BUFFERS) == 0


def updated_bytes(run: Run) -> int:
    """Returns the bytes that move to the device after an optimizer step: all blocks with a trainable parameter."""
    alignment = _C.PAGE_ALIGNMENT
    return sum(
        sum(-(-parameter.nbytes // alignment) * alignment for _, parameter in block.parameters)
        for block in run.layout.blocks
        if any(parameter.requires_grad for _, parameter in block.parameters)
    )


def gradient_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
