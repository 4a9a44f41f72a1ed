"""Models that take their inputs in different ways, for stages of a plain module."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

WIDTH = 32
LAYERS = 8
CLASSES = 7
ROWS = 5  # most rows of a microbatch
Fn = Callable[[nn.Module, Any], Tensor]
Pair = namedtuple("Pair", ["x", "labels"])
TABLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))  # held by no module


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks one after another, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class OfDict(Stack):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return super().forward(given["x"])


class OfTuple(Stack):
    def forward(self, given: tuple[Tensor, dict[str, list[Tensor]]]) -> Tensor:
        x, rest = given
        return super().forward(x) + rest["more"][0].mean()


class OfNamed(Stack):
    def forward(self, given: Any) -> Any:
        return super().forward(given.x), given.labels


class OfPacked(Stack):
    def forward(self, given: PackedSequence) -> Tensor:
        return super().forward(given.data)


class PassesOn(Stack):
    """Also returns its input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class LateInput(Stack):
    """Only the last stage's glue, and its loss, need ``late``."""

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        return super().forward(x) * late


class BetweenBlocks(Stack):
    """Reads two inputs after each block; they may be one."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, other: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = layer(h) * (1 if mask is None else mask) + other
        out: Tensor = self.head(h)
        return out


class OfNumbers(Stack):
    """Takes integers, and reads others between blocks."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = F.one_hot(ids, WIDTH).float()
        for number, layer in enumerate(self.layers):
            x = layer(x).index_select(0, positions) if number % 3 == 1 else layer(x)
        out: Tensor = self.head(x)
        return out


class WritesInput(Stack):
    """Changes its input, in glue and then in a block."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class WritesBeside(BetweenBlocks):
    """Writes to one of its inputs, which may show in the other."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, other: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x, mask, other=other)


