"""Blocks that behave differently in a repeated call, or only seem to, compared with plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice

WIDTH = 16
DEPTH = 4
CHECKS = Checks(poison_hosts=True)
Gradients = list[Tensor | None]


_DRAWN = random.Random(7)
CALLS = [0]  # of all deviating blocks


class Shuffle(nn.Module):
    """Permutes its output: the same numbers at other places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def order(self) -> list[int]:
        places = list(range(WIDTH))
        random.shuffle(places)
        return places

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))[:, self.order()]


class HiddenShuffle(Shuffle):
    """Shuffles with a generator to which no attribute of the module or its class leads."""

    def order(self) -> list[int]:
        return _DRAWN.sample(range(WIDTH), WIDTH)


class LayerDrop(nn.Module):
    def __init__(self, share: float = 0.02) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) if np.random.rand() > self.share else x


class Experts(nn.Module):
    """Experts with equal initial weights, so that no number shows which one is chosen."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([first, copy.deepcopy(first), copy.deepcopy(first)])
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[self.draw(3)](x))


class Deviating(nn.Module):
    """Deviates from one call on. No attribute of the module or its class shows which call."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return torch.tanh(self.linear(x * (1.0 if CALLS[0] < self.start else CALLS[0])))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


def batches(steps: int, microbatches: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, WIDTH, generator=generator) for _ in range(microbatches)] for _ in range(steps)]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()  # type: ignore[no-any-return]


def host_states() -> tuple[Any, str]:
    return random.getstate(), repr(np.random.get_state())


def seed_hosts(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def in_a_loop(model: nn.Module, steps: Sequence[Sequence[Tensor]]) -> list[Gradients]:
    """Returns the gradients of each step of plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for microbatches in steps:
        for x in microbatches:
            (loss(model, x) / len(microbatches)).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


def with_recompute(
    model: nn.Module, steps: Sequence[Sequence[Tensor]], *, rounds: bool, **choices: Any
) -> tuple[list[Gradients], hydra_ext.Report]:
    """Returns the gradients with recomputation, and the report.

    With ``rounds``, rounds call blocks again. Otherwise the stash does so in a plain loop, and offloads other tensors.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Gradients] = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    )
    activations = {"": hydra_ext.Offload(), "blocks.*": hydra_ext.Recompute()}
    with hydra_ext.offload(
        model, optimizer, budget=2**20, device=SimulatedDevice(), checks=CHECKS,
        blocks=[*model.blocks] if rounds else None, activations=None if rounds else activations,  # type: ignore
    ) as run:  # fmt: skip
        for microbatches in steps:
            if rounds:
                options = {"recompute": True, "round_size": len(microbatches), **choices}
                run.step(microbatches, lambda x: loss(model, x), **options)  # type: ignore[arg-type]
            else:
                for x in microbatches:
                    (loss(model, x) / len(microbatches)).backward()
                optimizer.step()
                optimizer.zero_grad()
        report = run.report()
    return found, report


def assert_equal(found: list[Gradients], expected: list[Gradients]) -> None:
    """Compares every step that has finished."""
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        for one, other in zip(mine, theirs, strict=True):
            zeros = one is None or not one.any()
            assert zeros if other is None else one is not None and torch.equal(one, other), f"in step {step}"
