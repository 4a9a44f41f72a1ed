"""Reentrant checkpointing: each segment's backward runs inside the whole one, on a thread of autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.gpu import assert_same, mean_of_squares, offloaded, train, train_plain

MIB = 2**20
SEGMENTS = 4


class Checkpointed(nn.Module):
    """Segments of 1 MiB. ``ends`` gets the input of each one, whose gradient comes when its backward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.segments = nn.ModuleList([nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(SEGMENTS)])
        self.ends: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.ends.clear()
        for segment in self.segments:
            self.ends.append(x)
            x = checkpoint(segment, x, use_reentrant=True)
        return x


def test_gradients_leave_behind_the_segments_of_one_backward() -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    data = [torch.randn(64, 512) for _ in range(3)]
    expected = train_plain(model, data, mean_of_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    leaving: list[int] = []
    with offloaded(model, optimizer, budget=96 * MIB) as run:

        def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss = mean_of_squares(model, batch)
            for end in model.ends:  # type: ignore[union-attr]
                end.register_hook(lambda _: leaving.append(run.core.gradients.statistics.leaving))
            return loss

        found = train(model, optimizer, data, loss_of)
        assert len(leaving) == len(data) * SEGMENTS
        assert all(leaving), "the end of a segment has waited for its gradients"
        loss_of(model, data[0]).backward()
        assert run.core.gradients.statistics.leaving == 0
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert_same(found, expected)


def test_the_cache_is_emptied_when_the_whole_backward_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Checkpointed()
    with offloaded(model, None, budget=96 * MIB) as run:
        loss = mean_of_squares(model, torch.randn(64, 512))
        empty, inside = torch.cuda.empty_cache, []

        def note() -> None:
            inside.append(run.core.gate.in_backward)
            empty()

        monkeypatch.setattr(torch.cuda, "empty_cache", note)
        loss.backward()
        monkeypatch.undo()
        assert inside == [False]
