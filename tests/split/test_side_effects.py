"""What a run that does not count has changed is put back, and what cannot be is refused."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError
from hydra_ext.pipeline.stages.chain import ChainStage
from hydra_ext.split import Rehearsal, time_events, time_microbatch, time_stage
from hydra_ext.split.stage_program import event_seed
from hydra_ext.state.snapshot import Snapshot
from support.split.split_models import Batch
from support.split.split_models_own import Layer, Stack, text, text_loss
from support.split.split_side_effects import (
    UNDONE,
    AddsUp,
    ChangesInput,
    CountsDeep,
    Draws,
    FailsFrozen,
    FrozenBelow,
    HiddenMemory,
    Shared,
    both_ways,
    branching,
    drawn_anew,
)
from support.split.split_stages import SEED, assert_same, bound, cut, rehearsed, run, run_plainly


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [text(generator) for _ in range(count)]


# ---- another way ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", UNDONE)
def test_a_first_run_that_took_another_way_leaves_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = UNDONE[name]()
    both = both_ways(4)
    rehearsal = rehearsed(model, text_loss, both[0])
    boundary = rehearsal.possible_cuts[-1]
    assert boundary > 3  # the first stage sees the other way
    expected = run_plainly(model, text_loss, both)
    assert_same(run(model, text_loss, both, [boundary], rehearsal), expected)


@dataclass(eq=False)
class Sample:
    """What a forward changes in it, it may change once."""

    x: Tensor
    labels: Tensor
    calls: int = 0


class Holder:
    def __init__(self, sample: Sample) -> None:
        self.samples = [sample]


def test_a_rehearsal_leaves_what_is_in_objects_of_the_microbatch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))

    def loss(model: nn.Module, holder: Holder) -> Tensor:
        sample = holder.samples[0]
        sample.calls += 1
        sample.x = sample.x * (1 + sample.calls)
        holder.samples.append(sample)
        return (model(sample.x) * sample.labels).sum()

    def holders() -> list[Holder]:
        return [Holder(Sample(torch.full((2, 3, 32), float(number + 1)), torch.ones(2, 3, 32))) for number in range(2)]

    made = holders()
    rehearsal = rehearsed(model, loss, made[0])
    assert (made[0].samples[0].calls, len(made[0].samples)) == (0, 1)
    assert torch.equal(made[0].samples[0].x, torch.ones(2, 3, 32))
    expected = run_plainly(model, loss, holders())
    assert_same(run(model, loss, made, rehearsal.possible_cuts[-1:], rehearsal), expected)


def test_an_iterator_in_the_microbatch_that_goes_on_is_refused() -> None:
    model = nn.Sequential(Layer(), Layer())
    with pytest.raises(SplitError, match="or the microbatch, holds"):
        rehearsed(model, lambda model, given: model(next(given["xs"])).sum(), {"xs": iter([torch.ones(2, 3, 32)] * 4)})


def test_a_first_run_that_took_another_way_leaves_the_microbatch() -> None:
    torch.manual_seed(0)
    model = ChangesInput()
    one, other = both_ways(2)
    stages = cut(model, text_loss, rehearsed(model, text_loss, one), [4])
    expected = copy.deepcopy(other)
    text_loss(model, expected)
    stages.programs[0].forward(bound(text_loss, stages.models[0]), other, None, seed=SEED, divisor=1)
    assert torch.equal(other["x"], expected["x"])


def test_another_way_after_memory_without_a_name_was_written_to_is_refused() -> None:
    torch.manual_seed(0)
    model = branching(HiddenMemory)()
    one, other = both_ways(2)
    stages = cut(model, text_loss, rehearsed(model, text_loss, one), [4])
    stages.forward(one)
    with pytest.raises(SplitError, match="in the rehearsal it was"):
        stages.forward(other)


# ---- places ---------------------------------------------------------------------------------------------------------
class Moving(Layer):
    """Puts a buffer, and a parameter that is not trained, into other memory."""

    def __init__(self, move: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.ones(3))
        self._move = move

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for tensor in (self.key, self.mean):
                self._move(tensor, tensor * 2 + 1)
        return super().forward(x) * self.key.mean() * self.mean.mean()


def by_data(tensor: Tensor, numbers: Tensor) -> None:
    tensor.data = numbers


def by_growth(tensor: Tensor, numbers: Tensor) -> None:
    tensor.resize_(tensor.numel() + 1)
    tensor.fill_(numbers.sum())


MOVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": by_data,
    "set_": lambda tensor, numbers: tensor.set_(numbers),
    "set_ to a storage": lambda tensor, numbers: tensor.set_(numbers.untyped_storage()),
    "resize_": by_growth,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_tensors_lie_where_they_did_after_rehearsal_and_timing(move: Callable[[Tensor, Tensor], object]) -> None:
    model = Stack(lambda: Moving(move))
    (batch,) = batches(1)
    before = copy.deepcopy(model.state_dict())
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    rehearsal = rehearsed(model, text_loss, batch)
    fn = bound(text_loss, model)
    time_events(model, fn, batch, rehearsal, seed=SEED)
    time_microbatch(model, fn, batch, seed=SEED)
    time_stage(model, fn, batch, rehearsal, seed=SEED)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])] == []
    assert move is by_growth or [tensor.data_ptr() for tensor in model.state_dict().values()] == places


# ---- generators -----------------------------------------------------------------------------------------------------
def test_generators_are_put_back_after_a_rehearsal_and_after_timing() -> None:
    model = Stack(Draws)
    (batch,) = batches(1)
    before = [layer.generator.get_state() for layer in model.layers]
    rehearsal = rehearsed(model, text_loss, batch)
    time_events(model, bound(text_loss, model), batch, rehearsal, seed=SEED)
    for layer, state in zip(model.layers, before, strict=True):
        assert torch.equal(layer.generator.get_state(), state)


def test_a_generator_that_only_fn_holds_is_put_back_after_a_rehearsal_and_after_timing() -> None:
    generator = torch.Generator().manual_seed(4)
    state = generator.get_state()

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        return torch.rand((), generator=generator) * text_loss(model, batch)

    model = Stack()
    (batch,) = batches(1)
    rehearsal = rehearsed(model, fn, batch)
    assert torch.equal(generator.get_state(), state)
    time_events(model, bound(fn, model), batch, rehearsal, seed=SEED)
    assert torch.equal(generator.get_state(), state)


def test_memory_that_fn_writes_to_by_turns_is_put_back_after_timing() -> None:
    memory = [torch.zeros(()) for _ in range(2)]
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    states = [generator.get_state() for generator in generators]
    runs = 0

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal runs
        runs += 1
        memory[runs % 2] += torch.rand((), generator=generators[runs % 2])
        return text_loss(model, batch) + memory[runs % 2]

    model = Stack()
    (batch,) = batches(1)
    rehearsal = rehearsed(model, fn, batch)
    time_events(model, bound(fn, model), batch, rehearsal, seed=SEED)
    assert memory == [0, 0]
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, states, strict=True))


def test_random_states_of_python_and_numpy_are_put_back_after_a_rehearsal_and_after_timing() -> None:
    model = Stack()
    (batch,) = batches(1)
    numbers = []

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        numbers.append((random.random(), float(np.random.rand())))
        return text_loss(model, batch) * numbers[-1][0]

    random.seed(11)
    np.random.seed(11)
    rehearsal = rehearsed(model, fn, batch)
    time_events(model, bound(fn, model), batch, rehearsal, seed=SEED)
    expected = (random.Random(SEED).random(), float(np.random.RandomState(SEED).rand()))
    assert numbers == [expected] * 5
    assert random.random() == random.Random(11).random()
    assert np.random.rand() == np.random.RandomState(11).rand()


def test_blocks_with_generators_of_their_own_are_cut() -> None:
    torch.manual_seed(0)
    model = Stack(Draws)
    several = batches(3)
    rehearsal = rehearsed(model, text_loss, several[0])
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    expected = run_plainly(model, text_loss, several)
    assert_same(run(model, text_loss, several, [2, 4], rehearsal), expected)


def test_no_cut_between_two_that_draw_from_one_generator() -> None:
    (batch,) = batches(1)
    rehearsal = rehearsed(Shared((1, 3)), text_loss, batch)
    assert rehearsal.possible_cuts == [1, 2, 5]
    assert "torch.Generator" in rehearsal.boundaries[3].reasons[0]


def test_no_cut_where_every_stage_draws_from_a_generator_and_one_draws_more() -> None:
    model = Shared((2,))

    def fn(model: Any, batch: Batch) -> Tensor:
        return text_loss(model, batch) * torch.rand((), generator=model.generator)

    def early(model: Any, batch: Batch) -> Tensor:
        return torch.rand((), generator=model.generator) * text_loss(model, batch)

    (batch,) = batches(1)
    assert rehearsed(model, fn, batch).possible_cuts == [1, 2, 3]
    assert rehearsed(model, early, batch).possible_cuts == []


def test_a_generator_that_is_made_anew_may_be_drawn_from_on_both_ends() -> None:
    torch.manual_seed(0)
    model = Stack()
    several = batches(2)
    rehearsal = rehearsed(model, drawn_anew, several[0])
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    expected = run_plainly(model, drawn_anew, several)
    assert_same(run(model, drawn_anew, several, [3], rehearsal), expected)


class DrawsInPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() + float(np.random.rand())


def test_explicit_stages_have_streams_of_python_and_numpy_for_each_event() -> None:
    stage = ChainStage(DrawsInPython(), index=3, last=False)
    x = torch.ones(2)
    leaving = stage.forward(lambda value, _: value, x, None, seed=SEED, divisor=1).leaving
    seed = event_seed(SEED, 3)
    expected = x * random.Random(seed).random() + float(np.random.RandomState(seed % 2**32).rand())
    assert leaving is not None
    assert torch.equal(leaving.tensors[0], expected)


class DropsInPython(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * (random.random() + float(np.random.rand()))


@pytest.mark.parametrize("boundary", [1, 3, 5])
def test_blocks_that_draw_from_python_and_numpy_do_not_depend_on_the_cut(boundary: int) -> None:
    torch.manual_seed(0)
    model = Stack(DropsInPython)
    (batch,) = batches(1)
    rehearsal = rehearsed(model, text_loss, batch)
    losses = [cut(model, text_loss, rehearsal, cuts).forward(batch)[-1].loss for cuts in ([], [boundary])]
    assert torch.equal(losses[0], losses[1])


# ---- modes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_stage_that_ends_where_gradients_are_off_leaves_them_on(boundary: int) -> None:
    torch.manual_seed(0)
    model = FrozenBelow()
    several = batches(3)
    rehearsal = rehearsed(model, text_loss, several[0])
    expected = run_plainly(model, text_loss, several)
    assert_same(run(model, text_loss, several, [boundary], rehearsal), expected)
    assert torch.is_grad_enabled()


class SwitchesByHand(FrozenBelow):
    """No context is left where a stage ends between the two calls."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        h = self.layers[0](self.embed(x))
        torch.set_grad_enabled(True)
        out: Tensor = self.head(self.layers[1](h))
        return out


