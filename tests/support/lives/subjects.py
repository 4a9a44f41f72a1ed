"""Models of a few thousand numbers, and optimizers, for random programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hydra_ext import optim
from support.lives.stateful import LAYERS_OF, Stateful

WORDS = 23
NARROW, WIDE = 16, 72


class Body(nn.Module):
    """Calls its blocks directly, or through torch's checkpoints."""

    again = "no"

    def call(self, block: nn.Module, x: Tensor) -> Any:
        if self.again == "no" or not x.requires_grad:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.again == "reentrant")


class Layered(Body):
    """Layers one after another, with or without draws from Python's and numpy's random numbers."""

    def __init__(self, width: int, layers: int, *, drops: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2 if drops else 0.0))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 4)
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            if self.drops and self.training and (random.random() if index % 2 else np.random.rand()) < 0.25:
                continue
            x = x + self.call(block, x)
        return self.head(x)


class Noisy(nn.Module):
    """A block that draws Python's and numpy's numbers itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.other = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return torch.tanh(self.linear(x))
        chosen = self.linear if random.random() < 0.5 else self.other
        return F.dropout(torch.tanh(chosen(x)), 0.1) * float(np.random.rand() + 0.5)


class Drawing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Noisy(width) for _ in range(3))
        self.layered = Layered(width, 2, drops=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = h + block(h)
        return self.layered(h[..., :8])


class Pictures(Body):
    def __init__(self, width: int) -> None:
        super().__init__()
        channels = width // 4
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(3)
        )
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


class Recurrent(Body):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([nn.LSTM(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + self.call(block, x)[0]
        return self.head(x)


class Experts(nn.Module):
    """Each sample goes to the expert that its own numbers choose; some experts may see none.

    There are four, so that the size of each parameter is a multiple of 16 bytes. Otherwise, if several lie in one
    buffer, later ones would begin at unaligned addresses, from which plain PyTorch computes other last bits.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.routers = nn.ModuleList(nn.Linear(width, 4) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)) for _ in range(2)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for router, experts in zip(self.routers, self.blocks, strict=True):
            shares = router(x).softmax(-1)
            chosen = shares.argmax(-1)
            mixed = torch.zeros_like(x)
            for index, expert in enumerate(experts):
                rows = (chosen == index).nonzero().flatten()
                if len(rows):
                    mixed = mixed.index_add(0, rows, (expert(x[rows]) * shares[rows, index, None]).to(mixed.dtype))
            x = x + mixed
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.more = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.less = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = (value.unflatten(-1, (2, -1)).transpose(1, 2) for value in self.mixed(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.less(self.more(x)))


class Text(Body):
    """A small transformer. Its head may be the embedding, and a buffer has its positions."""

    def __init__(self, width: int, *, tied: bool, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(16, width)
        self.register_buffer("positions", torch.arange(16), persistent=False)
        self.blocks = nn.ModuleList(Attention(width, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.places(self.positions[: words.shape[1]])
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Subject:
    """A model, and the kind of its data: "numbers", "pictures" or "words".

    Attributes:
        room: Device bytes that one microbatch takes beside weights, in fp32: of the narrow and of the wide model.
        draws: Whether it draws random numbers from Python or numpy.
    """

    make: Callable[[int], nn.Module]
    data: str
    room: tuple[int, int]
    draws: bool = False


MODELS: dict[str, Subject] = {
    "layered": Subject(lambda width: Layered(width, 4, drops=False), "numbers", (6_000, 40_000)),
    "pictures": Subject(Pictures, "pictures", (48_000, 160_000)),
    "recurrent": Subject(Recurrent, "words", (80_000, 710_000)),
    "experts": Subject(Experts, "numbers", (6_000, 36_000)),
    "tied": Subject(lambda width: Text(width, tied=True, dropout=0.0), "words", (45_000, 215_000)),
    "text": Subject(lambda width: Text(width, tied=False, dropout=0.1), "words", (48_000, 230_000)),
    "drawing": Subject(Drawing, "numbers", (8_000, 45_000), draws=True),
}
STATELESS = (*MODELS,)  # except for running statistics
MODELS |= {
    name: Subject(lambda width, layer=layer: Stateful(width, layer), "numbers", (12_000, 80_000))  # type: ignore[misc]
    for name, layer in LAYERS_OF.items()
}


def _muon(parameters: list[Any]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() == 2]
    rest = [p for p in parameters if p.dim() != 2]
    groups = [{"params": matrices, "orthogonalize": True}, {"params": rest, "orthogonalize": False}]
    return optim.Muon([group for group in groups if group["params"]], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "torch.SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "torch.AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "torch.Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "torch.RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    "torch.Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: optim.Adam(parameters, lr=1e-2, weight_decay=0.01),
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=1e-2),
    "AdamW with moments in bf16": lambda parameters: optim.AdamW(parameters, lr=1e-2, moments=torch.bfloat16),
    "AdamW with a master in fp32": lambda parameters: optim.AdamW(parameters, lr=1e-2, master="fp32"),
    "NAdamW": lambda parameters: optim.NAdamW(parameters, lr=1e-2),
    "DelayCorrectedAdamW": lambda parameters: optim.DelayCorrectedAdamW(parameters, lr=1e-2),
    "Muon": _muon,
}
# Native optimizers: their update runs behind the next forward, and only their state can go to the disk.
HOST_OPTIMIZERS = ("SGD", "Adam", "AdamW", "AdamW with moments in bf16", "AdamW with a master in fp32")
FP32_ONLY = ("NAdamW", "DelayCorrectedAdamW", "Muon")


def batch(model: str, seed: int) -> tuple[Tensor, Tensor]:
    """Draws a microbatch: the model's input and its target."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 + seed % 3
    kind = MODELS[model].data
    if kind == "words":
        words = torch.randint(WORDS, (rows, 4 + seed % 2), generator=generator)
        return words, words.roll(-1, 1)
    shape = (rows, 3, 6, 6) if kind == "pictures" else (rows, 8)
    return torch.randn(shape, generator=generator), torch.randint(4, (rows,), generator=generator)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    inputs, wanted = given
    if inputs.is_floating_point():
        inputs = inputs.to(next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), wanted.flatten())
