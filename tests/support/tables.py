"""Models with embedding tables, their training with and without an offload context, and what moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Report, Run

ROWS, WIDTH = 7000, 16
BATCH = 16
BUDGET = ROWS * WIDTH * 4 // 10  # a tenth of one table
HOST_BUDGET = 320_000  # below one table, and above what is kept of the rows of two
Batch = dict[str, Any]
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Recommender(nn.Module):
    """Two tables, of one index and of bags of indices, below a small network."""

    def __init__(self, *, sparse: bool, mode: str = "sum", twice: bool = False, **options: Any) -> None:
        super().__init__()
        by_bags = {name: options.pop(name) for name in ("include_last_offset",) if name in options}
        self.one = nn.Embedding(ROWS, WIDTH, sparse=sparse, **options)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode=mode, **options, **by_bags)
        self.bottom = nn.Linear(WIDTH, WIDTH)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
        self.twice = twice

    def forward(self, batch: Batch) -> Tensor:
        found = self.bottom(self.one(batch["one"]))
        if self.twice:
            # After a block, so that two pieces of a round's graph lead to the table. The gradient of a part of a
            # concatenation has gaps.
            found = torch.cat([found[:, : WIDTH // 2], self.one(batch["again"])], dim=1)[:, :WIDTH] * found
        return self.top(
            torch.cat([found, self.bags(batch["indices"], batch["offsets"], batch.get("weights"))], dim=1)
        ).squeeze(1)


def batches(count: int, *, seed: int = 0, weighted: bool = False, last_offset: bool = False) -> list[Batch]:
    """Batches with indices that repeat, bags without any index, and numbers that meet padding and negative zeros."""
    made = torch.Generator().manual_seed(seed)
    found: list[Batch] = []
    for _ in range(count):
        lengths = torch.randint(0, 5, (BATCH,), generator=made)
        ends = lengths.cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        indices = torch.randint(0, ROWS, (int(ends[-1]),), generator=made) // 7
        one, again = torch.randint(0, ROWS, (2, BATCH), generator=made) % 50
        batch = {
            "one": one,
            "again": again,
            "indices": indices,
            "offsets": offsets if last_offset else offsets[:-1],
            "target": torch.randn(BATCH, generator=made),
        }
        if weighted:
            batch["weights"] = torch.randn(len(indices), generator=made)
        found.append(batch)
    return found


@dataclass
class Trained:
    """What a training has come to: losses, gradients of the last step, weights, and the optimizer's state."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    report: Report | None = None


def train(
    model: Recommender,
    make: Optimizer,
    given: Sequence[Batch],
    *,
    accumulate: int = 1,
    budget: int | None = None,
    way: str = "loop",
    device: Any = None,
    step: dict[str, Any] | None = None,
    gradients: bool = True,
    between: Callable[[Run | None, int], None] = lambda _run, _step: None,
    home: dict[str, Any] | None = None,
) -> Trained:
    """Trains over the batches; without a budget, as plain PyTorch does.

    Args:
        accumulate: Batches of one step.
        way: "loop", or "step" for ``run.step``; plain PyTorch loops in any case.
        device: Where to compute; by default a simulated device that poisons what it gives away.
        step: Arguments of ``run.step``.
        gradients: Whether to read the gradients of each step, which makes them dense.
        between: Called after each step.
        home: Arguments of ``offload`` that say where tables are at home.
    """
    optimizer = make(model.parameters())
    found = Trained()

    def loss_of(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch), batch["target"])

    def loop(run: Run | None) -> None:
        for number, first in enumerate(range(0, len(given), accumulate)):
            group = given[first : first + accumulate]
            if run is not None and way == "step":
                found.losses += run.step(group, loss_of, **(step or {})).losses
            else:
                for batch in group:
                    loss = loss_of(batch)
                    (loss / accumulate).backward()
                    found.losses.append(loss.detach().clone())  # outside, where it is no memory of the device
                if gradients:
                    found.gradients = [p.grad if p.grad is None else copied(p.grad) for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            between(run, number)

    if budget is None:
        loop(None)
    else:
        place = hydra_ext.SimulatedDevice(poison=True) if device is None else device
        with hydra_ext.offload(model, optimizer, budget=budget, device=place, **(home or {})) as run:
            loop(run)
            found.report = run.report()
            assert found.report.peak_bytes <= budget
    found.tensors = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        found.tensors += [value.clone() for _, value in sorted(state.items()) if torch.is_tensor(value)]
    return found


def copied(gradient: Tensor) -> Tensor:
    return gradient.detach().clone()


def expect_same(found: Trained, expected: Trained, *, gradients: bool = True) -> None:
    """Asserts that two trainings have the same bits, of sparse gradients also their indices in their order."""
    pairs = list(zip(found.losses, expected.losses, strict=True))
    pairs += zip(found.tensors, expected.tensors, strict=True)
    for ours, plain in zip(found.gradients, expected.gradients, strict=True) if gradients else ():
        assert (ours is None) == (plain is None)
        if ours is not None and plain is not None:
            pairs += zip(parts(ours), parts(plain), strict=True)
    for ours, plain in pairs:
        assert bits(ours).equal(bits(plain))


def parts(gradient: Tensor) -> list[Tensor]:
    return [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]


def bits(tensor: Tensor) -> Tensor:
    """The bytes, so that negative zeros differ from zeros, and a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def rows_of(given: Sequence[Batch], *, unique: bool) -> int:
    """Rows that the batches look up in both tables, each once a call, or each as often as it is named."""
    count = (lambda indices: len(indices.unique())) if unique else len
    return sum(count(batch["one"]) + count(batch["indices"]) for batch in given)
