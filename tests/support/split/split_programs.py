"""Random programs over blocks: operations of a forward between blocks, drawn from a seed."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


WRITES = frozenset({"fresh", "fresh rows", "rows", "sum in place", "write through view", "in place unseen"})


class Block(nn.Module):
    """Sometimes returns several values, one of them its argument; sometimes stores a tensor on itself."""

    left: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> object:
        y = torch.tanh(self.linear(x)) if other is None else torch.tanh(self.linear(x) + other)
        if self.kind == "pair":
            return y, {"mean": y.mean(-1, keepdim=True), "given": x, "flag": True}
        if self.kind == "leaves":
            self.left = y.square().mean()
        if self.kind == "drops":
            y = F.dropout(y, 0.25)
        if self.kind == "writes":
            x.add_(y)
            return x
        return y


class Program(nn.Module):
    """The same steps in every forward of one program."""

    KINDS = ("plain", "plain", "pair", "pair", "leaves", "leaves", "drops", "drops", "writes")
    STEPS = (
        *("call", "call", "call", "call two", "sum", "fresh", "fresh rows", "scale", "view", "halves", "detached"),
        *("branch", "noise", "rows", "masked", "weight", "left", "where"),
        *("sum in place", "write through view", "in place unseen"),  # few uses can be differentiated
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        choices = random.Random(seed)
        self.blocks = nn.ModuleList(Block(choices.choice(self.KINDS)) for _ in range(choices.randint(3, 5)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.steps = [choices.choice(self.STEPS) for _ in range(choices.randint(8, 18))]

    def forward(self, x: Tensor) -> Tensor:
        choices = random.Random(self.seed + 1)
        pool = [x * self.scale]
        last: Block | None = None
        for step in self.steps:
            value = choices.choice(pool[-4:])
            other = choices.choice(pool)
            if step in ("call", "call two"):
                last = choices.choice(list(self.blocks))
                output = last(value, other) if step == "call two" and last.kind != "writes" else last(value)
                found = output if isinstance(output, tuple) else (output,)
                pool.append(found[0])
                if len(found) > 1:
                    pool.append(found[0] * found[1]["mean"] + found[1]["given"])
            elif step == "left" and last is not None and hasattr(last, "left"):
                pool.append(value + last.left)
            else:
                self._between(step, value, other, pool, choices)
        return torch.stack([value.mean() for value in pool]).sum()

    def _between(self, step: str, value: Tensor, other: Tensor, pool: list[Tensor], choices: random.Random) -> None:
        if step == "sum":
            pool.append(value + other)
        elif step == "fresh":
            fresh = value + other
            fresh += other.detach()
            pool += [fresh, fresh.view(2, 3, WIDTH)]
        elif step == "fresh rows":
            fresh = value + 1
            row = fresh[:, choices.randrange(3)]
            row += other[:, 0]
            pool.append(fresh)
        elif step == "sum in place":
            value += other.detach()
        elif step == "scale":
            pool.append(value * self.scale)
        elif step == "view":
            pool.append(value.view(2, 3, WIDTH))
        elif step == "write through view":
            value[:, choices.randrange(3)].add_(1)
        elif step == "halves":
            first, second = value.chunk(2, -1)
            pool.append(torch.cat((second, first), -1))
        elif step == "detached":
            pool.append(value.detach() * 2 + other)
        elif step == "branch":
            pool.append(value * 2 if value.detach().sum() > 0 else value - 1)
        elif step == "noise":
            pool.append(value + torch.randn(WIDTH))
        elif step == "rows":
            rows = torch.zeros(2, 3, WIDTH)
            rows[:, 1] = value[:, 0]
            rows[:, 2] = other[:, 1]
            pool.append(rows)
        elif step == "masked":
            mask = torch.ones(2, 3, 1)
            mask[0, 1] = 0
            pool.append(value * mask)
        elif step == "weight":
            pool.append(F.linear(value, self.blocks[0].linear.weight))
        elif step == "where":
            pool.append(torch.where(value.detach() > other.detach(), value, other))
        elif step == "in place unseen":
            with torch.no_grad():
                value.mul_(0.5)


def make_program(seed: int) -> Program:
    torch.manual_seed(seed)
    return Program(seed)


def make_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 3, WIDTH, generator=generator) for _ in range(count)]
