"""What one microbatch leaves on the modules for the next stays in one stage, or is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from support.split.split_models_own import Layer, Stack, text, text_loss
from support.split.split_stages import assert_same, rehearsed, run, run_plainly

BATCH = text(torch.Generator().manual_seed(1))


def reasons(model: nn.Module) -> dict[int, str]:
    """The boundaries at which no cut can be made, and why."""
    rehearsal = rehearsed(model, text_loss, BATCH)
    return {number: "; ".join(b.reasons) for number, b in enumerate(rehearsal.boundaries) if b.reasons}


class Remembers(Stack):
    """Adds what the last layer but one made of the microbatch before."""

    memory: Tensor | None = None
    reader, writer = 0, 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i == self.reader and self.memory is not None:
                h = h + self.memory
            h = layer(h)
            if i == self.writer:
                self.memory = h.detach()
        out: Tensor = self.head(h)
        return out


class RemembersAtOnce(Remembers):
    """Writes after the layer that reads; the way is the same from the start."""

    reader, writer = 2, 2
    memory = torch.zeros(())


def test_another_way_in_the_second_microbatch_is_refused() -> None:
    found = reasons(Remembers())
    assert set(found) == {1, 2, 3, 4, 5}
    assert all("another path in the second microbatch" in reason for reason in found.values())


def test_what_one_microbatch_leaves_for_the_next_stays_in_one_stage() -> None:
    torch.manual_seed(0)
    model = RemembersAtOnce()
    batches = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    rehearsal = rehearsed(model, text_loss, batches[0])
    refused = [number for number, boundary in enumerate(rehearsal.boundaries) if boundary.reasons]
    assert refused == [3]  # it is read in the glue after event 2, and left in that after event 3
    assert "carried from one microbatch to the next" in rehearsal.boundaries[3].reasons[0]
    expected = run_plainly(model, text_loss, batches)
    for boundary in rehearsal.possible_cuts:
        assert_same(run(model, text_loss, batches, [boundary], rehearsal), expected)


class CountsCalls(Stack):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.late = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.calls += 1
        h = super().forward(x)
        if self.late:
            self.calls += 1
        return h * (1 + self.calls)  # type: ignore[no-any-return]


def test_a_number_that_is_set_where_it_is_read_may_be_cut() -> None:
    for late in (True, False):
        torch.manual_seed(0)
        model = CountsCalls()
        model.late = late
        batches = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
        expected = run_plainly(model, text_loss, batches)
        rehearsal = rehearsed(model, text_loss, batches[0])
        assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
        assert_same(run(model, text_loss, batches, [3], rehearsal), expected)
        assert model.calls == 0


# ---- what is made once and kept --------------------------------------------------------------------------------------
class KeepsScale(Stack):
    """Makes what it needs when it is first called."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.scale is None:
            self.scale = torch.linspace(0, 1, x.shape[1]).unsqueeze(1)
        for layer in self.layers:
            h = layer(h * self.scale)
        out: Tensor = self.head(h)
        return out


class Table(nn.Module):
    kept: Tensor | None = None

    def forward(self, length: int) -> Tensor:
        if self.kept is None:
            self.kept = torch.linspace(0, 1, length).unsqueeze(1)
        return self.kept


class SharesTable(Layer):
    table: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x * self.table(x.shape[1]))


def sharing_a_table() -> Stack:
    model, table = Stack(SharesTable), Table()
    for layer in model.layers:
        layer.table = table
    return model


def sharing_a_function() -> Stack:
    @functools.lru_cache
    def positions(length: int) -> Tensor:
        return torch.linspace(0, 1, length).unsqueeze(1)

    class Cached(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(x * positions(x.shape[1]))

    return Stack(Cached)


@pytest.mark.parametrize("make", [KeepsScale, sharing_a_table, sharing_a_function])
def test_what_is_made_once_has_to_be_there_and_a_forward_makes_it(make: Callable[[], Stack]) -> None:
    torch.manual_seed(0)
    model = make()
    found = reasons(model)
    assert found
    assert all("run a forward of the whole model before" in reason for reason in found.values())
    with torch.no_grad():
        expected = text_loss(model, BATCH)
    assert not reasons(model)
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert torch.equal(run(model, text_loss, [BATCH], [3], rehearsal).losses[0], expected)
