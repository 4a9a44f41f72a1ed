"""A forward that reads other values than in the rehearsal, though it makes the same calls, is refused at any time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.errors import SplitError
from support.split.split_models_own import Layer, Stack, text, text_loss
from support.split.split_stages import Stages, cut, rehearsed

BATCHES = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]


class Sees(Layer):
    """Returns beside its output a mask, ranks and numbers; and has a mask of its own."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(32) % 2 == 0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = x + self.branch(x)
        if mask is not None:
            y = torch.where(mask, y, y * 0.5)
        return y, (y > 0, y.detach().sort(-1).indices, y.detach() * 1)


class Chooses(Stack):
    """With ``use`` 2 every stage that comes to the glue after the third layer finds there what it needs."""

    use = 2
    kind = "mask"

    def __init__(self) -> None:
        super().__init__(Sees)

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        seen: list[Any] = []
        for number, layer in enumerate(self.layers):
            h, found = layer(h, seen[self.use][0]) if number == 3 and self.kind == "block" else layer(h)
            seen.append(found)
            if number == 2:
                h = self.changed(h, seen, x)
        return self.head(h)

    def changed(self, h: Tensor, seen: list[Any], x: Tensor) -> Tensor:
        mask, ranks, numbers = seen[self.use]
        if self.kind == "mask":
            return torch.where(mask, h, h * 0.5)
        if self.kind == "view of a mask":
            return torch.where(mask[:, :, :16].repeat(1, 1, 2), h, h * 0.5)
        if self.kind == "ranks":
            return h * (ranks < 16)
        if self.kind == "compared numbers":
            return h * (numbers > 0)
        if "buffer" in self.kind:
            layer: Any = self.layers[self.use]
            kept = layer.kept[None] if self.kind == "buffer" else ~layer.kept
            return torch.where(kept, h, h * 0.5)
        return h


KINDS = ["mask", "view of a mask", "ranks", "compared numbers", "buffer", "made from a buffer", "block"]


def cut_stages(kind: str) -> tuple[nn.Module, Stages]:
    torch.manual_seed(0)
    model = Chooses()
    model.kind = kind
    return model, cut(model, text_loss, rehearsed(model, text_loss, BATCHES[0]), [3])


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_not_come_to_the_stage_is_never_read(kind: str) -> None:
    model, stages = cut_stages(kind)
    for batch in BATCHES[:2]:
        assert torch.equal(stages.forward(batch)[-1].loss, text_loss(model, batch))
    for part in stages.models:
        part.use = 0
    with pytest.raises(SplitError, match="the rehearsal did not see"):
        stages.forward(BATCHES[2])


class UsesShapes(Chooses):
    """Later stages look at the shapes of what has not come to them, and give it to blocks that do not read it."""

    use = 0

    def changed(self, h: Tensor, seen: list[Any], x: Tensor) -> Tensor:
        mask, ranks, numbers = seen[self.use]
        return h.expand_as(mask).to(numbers) + F.one_hot(torch.zeros_like(ranks[..., 0]), 32)


def test_the_shape_of_what_has_not_come_may_be_read() -> None:
    torch.manual_seed(0)
    model = UsesShapes()
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCHES[0]), [3])
    for batch in BATCHES:
        assert torch.equal(stages.forward(batch)[-1].loss, text_loss(model, batch))
