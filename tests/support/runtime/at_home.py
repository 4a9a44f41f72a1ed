"""A model whose blocks are all at home on the device, and its plain twin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice, optim
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, LAYERS, stack, state, train

ROOMY = 2**20
Made = tuple[nn.Sequential, torch.optim.Optimizer]
Work = Callable[[nn.Sequential, torch.optim.Optimizer], Outcome]


class Shrinking(nn.Linear):
    """Writes to its weight in every forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> Made:
    model = stack(dtype)
    return model, optim.AdamW(model.parameters(), lr=1e-2, **options)


def offloaded(made: Made, *, activations: Literal["auto"] | None = "auto", **device: Any) -> hydra_ext.offload:
    model, optimizer = made
    return hydra_ext.offload(
        model,
        optimizer,
        budget=ROOMY,
        blocks=list(model.children()),
        device=SimulatedDevice(**device),
        checks=Checks(poison_hosts=False),
        activations=activations,
    )


@contextmanager
def at_home(made: Made, **device: Any) -> Iterator[Run]:
    """Offloads a model. After five steps all blocks are at home on the device."""
    with offloaded(made, **device) as run:
        train(*made)
        assert len(run.report().homes) == LAYERS
        yield run


def compare(work: Work, *, make: Callable[[], Made] = make, returned: bool | None = True) -> None:
    """Asserts that ``work`` returns and leaves the same as after the plain loop.

    Args:
        returned: Whether a block must have come back to the host, or none may have; None for either.
    """
    plain, ours = make(), make()
    train(*plain)
    expected = work(*plain)
    with at_home(ours) as run:
        assert_same(expected, work(*ours))
        assert returned is None or (run.core.homes.statistics.returned > 0) is returned
    assert_same(state(*plain), state(*ours))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], Any] = lambda: None) -> Outcome:
    """Trains with two microbatches a step, and calls ``between`` before the step."""
    seen: Outcome = []
    for batch in BATCHES:
        for microbatch in batch.to(next(model.parameters()).dtype).split(4):
            loss = model(microbatch).pow(2).mean()
            loss.backward()
            seen.append(loss.detach().clone())
        between()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def in_another_thread(read: Callable[[], Any]) -> None:
    failed: list[Exception] = []

    def run() -> None:
        try:
            read()
        except Exception as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed


class Reading(TorchDispatchMode):
    """Lets another thread read a tensor before every operation, or before those in ``before``."""

    def __init__(self, tensor: torch.Tensor, *, before: tuple[Any, ...] | None = None) -> None:
        super().__init__()
        self._tensor = tensor
        self._before = before
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._before is None or func in self._before:
            self.reads += 1
            in_another_thread(lambda: self._tensor.detach().sum())
        return func(*args, **(kwargs or {}))