class WritesNumbers(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        ids.add_(1).remainder_(WIDTH)
        marks = x = F.one_hot(ids, WIDTH).float()
        for layer in self.layers:
            x = layer(x) + marks
        out: Tensor = self.head(x)
        return out


class WritesLate(Stack):
    """Writes its blocks' results into an input tensor."""

    def forward(self, x: Tensor, notes: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            with torch.no_grad():
                notes.add_(x.detach())
        out: Tensor = self.head(x)
        return out


class Leaves(Stack):
    """Stores a block's result in the caller's dictionary."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in (1, LAYERS - 2):
                state[f"h{number}"] = x
        out: Tensor = self.head(x)
        return out


class ReadsTable(Stack):
    """Reads a part of a constant that no module has."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + TABLE[: x.shape[0]]
        out: Tensor = self.head(x)
        return out


class TakesScale(Stack):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        out: Tensor = self.head(x)
        return out


class ReadsWeights(Stack):
    """Reads views of a block's weights without calling the block."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x + F.linear(x, self.layers[-1].linear.weight.t().t())
        out: Tensor = self.head(x)
        return out


# ---- functions of a microbatch --------------------------------------------------------------------------------------
def _loss(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out, labels)


def _autocast(model: nn.Module, mb: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _loss(model(mb["x"]).float(), mb["labels"])


def _packed(model: nn.Module, mb: Any) -> Tensor:
    packed = pack_padded_sequence(mb["x"][None], torch.tensor([len(mb["x"])]), batch_first=True)
    return _loss(model(packed), mb["labels"])


def _conditioned(model: nn.Module, mb: Any) -> Tensor:
    """Calls the model with its own result."""
    with torch.no_grad():
        first = model(mb["x"])
    hint = F.pad(first * 0.5, (0, WIDTH - CLASSES))
    return _loss(model(mb["x"] + hint), mb["labels"])


def _parts(model: Any, mb: Any) -> Tensor:
    x = mb["x"]
    for layer in model.layers:
        x = layer(x) + mb["other"]
    return _loss(model.head(x), mb["labels"])


def _passed(model: nn.Module, mb: Any) -> Tensor:
    out, x = model(mb["x"])
    return _loss(out, mb["labels"]) + x.square().mean() * out.mean()


def _named(model: nn.Module, mb: Any) -> Tensor:
    out, labels = model(Pair(mb["x"], mb["labels"]))
    return _loss(out, labels)


def _written(model: nn.Module, mb: Any) -> Tensor:
    x = mb["x"].clone()
    return _loss(model(x), mb["labels"]) * (1 + x.abs().mean() + mb["x"].abs().mean())


def _written_given(model: nn.Module, mb: Any) -> Tensor:
    return _loss(model(mb["x"]), mb["labels"]) * (1 + mb["x"].abs().mean())


def _written_late(model: nn.Module, mb: Any) -> Tensor:
    notes = torch.zeros_like(mb["x"])
    return _loss(model(mb["x"], notes), mb["labels"]) * (1 + notes.abs().mean())


def _left(model: nn.Module, mb: Any) -> Tensor:
    state: dict[str, Tensor] = {}
    out = model(mb["x"], state)
    return _loss(out, mb["labels"]) + sum(h.square().mean() for h in state.values())


def _left_in_microbatch(model: nn.Module, mb: Any) -> Tensor:
    out = model(mb["x"], mb)
    return _loss(out, mb["labels"]) + mb["h1"].square().mean()


def _wants_gradient(model: nn.Module, mb: Any) -> Tensor:
    x = (mb["x"] * 2).requires_grad_()
    return _loss(model(x), mb["labels"]) + x.square().mean()


@dataclass(frozen=True)
class Subject:
    make: type[Stack]
    fn: Fn


SUBJECTS: dict[str, Subject] = {
    "tensor": Subject(Stack, lambda model, mb: _loss(model(mb["x"]), mb["labels"])),
    "dict": Subject(OfDict, lambda model, mb: _loss(model(mb), mb["labels"])),
    "tuple": Subject(OfTuple, lambda m, mb: _loss(m((mb["x"], {"more": [mb["other"], mb["ids"]]})), mb["labels"])),
    "named tuple": Subject(OfNamed, _named),
    "packed": Subject(OfPacked, _packed),
    "passed on": Subject(PassesOn, _passed),
    "late": Subject(LateInput, lambda m, mb: _loss(m(mb["x"], late=mb["late"]), mb["labels"]) * mb["late"].mean()),
    "between blocks": Subject(BetweenBlocks, lambda m, mb: _loss(m(mb["x"], mb["x"], other=mb["x"]), mb["labels"])),
    "two inputs": Subject(BetweenBlocks, lambda m, mb: _loss(m(mb["x"], other=mb["other"]), mb["labels"])),
    "numbers": Subject(OfNumbers, lambda m, mb: _loss(m(mb["ids"], mb["positions"]), mb["labels"])),
    "written": Subject(WritesInput, _written),
    "written, the microbatch's": Subject(WritesInput, _written_given),
    "written views": Subject(WritesBeside, lambda m, mb: _loss(m(mb["x"], other=mb["other"]), mb["labels"])),
    "written numbers": Subject(WritesNumbers, lambda m, mb: _loss(m(mb["ids"]), mb["labels"])),
    "written late": Subject(WritesLate, _written_late),
    "left": Subject(Leaves, _left),
    "left in the microbatch": Subject(Leaves, _left_in_microbatch),
    "table": Subject(ReadsTable, lambda m, mb: _loss(m(mb["x"]), mb["labels"])),
    "buffer as input": Subject(TakesScale, lambda m, mb: _loss(m(mb["x"], m.scale), mb["labels"])),
    "weights": Subject(ReadsWeights, lambda m, mb: _loss(m(mb["x"]), mb["labels"])),
    "wants gradients": Subject(Stack, _wants_gradient),
    "autocast": Subject(Stack, _autocast),
    "conditioned": Subject(Stack, _conditioned),
    "parts": Subject(Stack, _parts),
}
