"""A stage as a program: microbatches in flight, random numbers, checkpoints, what it leaves behind."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hydra_ext.errors import StateError
from hydra_ext.split import SplitStage
from hydra_ext.split.stage_program import event_seed, reseed
from support.split.split_models import LIBRARY, Batch, output_loss, tokens
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN, Layer, Stack, text, text_loss
from support.split.split_stages import Stages, assert_same, bound, cut, even_cuts, rehearsed, run, run_plainly, shared


def stack(seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack()


BATCH = text(torch.Generator().manual_seed(1))


# ---- several microbatches -------------------------------------------------------------------------------------------
def in_flight(stages: Stages, batches: list[Any], order: list[int]) -> Any:
    runs = [stages.forward(batch, seed=7 + number) for number, batch in enumerate(batches)]
    for number in order:
        stages.backward(runs[number])
    return stages.outcome(runs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [1, 3])
def test_microbatches_of_other_shapes_are_in_flight_together(count: int) -> None:
    subject = LIBRARY["llama"]
    model = subject.make()
    generator = torch.Generator().manual_seed(3)
    batches: list[Batch] = []
    for i in range(6):
        ids = tokens(generator, 1 + i % 2, 5 + 3 * (i % 3))
        batches.append({"input_ids": ids, "labels": ids, "use_cache": False})
    rehearsal = rehearsed(model, output_loss, batches[0])
    stages = cut(model, output_loss, rehearsal, even_cuts(rehearsal, count))
    assert_same(in_flight(stages, batches, list(range(6))), run_plainly(model, output_loss, batches))


def test_the_way_between_blocks_may_depend_on_values_of_the_microbatch() -> None:
    """A mask that hides nothing is left out by the library, so that other functions are called."""
    subject = LIBRARY["llama_mask"]
    model = subject.make()
    hides = subject.batches(3)
    hides_nothing = [{**batch, "attention_mask": torch.ones(2, 12, dtype=torch.long)} for batch in hides]
    batches = [hides[0], hides_nothing[0], hides[1], hides[2], hides_nothing[1]]
    rehearsal = rehearsed(model, output_loss, batches[0])
    assert rehearsed(model, output_loss, batches[1]).way != rehearsal.way
    found = run(model, output_loss, batches, [2, 4], rehearsal)
    assert_same(found, run_plainly(model, output_loss, batches))


def test_backwards_may_come_in_any_order() -> None:
    model = OWN["unet"].make()
    fn = OWN["unet"].fn
    batches = OWN["unet"].batches(3)
    rehearsal = rehearsed(model, fn, batches[0])
    one = in_flight(cut(model, fn, rehearsal, []), batches, [2, 0, 1])
    assert_same(in_flight(cut(model, fn, rehearsal, [3, 8]), batches, [2, 0, 1]), one)


def test_a_backward_runs_once() -> None:
    model = stack()
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCH), [])
    (run_once,) = stages.forward(BATCH)
    run_once.backward(())
    with pytest.raises(StateError, match="once"):
        run_once.backward(())


def test_the_divisor_divides_gradients_and_not_the_loss() -> None:
    model = stack()
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCH), [3])
    passes = stages.forward(BATCH, divisor=4)
    stages.backward(passes)
    expected = copy.deepcopy(model)
    loss = text_loss(expected, BATCH)
    (loss / 4).backward()
    assert torch.equal(passes[-1].loss, loss.detach())
    found = stages.outcome([passes]).gradients
    assert all(torch.equal(found[name], p.grad) for name, p in expected.named_parameters())


def test_metrics_come_from_the_last_stage_without_a_graph() -> None:
    def fn(model: nn.Module, batch: Batch) -> dict[str, Any]:
        loss = text_loss(model, batch)
        return {"loss": loss, "twice": loss * 2, "name": "a"}

    model = stack()
    passes = cut(model, fn, rehearsed(model, fn, BATCH), [3]).forward(BATCH)
    assert passes[0].loss is None
    assert passes[0].metrics is None
    assert passes[1].metrics["name"] == "a"
    assert not passes[1].metrics["twice"].requires_grad
    assert torch.equal(passes[1].metrics["twice"], passes[1].loss * 2)


def test_a_loss_that_nothing_trains_is_told_of() -> None:
    model = stack()
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCH), [])
    (program,), (part,) = stages.programs, stages.models
    with pytest.raises(ValueError, match="depends on no trainable parameter"):
        program.forward(lambda batch: text_loss(part, batch).detach(), BATCH, None, seed=1, divisor=1)


# ---- random numbers -------------------------------------------------------------------------------------------------
class Drops(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.branch(x), 0.3)


class DropsBetween(Stack):
    """Random numbers before the first block, in the blocks, and between them."""

    def __init__(self) -> None:
        super().__init__(Drops)

    def forward(self, x: Tensor) -> Tensor:
        start = torch.rand(())
        h = self.embed(x) + start
        for layer in self.layers:
            noise = torch.randn(h.shape[-1])
            h = F.dropout(layer(h), 0.2) + 0.1 * torch.rand(()) * noise
        out: Tensor = self.head(h + start)
        return out


def run_seeded(model: nn.Module, batch: Batch, seed: int) -> Tensor:
    """The rule written out for :class:`DropsBetween`, in a plain forward."""
    blocks = [model.embed, *model.layers, model.head]
    numbers = {block: number for number, block in enumerate(blocks)}

    def before(block: nn.Module, _args: Any) -> None:
        reseed(event_seed(seed, numbers[block]))

    def after(block: nn.Module, _args: Any, _output: Any) -> None:
        reseed(event_seed(seed, numbers[block], after=True))

    handles = [block.register_forward_pre_hook(before) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    reseed(seed)
    loss = text_loss(model, batch)
    for handle in handles:
        handle.remove()
    return loss


@pytest.mark.parametrize("boundary", [1, 3, 5])
def test_random_numbers_are_those_of_the_rule(boundary: int) -> None:
    torch.manual_seed(0)
    model = DropsBetween()
    rehearsal = rehearsed(model, text_loss, BATCH)
    expected = copy.deepcopy(model)
    loss = run_seeded(expected, BATCH, 7)
    loss.backward()
    found = run(model, text_loss, [BATCH], [boundary], rehearsal)
    assert torch.equal(found.losses[0], loss.detach())
    assert all(torch.equal(found.gradients[name], p.grad) for name, p in expected.named_parameters())


def test_the_callers_random_state_is_as_before() -> None:
    torch.manual_seed(0)
    model = DropsBetween()
    before = torch.get_rng_state()
    rehearsal = rehearsed(model, text_loss, BATCH)
    stages = cut(model, text_loss, rehearsal, [3])
    stages.backward(stages.forward(BATCH))
    assert torch.equal(torch.get_rng_state(), before)


# ---- checkpoints and precision --------------------------------------------------------------------------------------
class CheckpointedDrops(DropsBetween):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        out: Tensor = self.head(h)
        return out


class PlainDrops(CheckpointedDrops):
    def forward(self, x: Tensor) -> Tensor:
        return Stack.forward(self, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cuts", [[], [3], [2, 4]])
def test_a_checkpoint_draws_the_same_random_numbers_again(cuts: list[int]) -> None:
    torch.manual_seed(0)
    model = CheckpointedDrops()
    plain = PlainDrops()
    plain.load_state_dict(model.state_dict())
    expected = run(plain, text_loss, [BATCH], [], rehearsed(plain, text_loss, BATCH))
    assert_same(run(model, text_loss, [BATCH], cuts, rehearsed(model, text_loss, BATCH)), expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["llama", "t5_dropout"])
def test_the_librarys_checkpoints_can_be_cut_between(name: str) -> None:
    subject = LIBRARY[name]
    model = subject.make()
    batches = subject.batches(2)
    rehearsal = rehearsed(model, subject.fn, batches[0])
    cuts = even_cuts(rehearsal, 3)
    plain = run(model, subject.fn, batches, cuts, rehearsal)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rehearsal = rehearsed(model, subject.fn, batches[0])
    assert_same(run(model, subject.fn, batches, cuts, rehearsal), plain, shared(model, rehearsal, cuts))


def test_a_forward_without_gradients_needs_none() -> None:
    model = stack().eval()
    with torch.no_grad():
        rehearsal = rehearsed(model, text_loss, BATCH)
        passes = cut(model, text_loss, rehearsal, [2, 4]).forward(BATCH)
        assert torch.equal(passes[-1].loss, text_loss(model, BATCH))
    assert not any(passes[0].leaving.requires_grad)


def test_frozen_parts_have_no_gradients_to_send() -> None:
    model = stack()
    model.embed.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    rehearsal = rehearsed(model, text_loss, BATCH)
    stages = cut(model, text_loss, rehearsal, [2, 4])
    passes = stages.forward(BATCH)
    assert passes[0].leaving.requires_grad == (False,)
    assert passes[1].leaving.requires_grad == (True,)
    stages.backward(passes)
    assert_same(stages.outcome([passes]), run_plainly(model, text_loss, [BATCH]))


# ---- what is left behind --------------------------------------------------------------------------------------------
def test_the_model_is_as_before_between_calls() -> None:
    model = stack()
    stage = SplitStage(model, rehearsed(model, text_loss, BATCH), 0, 3)
    before = [dict(module.__dict__) for module in model.modules()]
    stage.forward(bound(text_loss, model), BATCH, None, seed=1, divisor=1)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_nothing_is_held_after_backward_without_the_garbage_collector() -> None:
    model = stack()
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCH), [3])
    stages.forward(BATCH)
    gc.collect()
    gc.disable()
    try:
        passes = stages.forward(BATCH)
        held = [weakref.ref(tensor) for run in passes for tensor in run._roots]
        assert all(ref() is not None for ref in held)
        stages.backward(passes)
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["in_place", "resnet", "recurrent"])
def test_what_crosses_needs_no_copy_where_memory_is_shared(name: str) -> None:
    subject = (OWN | MORE)[name]
    model = subject.make()
    (batch,) = subject.batches(1)
    rehearsal = rehearsed(model, subject.fn, batch)
    expected = run(model, subject.fn, [batch], [], rehearsal)
    for boundary in rehearsal.possible_cuts:
        stages = cut(model, subject.fn, rehearsal, [boundary])
        passes = stages.forward(batch, copies=False)
        stages.backward(passes)
        assert_same(stages.outcome([passes]), expected, shared(model, rehearsal, [boundary]))


class GivesWeight(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.norm.weight


class UsesWeights(Stack):
    def __init__(self) -> None:
        super().__init__(GivesWeight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        scale = None
        for layer in self.layers:
            h, given = layer(h if scale is None else h * scale)
            scale = given if scale is None else scale
        out: Tensor = self.head(h)
        return out


def test_a_weight_that_crosses_is_sent_as_a_copy() -> None:
    torch.manual_seed(0)
    model = UsesWeights()
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert_same(run(model, text_loss, [BATCH], [2], rehearsal), run_plainly(model, text_loss, [BATCH]))
    stages = cut(model, text_loss, rehearsal, [2])
    leaving = stages.forward(BATCH)[0].leaving
    memory = {parameter.untyped_storage()._cdata for parameter in stages.models[0].parameters()}
    assert sorted(tuple(tensor.shape) for tensor in leaving.tensors) == [(2, 12, 32), (32,)]
    assert not any(tensor.untyped_storage()._cdata in memory for tensor in leaving.tensors)


class WritesArgument(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += self.branch(x.clone())
        return x


class InPlaceBlocks(Stack):
    """Blocks change what they are given and give it back."""

    def __init__(self) -> None:
        super().__init__(WritesArgument)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * 1
        first = h * 2
        for layer in self.layers:
            layer(h)
        out: Tensor = self.head(h + first)
        return out


def test_blocks_may_change_their_arguments() -> None:
    torch.manual_seed(0)
    model = InPlaceBlocks()
    rehearsal = rehearsed(model, text_loss, BATCH)
    expected = run_plainly(model, text_loss, [BATCH])
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    for boundary in rehearsal.possible_cuts:
        assert_same(run(model, text_loss, [BATCH], [boundary], rehearsal), expected)


class CollectsThroughViews(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        rows = torch.zeros(4, *h.shape)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            rows[i].copy_(h)
        out: Tensor = self.head(h + rows.mean(0))
        return out


def test_parts_of_a_tensor_may_be_written_through_views() -> None:
    torch.manual_seed(0)
    model = CollectsThroughViews()
    rehearsal = rehearsed(model, text_loss, BATCH)
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    expected = run_plainly(model, text_loss, [BATCH])
    for cuts in ([2], [3], [2, 4], [1, 2, 3, 4, 5]):
        assert_same(run(model, text_loss, [BATCH], cuts, rehearsal), expected)


def test_parts_of_a_tensor_may_be_written_on_several_stages() -> None:
    model = OWN["collects"].make()
    rehearsal = rehearsed(model, text_loss, BATCH)
    expected = run_plainly(model, text_loss, [BATCH])
    for cuts in ([2], [3], [2, 4], [1, 2, 3, 4, 5]):
        assert_same(run(model, text_loss, [BATCH], cuts, rehearsal), expected)