def test_a_stage_that_ends_between_switching_gradients_off_and_on_leaves_them_on() -> None:
    model = SwitchesByHand()
    (batch,) = batches(1)
    rehearsal = rehearsed(model, text_loss, batch)
    stages = cut(model, text_loss, rehearsal, [1])
    stages.programs[0].forward(bound(text_loss, stages.models[0]), batch, None, seed=SEED, divisor=1)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("stage", "kind"), [(0, KeyError), (1, SplitError)])
def test_an_error_where_gradients_are_off_is_told_and_leaves_them_on(stage: int, kind: type[Exception]) -> None:
    model = FailsFrozen()
    (batch,) = batches(1)
    stages = cut(model, text_loss, rehearsed(model, text_loss, batch), [3])
    stages.models[stage].fails = True
    with pytest.raises(kind, match="the user's own"):
        stages.forward(batch)
    assert torch.is_grad_enabled()


def test_another_way_where_gradients_are_off_is_told_and_leaves_them_on() -> None:
    class Detours(FrozenBelow):
        detour = False

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.layers[0](self.embed(x))
                h = h - 1 if self.detour else h + 1
                h = self.layers[1](h)
            out: Tensor = self.head(self.layers[2](h))
            return out

    model = Detours()
    (batch,) = batches(1)
    stages = cut(model, text_loss, rehearsed(model, text_loss, batch), [1])
    stages.models[1].detour = True
    with pytest.raises(SplitError, match="of the forward is sub; in the rehearsal it was add"):
        stages.forward(batch)
    assert torch.is_grad_enabled()


