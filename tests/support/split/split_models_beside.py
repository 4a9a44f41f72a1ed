"""Models with side effects beside their blocks' results: they count, keep caches, examine graphs, measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from support.split.split_models import VOCABULARY
from support.split.split_models_own import Layer, Stack


class FirstTime(Stack):
    """Treats the first microbatch differently; ``kind`` says where it remembers that there was one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.name, self.counts = True, "first", {"all": [0]}

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * (2.0 if self.first and self.name == "first" and self.counts["all"][0] == 0 else 1.0)
        for layer in self.layers:
            h = layer(h)
        if self.kind == "flag":
            self.first = False
        elif self.kind == "name":
            self.name = "later"
        else:
            self.counts["all"][0] += 1
        out: Tensor = self.head(h)
        return out


class CountingLayer(Layer):
    """Counts its calls in the way that the model chooses, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.stats: dict[str, float] = {"calls": 0.0}
        self.object = Counter()
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.stats["calls"] += 1
        self.object.number += 1
        self.seen.add(self.calls)
        return x + self.branch(x) / (self.calls + self.stats["calls"] + self.object.number)


class Counter:
    number = 0


class Counting(Stack):
    """Counting layers. If given, ``read`` reads the first layer's count after the last layer."""

    def __init__(self, read: Callable[[CountingLayer], float] | None = None) -> None:
        super().__init__(CountingLayer)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        if self.read is not None:
            h = h * (1 + self.read(self.layers[0]))  # type: ignore[arg-type]
        out: Tensor = self.head(h)
        return out


class CountingRepeats(nn.Module):
    """One counting layer, called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([CountingLayer()])
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(4):
            h = self.layers[0](h)
        out: Tensor = self.head(h)
        return out


class CountsGiven(Layer):
    """Counts in an object among its arguments."""

    def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
        if isinstance(given, list):
            given.append(1)
            number = len(given)
        elif isinstance(given, dict):
            number = given["calls"] = given.get("calls", 0) + 1
        else:
            given.number += 1
            number = given.number
        return x + self.branch(x) / number


class GivesCounter(Stack):
    """Gives all layers one object, in which they count."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__(CountsGiven)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        given = self.kind()
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, given)
        out: Tensor = self.head(h)
        return out


class Memory:
    """The part of a cache that one layer keeps."""

    def __init__(self) -> None:
        self.ready = False
        self.kept: Tensor | None = None


class Cached(Layer):
    def forward(self, x: Tensor, cache: Any, number: int) -> Tensor:  # type: ignore[override]
        y = self.branch(x)
        if isinstance(cache, dict):
            cache[number] = (y, y * 2)
            return x + sum(cache[number])  # type: ignore[no-any-return]
        while len(cache.layers) <= number:
            cache.layers.append(Memory())
        cache.layers[number].ready = True
        cache.layers[number].kept = y
        return x + cache.layers[number].kept


class Cache:
    def __init__(self) -> None:
        self.layers: list[Memory] = []


class UsesCache(Stack):
    """Layers store their results in a cache that all are given, and each reads only its own entry."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__(Cached)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        cache = self.kind()
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = layer(h, cache, number)
        out: Tensor = self.head(h)
        return out


class Settings:
    kind = "unknown"


class SetsUp(Stack):
    """All modules share an object of settings. One setting is set and read after the blocks only."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        for layer in self.layers:
            layer.settings = self.settings

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h) * (1.0 if layer.settings is not None else 2.0)
        if self.settings.kind == "unknown":
            self.settings.kind = "text"
        out: Tensor = self.head(h)
        return out


class AsksForGraph(Stack):
    """Reads the graph of an early layer's result, and chooses a factor at the end by it."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        scale = 2.0 if self.asks(h) else 1.0
        for layer in list(self.layers)[1:]:
            h = layer(h)
        out: Tensor = self.head(h) * scale
        return out


@dataclass(frozen=True)
class Info:
    early: Tensor
    name: str


class Measures(Stack):
    """Also returns a measure of its first layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.layers[0](self.embed(x))
        norm, count = h.norm(), (h > 0).sum()
        for layer in list(self.layers)[1:]:
            h = layer(h)
        return self.head(h), norm, count
