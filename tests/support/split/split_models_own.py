"""Our own models to cut into stages. Each is difficult in one way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.split.split_models import VOCABULARY, Batch, Subject, tokens


def text(generator: torch.Generator) -> Batch:
    return {"x": tokens(generator, 2, 12), "y": tokens(generator, 2, 12)}


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def pictures(generator: torch.Generator) -> Batch:
    pixels = torch.randn(3, 3, 32, 32, generator=generator)
    return {"x": pixels, "y": torch.randint(0, 10, (3,), generator=generator)}


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Layer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 48)
        self.down = nn.Linear(48, width)
        self.norm = nn.LayerNorm(width)

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Any:
        return x + self.branch(x)


class Stack(nn.Module):
    """An embedding, layers one after another, and a head."""

    def __init__(self, layer: type[nn.Module] = Layer, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class OutsideResidual(nn.Module):
    """Residual sums, a learned scale and one norm for all layers lie outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(torch.randn(1, 16, 32) * 0.1)
        self.scale = nn.Parameter(torch.ones(()))
        self.attention = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.embed(x) + self.positions[:, :length]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=h.device), 1)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            h = h + attention(h, h, h, attn_mask=mask, need_weights=False)[0] * self.scale
            h = h + mlp(self.norm(h))
        out: Tensor = self.head(h)
        return out


class Functional(Stack):
    """Reads the weights of blocks without calling them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 2:
                first = self.layers[0]
                h = h + F.linear(F.linear(h, first.up.weight), first.down.weight)
        return F.linear(h, self.embed.weight)


class InPlace(Stack):
    """Changes the blocks' results in place, and adds an older tensor repeatedly."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        first = h.clone()
        for layer in self.layers:
            h = layer(h)
            h += first
            h *= 0.5
        out: Tensor = self.head(h)
        return out


class InPlaceUnseen(Stack):
    """Changes the blocks' results in place without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
            with torch.no_grad():
                h *= 0.5
        out: Tensor = self.head(h)
        return out


class Collects(Stack):
    """Writes its layers' results into rows of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        rows = torch.zeros(4, *h.shape)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            rows[i] = h
        out: Tensor = self.head(h + rows.mean(0))
        return out


class LeavesTensor(Layer):
    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        self.aux = y.pow(2).mean()
        return x + y


class OnModules(Stack):
    """Its layers store a loss on themselves."""

    def __init__(self) -> None:
        super().__init__(LeavesTensor)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(layer.aux for layer in self.layers)  # type: ignore[return-value]


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits, more = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) + more


class Appends(Layer):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:  # type: ignore[override]
        y = self.branch(x)
        kept.append((y * 2).mean())
        return x + y


class IntoList(Stack):
    """Its layers append to a list argument, which the rehearsal cannot follow."""

    def __init__(self) -> None:
        super().__init__(Appends)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        kept: list[Tensor] = []
        for layer in self.layers:
            h = layer(h, kept)
        return self.head(h), sum(kept)  # type: ignore[return-value]


class Branches(Stack):
    """Python code branches on the blocks' results."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
            if h.detach().norm() > 1:
                h = h / 2
        out: Tensor = self.head(h)
        return out


class Reads(Stack):
    """Python code reads values without an operation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 0:
                h = h * float(h.detach().numpy().std())
            if i == 1:
                h = h + torch.tensor(h.detach().mean((0, 1)).tolist())
            if i == 2:
                h = h * torch.tensor([h.detach().std(), 0.5]).max()
        out: Tensor = self.head(h)
        return out


class Repeats(Stack):
    """Two layers, called three times each."""

    def __init__(self) -> None:
        super().__init__(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i in range(6):
            h = self.layers[i % 2](h)
        out: Tensor = self.head(h)
        return out


class Catches(Repeats):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i in range(4):
            try:
                h = self.layers[i % 2](h)
            except Exception:  # noqa: BLE001
                h = h * 0
        with torch.no_grad():
            h.sum()
        out: Tensor = self.head(h)
        return out


class CatchesAll(Repeats):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i in range(4):
            try:
                h = self.layers[i % 2](h)
            except:  # noqa: E722
                h = h * 0
        out: Tensor = self.head(h)
        return out


class ConvBlock(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """A network with skip connections over many blocks, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 16), ConvBlock(16, 32)])
        self.middle = ConvBlock(32, 32)
        self.wider = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((32, 32), (32, 16), (16, 8)))
        self.up = nn.ModuleList([ConvBlock(64, 32), ConvBlock(32, 16), ConvBlock(16, 8)])
        self.head = nn.Conv2d(8, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for wider, block, skip in zip(self.wider, self.up, reversed(skips), strict=True):
            x = block(torch.cat([wider(x), skip], 1))
        return self.head(x).mean((2, 3))


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.way = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.straight = inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(self.relu(self.first_norm(self.first(x)))))
        y += x if self.straight else self.way(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """A network with operations in place outside the blocks, batch statistics, and dropout before the head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.layer3 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.dropout(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


OWN: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject("unet", UNet, pictures, picture_loss),
        Subject("resnet", ResNet, pictures, picture_loss),
        Subject("resnet_dropout", lambda: ResNet(0.3), pictures, picture_loss, random=True),
        Subject("outside_residual", OutsideResidual, text, text_loss),
        Subject("functional", Functional, text, text_loss),
        Subject("in_place", InPlace, text, text_loss),
        Subject("in_place_unseen", InPlaceUnseen, text, text_loss),
        Subject("collects", Collects, text, text_loss),
        Subject("on_modules", OnModules, text, two_losses),
        Subject("branches", Branches, text, text_loss),
        Subject("reads", Reads, text, text_loss),
        Subject("repeats", Repeats, text, text_loss),
        Subject("catches", Catches, text, text_loss),
        Subject("catches_all", CatchesAll, text, text_loss),
    )
}