# ---- rehearsal and timing -------------------------------------------------------------------------------------------
def _of_events(model: nn.Module, fn: Any, batch: Batch, rehearsal: Rehearsal) -> object:
    return time_events(model, fn, batch, rehearsal, seed=SEED)


def _of_microbatch(model: nn.Module, fn: Any, batch: Batch, _rehearsal: Rehearsal) -> object:
    return time_microbatch(model, fn, batch, seed=SEED)


def _of_stage(model: nn.Module, fn: Any, batch: Batch, rehearsal: Rehearsal) -> object:
    return time_stage(model, fn, batch, rehearsal, seed=SEED)


@pytest.mark.every_case
@pytest.mark.parametrize("timing", [_of_events, _of_microbatch, _of_stage])
def test_timing_leaves_memory_and_generators_that_no_name_leads_to(timing: Callable[..., object]) -> None:
    outside, generator = torch.zeros(()), torch.Generator().manual_seed(4)
    state = generator.get_state()

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        outside.add_(1)
        return text_loss(model, batch) * torch.rand((), generator=generator)

    model = Stack(HiddenMemory)
    (batch,) = batches(1)
    rehearsal = rehearsed(model, fn, batch)
    torch.manual_seed(5)
    assert timing(model, bound(fn, model), batch, rehearsal) is not None
    assert [layer.memory().item() for layer in model.layers] == [0] * 4
    assert outside.item() == 0
    assert torch.equal(generator.get_state(), state)
    assert torch.initial_seed() == 5
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.every_case
@pytest.mark.parametrize("timing", [_of_events, _of_microbatch, _of_stage])
def test_timing_leaves_running_statistics(timing: Callable[..., object]) -> None:
    """A stage lends its buffers' storages to tensors of its own: writes to these are writes to buffers, too."""

    class Averages(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.statistics(x.reshape(-1, 1)).reshape(x.shape))

    model = Stack(Averages)
    (batch,) = batches(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rehearsal = rehearsed(model, text_loss, batch)
    timing(model, bound(text_loss, model), batch, rehearsal)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []


def test_timing_starts_each_run_from_the_same_memory() -> None:
    model = Stack(AddsUp)
    seen: list[Tensor] = []

    def fn(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(text_loss(model, batch))
        return seen[-1]

    (batch,) = batches(1)
    rehearsal = rehearsed(model, fn, batch)
    seen.clear()
    time_events(model, bound(fn, model), batch, rehearsal, seed=SEED)
    assert len(seen) > 1
    assert all(torch.equal(loss, seen[0]) for loss in seen)


def test_a_rehearsal_leaves_what_is_deep_in_modules() -> None:
    model = Stack(CountsDeep)
    (batch,) = batches(1)
    rehearsed(model, text_loss, batch)
    assert model.layers[0].state == {"a": [{"calls": 0}], "object": SimpleNamespace(calls=0)}


class Keeper:
    """Of a class of the user's."""

    def __init__(self) -> None:
        self.count = 0


@dataclass(slots=True)
class Slotted:
    count: int

    def __repr__(self) -> str:
        return f"{getattr(self, 'count', None)}"


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda held: held[1].append(3)),
    "tuple": (lambda: ([1],), lambda held: held[0].clear()),
    "dict": (lambda: {"a": {}}, lambda held: held["a"].update(b=1)),
    "order": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "default": (lambda: defaultdict(list), lambda held: held["a"].append(1)),
    "set": (lambda: {1}, lambda held: held.discard(1)),
    "deque": (lambda: deque([1], maxlen=2), lambda held: held.extend((2, 3))),
    "array": (lambda: np.zeros(2), lambda held: held.__setitem__(0, 1)),
    "namespace": (lambda: SimpleNamespace(a=[1]), lambda held: held.a.append(2)),
    "object": (lambda: [Keeper()], lambda held: held[0].__dict__.update(count=4, other=1)),
    "slots": (lambda: [Slotted(1)], lambda held: setattr(held[0], "count", 2)),
    "unset slot": (lambda: [Slotted.__new__(Slotted)], lambda held: setattr(held[0], "count", 2)),
    "generator": (lambda: [torch.Generator()], lambda held: held[0].manual_seed(3)),
}


def shown(held: Any) -> str:
    if isinstance(held, torch.Generator):
        return str(held.get_state().tolist())
    if isinstance(held, (list, tuple)):
        return str([shown(each) for each in held])
    return str(vars(held)) if isinstance(held, Keeper) else repr(held)


@pytest.mark.every_case
@pytest.mark.parametrize("name", HELD)
def test_modules_get_back_what_was_in_what_they_hold(name: str) -> None:
    make, change = HELD[name]
    module = nn.Module()
    module.held = make()
    held, before = module.held, shown(module.held)
    state = Snapshot(module)
    change(module.held)
    module.new = 1
    assert shown(module.held) != before
    state.restore()
    assert module.held is held
    assert shown(module.held) == before
    assert not hasattr(module, "new")
