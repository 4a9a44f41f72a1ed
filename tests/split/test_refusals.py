"""What cannot be split is refused with the reason; where another cut works, only the cuts that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hydra_ext.errors import SplitError
from hydra_ext.split import SplitStage, find_blocks
from support.split.split_models_own import IntoList, Layer, Stack, text, text_loss, two_losses
from support.split.split_stages import assert_same, bound, cut, rehearsed, run, run_plainly

BATCH = text(torch.Generator().manual_seed(1))


def reasons(model: nn.Module, fn: Callable[[nn.Module, Any], Any] = text_loss) -> dict[int, str]:
    """The boundaries at which no cut can be made, and why."""
    rehearsal = rehearsed(model, fn, BATCH)
    return {number: "; ".join(b.reasons) for number, b in enumerate(rehearsal.boundaries) if b.reasons}


def test_what_a_block_appends_to_a_list_cannot_be_followed() -> None:
    found = reasons(IntoList(), two_losses)
    assert set(found) == {2, 3, 4, 5}  # the embedding appends nothing
    assert all("a list given to the block" in reason for reason in found.values())


class Wrapped:
    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


class Opaque(Layer):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return Wrapped(super().forward(x.inner if isinstance(x, Wrapped) else x))


class OpaqueStack(Stack):
    def __init__(self) -> None:
        super().__init__(Opaque, depth=3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.head(h.inner)
        return out


def test_an_object_that_is_no_container_of_tensors_cannot_be_made_again() -> None:
    found = reasons(OpaqueStack())
    assert set(found) == {2, 3, 4}
    assert all("returns a Wrapped" in reason for reason in found.values())


class ThroughView(Stack):
    """Writes through a view, two layers after it was taken."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        half = h[:, :6]
        g = self.layers[1](h.clone())
        half.mul_(0.5)
        out: Tensor = self.head(self.layers[2](g) + h)
        return out


def test_a_view_may_be_written_to_after_a_cut() -> None:
    torch.manual_seed(0)
    model = ThroughView()
    rehearsal = rehearsed(model, text_loss, BATCH)
    expected = run_plainly(model, text_loss, [BATCH])
    assert rehearsal.possible_cuts == [1, 2, 3, 4]
    for boundary in rehearsal.possible_cuts:
        assert_same(run(model, text_loss, [BATCH], [boundary], rehearsal), expected)


class GivesParts(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        whole = super().forward(x)
        return whole, whole[:, :6]


class ThroughParts(Stack):
    """Writes to one of two outputs of a block, which lie in one memory."""

    def __init__(self) -> None:
        super().__init__(GivesParts)

    def forward(self, x: Tensor) -> Tensor:
        h, half = self.layers[0](self.embed(x))
        g, _ = self.layers[1](h.clone())
        half.mul_(0.5)
        out: Tensor = self.head(self.layers[2](g)[0] + h)
        return out


def test_a_cut_between_two_outputs_in_one_memory_and_a_write_to_one_is_refused() -> None:
    found = reasons(ThroughParts())
    assert set(found) == {2}
    assert "is written to after the cut, where each value has a copy" in found[2]


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        out: Tensor = self.head(h)
        return out


class Reentrant(Checkpointed):
    reentrant = True


def test_a_reentrant_checkpoint_round_a_block_is_refused_after_it() -> None:
    found = reasons(Reentrant())
    assert set(found) == {2, 3, 4, 5}
    assert all("use_reentrant=False" in reason for reason in found.values())


@pytest.mark.parametrize("boundary", [2, 3, 5])
def test_a_checkpoint_that_becomes_reentrant_after_the_rehearsal_is_found(boundary: int) -> None:
    model = Checkpointed()
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCH), [boundary])
    for part in stages.models:
        part.reentrant = True
    with pytest.raises(SplitError):
        stages.forward(BATCH)


def test_checkpoints_that_are_not_reentrant_can_be_cut_between() -> None:
    assert not reasons(Checkpointed())


