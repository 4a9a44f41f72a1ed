"""What a rehearsal finds, on a whole model and on one whose blocks are not there, and that it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_ext.errors import SplitError
from hydra_ext.split import (
    Rehearsal,
    SplitStage,
    buffers_of,
    find_blocks,
    keep_own_part,
    parameters_of,
    shared_parameters,
    time_events,
)
from hydra_ext.split.rehearsal import timing
from hydra_ext.split.stages.tensors import Absent
from support.split.split_models import LIBRARY
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN, Layer, Stack, text, text_loss
from support.split.split_stages import SEED, Fn, assert_same, bound, cut, even_cuts, rehearsed, run

SUBJECTS = LIBRARY | OWN | MORE
BATCH = text(torch.Generator().manual_seed(1))


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


# ---- what it finds --------------------------------------------------------------------------------------------------
def test_a_chain_of_blocks_sends_one_tensor() -> None:
    rehearsal = rehearsed(stack(), text_loss, BATCH)
    assert [event.name for event in rehearsal.events] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert rehearsal.possible_cuts == [1, 2, 3, 4, 5]
    assert rehearsal.crossing_bytes == [0, *[2 * 12 * 32 * 4] * 5, 0]


def test_a_residual_outside_the_blocks_crosses_with_the_branch() -> None:
    rehearsal = rehearsed(OWN["outside_residual"].make(), text_loss, BATCH)
    counts = [len(boundary.values) for boundary in rehearsal.boundaries]
    assert counts == [0, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1, 0]


def test_blocks_can_be_named() -> None:
    rehearsal = rehearsed(stack(), text_loss, BATCH, blocks=["layers.1", "layers.3"])
    assert [event.name for event in rehearsal.events] == ["layers.1", "layers.3"]


def timed(model: nn.Module, fn: Fn, batch: Any) -> list[float]:
    return time_events(model, bound(fn, model), batch, rehearsed(model, fn, batch), seed=SEED)


class Works(nn.Module):
    """Takes a given time, of a clock of its own."""

    now = 0.0

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        Works.now += self.seconds
        return x + self.weight


@pytest.mark.parametrize("absent", [False, True])
def test_events_are_timed_each_by_itself(absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_now", lambda _device: Works.now)
    model: nn.Module = nn.Sequential(Works(2), nn.Sequential(Works(3), Works(4)), Works(0.5))
    times = timed(on_meta(model) if absent else model, lambda model, batch: model(batch).sum(), torch.zeros(()))
    assert times == [2.0, 3.0, 4.0, 0.5]


# ---- it changes nothing ---------------------------------------------------------------------------------------------
class Remembers(Layer):
    """Changes everything that a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(32))
        self.table = torch.zeros(32)
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
        self.table.add_(1)
        self.seen.append(x.shape[0])
        self.calls += 1
        self.last = x.detach().sum()
        with torch.no_grad():
            self.norm.bias.add_(1)
        return super().forward(x + torch.rand(()))  # type: ignore[no-any-return]


def state(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor):
                found.append((name, value.clone()))
            elif isinstance(value, (list, dict)):
                found.append((name, list(value)))
            else:
                found.append((name, value))
    return found


