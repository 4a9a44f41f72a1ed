"""Models whose last bits depend on the memory layout of crossing values, compared with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline

KEPT = 8


class Part(nn.Module):
    """Passes on a part of its result, transposed: with gaps, and with an offset if ``lead`` is not 0."""

    def __init__(self, lead: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 2 * KEPT)
        self.lead = lead

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., self.lead : self.lead + KEPT].transpose(1, 2)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, KEPT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.sum(-1)[0], x.transpose(1, 2)[0] @ self.weight])


class Rows(nn.Module):
    """Multiplies each row by a vector. The order of the sum depends on the address of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Straight(nn.Linear):
    """A layer whose bias gets the sum of a gradient over all rows, even if this gradient is expanded."""

    def __init__(self) -> None:
        super().__init__(31, 31)


class Narrow(nn.Linear):
    """Passes on one of many tokens, with an offset."""

    def __init__(self) -> None:
        super().__init__(40, 104)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 3, 3:67]


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.weight


class Spread(Straight):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).expand(x.shape[0], 200, 31)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(31, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sum(1))


class Whole(nn.Module):
    """A plain model of two blocks."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def square(value: Tensor, _: Any = None) -> Tensor:
    return value.square().mean()


def total(value: Tensor, _: Any = None) -> Tensor:
    return value.sum() / (3 * 17 * 31) / 3


def cases() -> dict[str, tuple[nn.Module, nn.Module, Tensor, Any]]:
    """Returns two parts of a model, a microbatch and the loss function of each case."""
    torch.manual_seed(0)
    return {
        "gaps": (Part(), Sums(), torch.randn(2, 33, 24), square),
        "gaps, not aligned": (Part(3), Sums(), torch.randn(2, 33, 24), square),
        "one of many": (Narrow(), Rows(), torch.randn(33, 9, 40), square),
        "expanded": (Spread(), Pooled(), torch.randn(3, 1, 31), square),
        "expanded gradient": (Straight(), Same(), torch.randn(3, 17, 31), total),
    }


def microbatches() -> dict[str, tuple[nn.Module, Tensor, Any]]:
    """Returns a model, a microbatch that is a view of a larger tensor, and the loss function of each case."""
    torch.manual_seed(0)
    return {
        "expanded": (Pooled(), torch.randn(3, 1, 31).expand(3, 200, 31), square),
        "gaps": (Pooled(), torch.randn(3, 31, 200).transpose(1, 2)[:, ::2], square),
        "not aligned": (Rows(), torch.randn(33, 104)[:, 3:67], square),
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plainly(parts: Sequence[nn.Module], microbatch: Tensor, loss_of: Any) -> tuple[Tensor, list[list[Tensor]]]:
    """Returns the loss, and each part's weights after one step, of copies of the parts."""
    parts = copy.deepcopy(list(parts))
    value = microbatch
    for part in parts:
        value = part(value)
    loss = loss_of(value)
    loss.backward()
    sgd([parameter for part in parts for parameter in part.parameters()]).step()
    return loss.detach(), [[parameter.detach() for parameter in part.parameters()] for part in parts]


def differing(
    parts: Sequence[nn.Module], microbatch: Tensor, loss_of: Any, held: Sequence[int], **options: Any
) -> list[str]:
    """Lists differences of one step of a pipeline on this rank, which has the parts ``held``."""
    loss, weights = plainly(parts, microbatch, loss_of)
    with Pipeline(None, sgd, stages=list(parts), microbatches=1, **options) as pipe:
        found = [] if torch.equal(pipe.step([microbatch], loss_of).loss, loss) else ["loss"]
    return found + _differing(parts, weights, held)


def differing_plain(parts: Sequence[nn.Module], microbatch: Tensor, loss_of: Any, held: Sequence[int]) -> list[str]:
    """Lists the same differences for a plain model that is cut between the two parts."""
    loss, weights = plainly(parts, microbatch, loss_of)
    model = Whole(*parts)
    with Pipeline(model, sgd, schedule="1f1b", microbatches=1, cuts=["second"]) as pipe:
        found = [] if torch.equal(pipe.step([microbatch], lambda x: loss_of(model(x))).loss, loss) else ["loss"]
    return found + _differing([model.first, model.second], weights, held)


def _differing(parts: Sequence[nn.Module], weights: list[list[Tensor]], held: Sequence[int]) -> list[str]:
    pairs = [
        (number, *pair) for number in held for pair in zip(parts[number].parameters(), weights[number], strict=True)
    ]
    return [f"weight of {number}" for number, weight, expected in pairs if not torch.equal(weight, expected)]


def across_ranks(rank: int) -> dict[str, Any]:
    """Returns the differences by case."""
    found = {}
    for name, (first, second, x, loss_of) in cases().items():
        found[name] = differing([first, second], x, loss_of, [rank], schedule="1f1b")
    for name in ("gaps", "expanded gradient"):
        first, second, x, loss_of = cases()[name]
        found[f"{name}, plain"] = differing_plain([first, second], x, loss_of, [rank])
    return found