class CheckpointedPairs(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for first, second in ((self.layers[0], self.layers[1]), (self.layers[2], self.layers[3])):
            h = checkpoint(lambda t, one=first, two=second: two(one(t)), h, use_reentrant=False)
        out: Tensor = self.head(h)
        return out


def test_no_cut_is_made_inside_a_checkpoint() -> None:
    found = reasons(CheckpointedPairs())
    assert set(found) == {2, 4}
    assert all("inside one checkpoint" in reason for reason in found.values())


class RunsBackward(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        (slope,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
        out: Tensor = self.head(h + slope)
        return out


def test_a_backward_inside_the_forward_is_refused() -> None:
    with pytest.raises(SplitError, match="backward of its own"):
        rehearsed(RunsBackward(), text_loss, BATCH)


class SharedNorm(nn.Module):
    """One batch norm after every layer: its statistics are written by all of them in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


def test_a_written_buffer_stays_on_one_side() -> None:
    model = SharedNorm()
    rehearsal = rehearsed(model, lambda model, batch: model(batch).square().sum(), torch.randn(4, 8))
    assert [event.name for event in rehearsal.events] == ["layers.0", "norm", "layers.1", "norm", "layers.2", "norm"]
    assert rehearsal.possible_cuts == [1]
    assert "norm.running_mean" in rehearsal.boundaries[2].reasons[0]


class ReadsStatistics(SharedNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[0](x))
        if self.norm.num_batches_tracked > 0:
            x = x * 2
        out: Tensor = self.layers[2](self.layers[1](x))
        return out


def test_python_that_reads_a_written_buffer_is_refused() -> None:
    rehearsal = rehearsed(ReadsStatistics(), lambda model, batch: model(batch).square().sum(), torch.randn(4, 8))
    assert rehearsal.possible_cuts == []
    assert "norm.num_batches_tracked" in rehearsal.boundaries[1].reasons[0]


class DerivesFromBuffer(Stack):
    """Between all blocks it changes in place what it has made of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(0, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            slopes = self.slopes * 2
            slopes += 1
            h = layer(h) * slopes
        out: Tensor = self.head(h)
        return out


def test_a_buffer_that_is_only_read_may_be_read_everywhere() -> None:
    torch.manual_seed(0)
    model = DerivesFromBuffer()
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    expected = run_plainly(model, text_loss, [BATCH])
    assert_same(run(model, text_loss, [BATCH], [2, 4], rehearsal), expected)


class Counts(Layer):
    load = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.load = float(x.detach().mean())
        return super().forward(x)  # type: ignore[no-any-return]


def test_a_number_kept_on_a_module_is_refused() -> None:
    found = reasons(Stack(Counts))
    assert set(found) == {2, 3, 4, 5}
    assert all("keep it as a tensor" in reason for reason in found.values())


class Selects(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        rows = h[h.detach().sum(-1) > 0]
        out: Tensor = self.layers[1](rows)
        return self.head(self.layers[2](h)) + out.mean()


def test_a_shape_made_from_values_is_refused() -> None:
    found = reasons(Selects())
    assert set(found) == {2, 3, 4}
    assert all("shape" in reason for reason in found.values())


class ReadsThenWrites(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        mean = h.detach().mean()
        factor = mean.item()
        mean.add_(1)
        out: Tensor = self.head(self.layers[2](self.layers[1](h * factor)))
        return out + mean


def test_what_python_has_read_may_not_be_written_to() -> None:
    found = reasons(ReadsThenWrites())
    assert set(found) == {2, 3, 4}
    assert all("after Python code has read it" in reason for reason in found.values())


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2 + 1


class Scripted(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        h = self.layers[1](scripted(h))
        out: Tensor = self.head(self.layers[2](h))
        return out


def test_compiled_functions_between_blocks_are_split_or_refused() -> None:
    torch.manual_seed(0)
    model = Scripted()
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert 1 in rehearsal.possible_cuts
    expected = run_plainly(model, text_loss, [BATCH])
    for boundary in rehearsal.possible_cuts:
        stages = cut(model, text_loss, rehearsal, [boundary])
        stages.forward(BATCH)  # watched
        assert torch.equal(stages.forward(BATCH)[-1].loss, expected.losses[0])


def test_a_refused_cut_is_named_with_those_that_work() -> None:
    model = IntoList()
    rehearsal = rehearsed(model, two_losses, BATCH)
    assert rehearsal.possible_cuts == [1]
    with pytest.raises(SplitError, match=r"before event 3 .*Cuts are possible before the events \[1\]"):
        SplitStage(model, rehearsal, 0, 3)
    assert torch.isfinite(cut(model, two_losses, rehearsal, [1]).forward(BATCH)[-1].loss)


@pytest.mark.parametrize(("lo", "hi"), [(0, 0), (3, 2), (0, 7), (-1, 3)])
def test_a_stage_has_events(lo: int, hi: int) -> None:
    model = Stack()
    with pytest.raises(SplitError, match="the model has 6"):
        SplitStage(model, rehearsed(model, text_loss, BATCH), lo, hi)


def test_a_function_that_calls_no_block_is_refused() -> None:
    model = Stack()
    weight = torch.randn(32, requires_grad=True)
    with pytest.raises(SplitError, match="called no block"):
        rehearsed(model, lambda _model, _batch: weight.sum(), BATCH)


def test_names_of_blocks_are_checked() -> None:
    model = Stack()
    assert list(find_blocks(model, ["layers.1", "head"])) == ["layers.1", "head"]
    with pytest.raises(SplitError, match=r"'layers\.9' is not the name"):
        find_blocks(model, ["layers.9"])
    with pytest.raises(SplitError, match=r"lies inside 'layers\.1'"):
        find_blocks(model, ["layers.1", "layers.1.norm"])


def test_another_order_of_blocks_needs_cuts_of_its_own() -> None:
    torch.manual_seed(0)
    model = Stack()
    rehearsal = rehearsed(model, text_loss, BATCH)
    stage = SplitStage(model, rehearsal, 0, 3)

    def shorter(batch: dict[str, Tensor]) -> Tensor:
        h = model.layers[0](model.embed(batch["x"]))
        return F.cross_entropy(model.head(h).flatten(0, 1), batch["y"].flatten())

    with pytest.raises(SplitError, match="the cuts were chosen for 6"):
        stage.forward(shorter, BATCH, None, seed=1, divisor=1)


def test_an_error_of_the_model_in_the_part_that_is_skipped_is_told_apart() -> None:
    class Fails(Stack):
        fails = False

        def forward(self, x: Tensor) -> Any:
            if self.fails:
                raise ValueError("of the user")
            return super().forward(x)

    model = Fails()
    rehearsal = rehearsed(model, text_loss, BATCH)
    stages = cut(model, text_loss, rehearsal, [3])
    leaving = stages.programs[0].forward(bound(text_loss, stages.models[0]), BATCH, None, seed=7, divisor=1).leaving
    for part in stages.models:
        part.fails = True
    with pytest.raises(ValueError, match="of the user"):
        stages.programs[0].forward(bound(text_loss, stages.models[0]), BATCH, None, seed=7, divisor=1)
    with pytest.raises(SplitError, match="ValueError: of the user"):
        stages.programs[1].forward(bound(text_loss, stages.models[1]), BATCH, leaving, seed=7, divisor=1)