def test_neither_a_rehearsal_nor_timing_changes_the_model_nor_the_microbatch_nor_the_random_state() -> None:
    torch.manual_seed(0)
    model = Stack(Remembers)
    batch = copy.deepcopy(BATCH)

    def fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["y"].clamp_(min=5)
        return text_loss(model, batch)

    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = model.layers[0].table.clone()
    before = copy.deepcopy([dict(m.__dict__) for m in model.layers])
    random = torch.get_rng_state()
    timed(model, fn, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(batch[name], BATCH[name]) for name in batch)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.layers[0].table, table)
    for layer, old in zip(model.layers, before, strict=True):
        assert layer.__dict__.keys() == old.keys()
        assert (layer.seen, layer.calls) == ([], 0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batch_statistics_are_updated_by_the_stage_that_holds_them_and_by_no_other() -> None:
    subject = OWN["resnet"]
    model = subject.make()
    (batch,) = subject.batches(1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rehearsal = rehearsed(model, subject.fn, batch)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    stages = cut(model, subject.fn, rehearsal, [4])
    stages.backward(stages.forward(batch))
    for part, lo, hi in zip(stages.models, stages.borders[:-1], stages.borders[1:], strict=True):
        own = buffers_of(rehearsal, lo, hi, model)
        written = frozenset().union(*(event.writes for event in rehearsal.events[lo:hi]))
        assert written <= own
        for name, buffer in part.named_buffers():
            if name.endswith("num_batches_tracked"):
                assert (buffer.item() == 1) == (name in written)
            else:
                assert torch.isfinite(buffer).all().item() == (name in own), name


# ---- parts that are not there ---------------------------------------------------------------------------------------
def on_meta(model: nn.Module) -> nn.Module:
    """The parameters of all blocks are on the meta device."""
    model = copy.deepcopy(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for block in find_blocks(model).values():
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    empty = torch.empty_like(parameter, device="meta")
                    made.setdefault(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
                    module._parameters[name] = made[parameter]
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in made:
                module._parameters[name] = made[parameter]
    return model


SAMPLE = ("gpt2", "llama_mask", "mixtral_router", "t5", "whisper", "resnet", "outside_residual", "functional", "clip")


def check_blockwise(name: str) -> None:
    subject = SUBJECTS[name]
    model = subject.make()
    (batch,) = subject.batches(1)
    real = rehearsed(model, subject.fn, batch)
    assert rehearsed(on_meta(model), subject.fn, batch).digest == real.digest


@pytest.mark.parametrize("name", SAMPLE)
def test_blocks_that_are_not_there_are_rehearsed_one_at_a_time(name: str) -> None:
    check_blockwise(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in (*SAMPLE, "branches")])
def test_any_model_can_be_rehearsed_without_its_blocks(name: str) -> None:
    check_blockwise(name)


def test_a_way_that_depends_on_parameters_is_found_by_comparing() -> None:
    subject = OWN["branches"]
    model = subject.make()
    (batch,) = subject.batches(1)
    real = rehearsed(model, subject.fn, batch)
    assert rehearsed(on_meta(model), subject.fn, batch).digest != real.digest


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@contextmanager
def counted(size: int) -> Iterator[list[int]]:
    """Of the tensors of this size that are made inside by ``torch.empty``: how many there were after each."""
    plain = torch.empty
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = plain(*args, **kwargs)
        if tensor.nbytes == size and not tensor.is_meta:
            made.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not reference.expired() for reference in made))
        return tensor

    torch.empty = empty
    try:
        yield alive
    finally:
        torch.empty = plain


def test_a_rehearsal_and_timing_without_parameters_need_the_memory_of_one_block() -> None:
    model, batch = on_meta(Large()), torch.randn(2, 512)

    def fn(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        return out

    with counted(512 * 512 * 4) as rehearsing:
        rehearsal = rehearsed(model, fn, batch)
    with counted(512 * 512 * 4) as timing:
        time_events(model, bound(fn, model), batch, rehearsal, seed=SEED, runs=1)
    assert rehearsing == [1] * 16
    assert timing == [1] * 32


def test_a_new_kind_of_microbatch_is_rehearsed_by_ranks_that_hold_a_part() -> None:
    subject = LIBRARY["llama"]
    model = subject.make()
    batches = subject.batches(1)
    shorter = {name: value[:, :7] if isinstance(value, Tensor) else value for name, value in batches[0].items()}
    batches.append(shorter)
    rehearsal = rehearsed(model, subject.fn, batches[0])
    one = run(model, subject.fn, batches, [], rehearsal)
    assert_same(run(model, subject.fn, batches, [2, 4], rehearsal), one)


# ---- which stage holds what -----------------------------------------------------------------------------------------
def parts(name: str, count: int) -> tuple[nn.Module, Rehearsal, list[int]]:
    subject = SUBJECTS[name]
    model = subject.make()
    rehearsal = rehearsed(model, subject.fn, subject.batches(1)[0])
    return model, rehearsal, even_cuts(rehearsal, count)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "unet", "functional", "clip"])
def test_every_parameter_is_held_by_a_stage_and_shared_ones_are_named(name: str) -> None:
    model, rehearsal, cuts = parts(name, 3)
    borders = [0, *cuts, len(rehearsal.events)]
    held = [parameters_of(rehearsal, borders[i], borders[i + 1], model) for i in range(3)]
    assert frozenset().union(*held) == {name for name, _ in model.named_parameters()}
    counted = {p: tuple(i for i in range(3) if p in held[i]) for p, _ in model.named_parameters()}
    assert shared_parameters(rehearsal, cuts, model) == {p: stages for p, stages in counted.items() if len(stages) > 1}


def test_tied_weights_are_shared_by_the_first_and_the_last_stage() -> None:
    model, rehearsal, cuts = parts("gpt2", 3)
    assert shared_parameters(rehearsal, cuts, model) == {"transformer.wte.weight": (0, 2)}


def test_what_is_not_held_takes_one_element_and_seems_to_be_there() -> None:
    model, rehearsal, cuts = parts("llama", 3)
    part = copy.deepcopy(model)
    kept = keep_own_part(part, rehearsal, [(0, cuts[0])])
    named = dict(model.named_parameters())
    own = sum(named[name].nbytes for name in kept)
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in part.parameters()}
    assert sum(storages.values()) == own + 4 * (len(named) - len(kept))
    for name, parameter in part.named_parameters():
        assert (parameter.shape, parameter.dtype, parameter.device) == (
            named[name].shape,
            named[name].dtype,
            named[name].device,
        )
        assert parameter.requires_grad == (name in kept) == (not isinstance(parameter, Absent))
    assert all(isinstance(p, Absent) == isinstance(q, Absent) for p, q in pairs(part))


def pairs(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(model.parameters(), copy.deepcopy(model).parameters(), strict=True))


def test_a_part_that_is_missing_is_named() -> None:
    model = stack()
    rehearsal = rehearsed(model, text_loss, BATCH)
    keep_own_part(model, rehearsal, [(0, 2)])
    stage = SplitStage(model, rehearsal, 0, 4)
    with pytest.raises(SplitError, match=r"is needed for the events .* and is absent"):
        stage.forward(bound(text_loss, model), BATCH, None, seed=1, divisor=1)
