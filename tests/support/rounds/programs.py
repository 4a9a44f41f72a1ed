"""Random programs: models whose microbatches call blocks in any order, with typical user code around and in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8
WORDS = 20
KINDS = ("plain", "nested", "in place", "more inputs")


@dataclass(frozen=True)
class Call:
    """One call of a block, and the code around it."""

    block: int
    source: int  # its input, counted back from the latest value
    mixed: bool  # whether the very first value is added
    shared: bool  # whether a parameter of the root is used
    checkpointed: str  # "no", "plain" or "reentrant"
    in_place: bool
    hooked: bool


@dataclass(frozen=True)
class Program:
    """A model, and the calls of each microbatch."""

    kinds: tuple[str, ...]
    tied: bool
    paths: tuple[tuple[Call, ...], ...]
    recompute: bool
    round_size: int
    roomy: bool
    seed: int

    def accumulates_out_of_order(self) -> bool:
        """Whether a block in a reentrant checkpoint is also called outside of it, or not by all microbatches alike."""
        nested = {call.block for path in self.paths for call in path if call.checkpointed == "reentrant"}
        uses = [
            [call.checkpointed == "reentrant" for call in path if call.block == block]
            for path in self.paths
            for block in nested
        ]
        orders = {tuple(call.block for call in path) for path in self.paths}
        return bool(nested) and (len(orders) > 1 or any(use != [True] for use in uses))

    def checkpoints(self) -> int:
        calls = [call for path in self.paths for call in path]
        sites = len(calls) + 2 * len(self.paths)
        return sites if self.recompute else sum(call.checkpointed != "no" for call in calls)

    def features(self) -> set[str]:
        calls = [call for path in self.paths for call in path]
        called = {self.kinds[call.block] for call in calls}
        found = {
            "tied weights": self.tied,
            "divergent paths": len({tuple(call.block for call in path) for path in self.paths}) > 1,
            "in-place operations": "in place" in called or any(call.in_place for call in calls),
            "checkpoints": any(call.checkpointed != "no" for call in calls),
            "nested outputs": "nested" in called,
        }
        return {name for name, there in found.items() if there}


def calls(blocks: int, checkpoint_style: str) -> st.SearchStrategy[Call]:
    sometimes = st.sampled_from([False, False, False, True])
    return st.builds(
        Call,
        block=st.integers(0, blocks - 1),
        source=st.sampled_from([0, 0, 0, 1, 2]),
        mixed=sometimes,
        shared=sometimes,
        checkpointed=st.sampled_from(["no", "no", "no", checkpoint_style]),
        in_place=sometimes,
        hooked=sometimes,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=5)))
    m = draw(st.integers(1, 4))
    # Reentrant checkpoints are rare here, since they often force the fallback.
    style = draw(st.sampled_from(["plain", "plain", "plain", "plain", "reentrant"]))
    path = st.lists(calls(len(kinds), style), max_size=6).map(tuple)
    paths = draw(st.lists(path, min_size=m, max_size=m)) if draw(st.booleans()) else [draw(path)] * m
    return Program(
        kinds=kinds,
        tied=draw(st.booleans()),
        paths=tuple(paths),
        recompute=draw(st.booleans()),
        round_size=draw(st.integers(1, m)),
        roomy=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH) if kind == "more inputs" else None

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        h = torch.tanh(self.linear(x))
        if self.kind == "nested":
            return h, {"double": h * 2, "list": [x + 1]}
        if self.kind == "in place":
            h = functional.dropout(h * 1.5, 0.1).view(-1, WIDTH)
            h += x.reshape(-1, WIDTH) * 0.1
            return h.view(x.shape)
        if self.extra is not None:
            return self.extra(h) + sum(more)
        return h + x


class Root(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(kind) for kind in program.kinds])
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor, path: tuple[Call, ...]) -> Tensor:
        values = [self.embed(words)]
        for call in path:
            x = values[-1 - min(call.source, len(values) - 1)]
            if call.mixed:
                x = x * 0.5 + values[0]
            if call.shared:
                x = functional.linear(x, self.shared)
            values += self._call(call, x, values)
        loss = sum((value.square().mean() for value in values[-3:]), start=torch.zeros(()))
        return loss + functional.cross_entropy(self.head(values[-1]).flatten(0, 1), words.flatten())

    def _call(self, call: Call, x: Tensor, values: list[Tensor]) -> list[Tensor]:
        block = self.blocks[call.block]
        more = values[-1:] if block.extra is not None else []
        if call.checkpointed == "no":
            y = block(x, *more)
        else:
            # A reentrant checkpoint without an input that has a graph would train nothing, and warn.
            y = checkpoint(block, x, *more, use_reentrant=call.checkpointed == "reentrant" and x.requires_grad)
        made: list[Tensor] = []
        if isinstance(y, tuple):
            y, others = y
            made = [others["list"][0], others["double"]]
        if call.in_place:
            y = y.clone()
            y.mul_(0.9)
        if call.hooked and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 1.1 + 0.01)
        return [*made, y]


def build(program: Program) -> Root:
    torch.manual_seed(program.seed)
    return Root(program)


def batches(program: Program) -> list[tuple[Tensor, tuple[Call, ...]]]:
    generator = torch.Generator().manual_seed(program.seed)
    return [(torch.randint(WORDS, (2, 3), generator=generator), path) for path in program.paths]
