"""Runs that share a device, and the same runs alone.

A run is a function of a context: it makes its model, enters the context, trains, and returns what it has seen. Its
draws are from the generators of the process, which every run finds in the same state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, SharedDevice, SharedReport, SimulatedDevice, optim
from support.benches import Outcome, assert_same

Context = Callable[[nn.Module, "torch.optim.Optimizer | None"], AbstractContextManager["hydra_ext.Run | None"]]
Work = Callable[[Context], Outcome]
WIDTH = 64
STEPS = 4
SLOW = 40e6  # bytes per second of a link that small models wait for


def seed_process(seed: int = 7) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def next_draws() -> list[Any]:
    """What the generators of the process give next."""
    return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]


# ---- trainings ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "native": lambda parameters: optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def stack(layers: int = 6) -> nn.Sequential:
    """Drawn from the process's generators, as its dropout is."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts)


def state(model: nn.Module) -> Outcome:
    return [parameter.detach().clone() for parameter in model.parameters()]


def draws() -> torch.Tensor:
    """A batch in which every generator of the process has a part."""
    noise = torch.from_numpy(np.random.randn(8, WIDTH)).float()
    return torch.randn(8, WIDTH) + noise * random.random()


def loop(context: Context, *, layers: int = 6, optimizer: str = "torch", steps: int = STEPS) -> Outcome:
    model = stack(layers)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    seen: Outcome = []
    with context(model, chosen):
        for _ in range(steps):
            loss = model(draws()).square().mean()
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            seen.append(loss.detach().clone())
    return [*seen, *state(model), torch.rand(2), torch.tensor(random.random()), torch.from_numpy(np.random.rand(2))]


# ---- alone and together ---------------------------------------------------------------------------------------------


def plain(_model: nn.Module, _optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Offloaded:
    """A context on a device. It notes the reports of the runs that were made in it.

    Attributes:
        budget: None for a share of the weights and room for small activations.
        options: Further arguments of :class:`hydra_ext.offload`.
    """

    device: Any
    budget: int | str | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"activations": None})
    reports: list[hydra_ext.Report] = field(default_factory=list)
    backends: list[Any] = field(default_factory=list)

    @contextmanager
    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[hydra_ext.Run]:
        weights = sum(parameter.nbytes for parameter in model.parameters())
        budget = self.budget if self.budget is not None else int(0.6 * weights) + 60_000
        checks = Checks(poison_hosts=True)
        with hydra_ext.offload(
            model, optimizer, budget=budget, device=self.device, checks=checks, **self.options
        ) as run:
            self.backends.append(run.core.memory.backend)
            yield run
            run.sync()
            self.reports.append(run.report())

    def assert_paged(self) -> None:
        """A comparison proves something only if weights have come and gone."""
        assert self.reports
        for report in self.reports:
            assert report.windows > 0
            assert report.evictions > 0


def slow_device(**options: Any) -> SimulatedDevice:
    return SimulatedDevice(to_device_bytes_per_second=SLOW, to_host_bytes_per_second=SLOW, **options)


def alone(works: Sequence[Work], context: Callable[[], Context] = lambda: plain) -> list[Outcome]:
    """What each of the runs sees with the process for itself."""
    seen = []
    for work in works:
        seed_process()
        seen.append(work(context()))
    return seen


def together(
    works: Sequence[Work], device: SharedDevice | None = None, **options: Any
) -> tuple[list[Outcome], SharedReport, list[Offloaded]]:
    """What the runs see on one device."""
    device = device or SharedDevice(slow_device(), budget="1GiB")
    contexts = [Offloaded(device, **options) for _ in works]
    seed_process()
    before = next_draws()
    seed_process()
    outcomes = device.run(*(partial(work, context) for work, context in zip(works, contexts, strict=True)))
    assert next_draws() == before
    return outcomes, device.report(), contexts


def assert_as_alone(
    works: Sequence[Work],
    device: SharedDevice | None = None,
    *,
    reference: Sequence[Outcome] | None = None,
    **options: Any,
) -> SharedReport:
    """Asserts that each run on the device has the bits that it has alone, and that they did take turns."""
    expected = alone(works) if reference is None else reference
    outcomes, report, contexts = together(works, device, **options)
    for one, other in zip(expected, outcomes, strict=True):
        assert_same(one, other)
    for context in contexts:
        context.assert_paged()
    assert report.switches > 0
    return report
