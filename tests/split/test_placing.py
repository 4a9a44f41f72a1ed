"""What the engine does with the arguments of a model's call, as a rehearsal and a stage see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.runtime.arguments import Arguments, bring_home, to_device
from hydra_ext.split.rehearsal.record import Key, Rehearsal
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.stages.placing import placed_in_rehearsal, placed_in_stage
from hydra_ext.split.stages.tensors import Absent, StandIns
from hydra_ext.split.stages.watch import StandInWatch
from support.split.split_models_own import Stack, text, text_loss
from support.split.split_stages import cut, rehearsed

BATCH = text(torch.Generator().manual_seed(1))


class Writes(Stack):
    def forward(self, x: Tensor) -> Any:
        x.add_(1).remainder_(8)
        return super().forward(x)


def placing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As under a budget, where nothing is on the device yet."""
    arguments = Arguments(torch.clone)
    (x,) = arguments.place((batch["x"],))
    assert x is not batch["x"]
    try:
        return text_loss(model, {"x": x, "y": batch["y"]})
    finally:
        arguments.give_back()


@pytest.mark.parametrize("make", [Stack, Writes])
def test_it_is_no_step_of_the_forward(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    plain, placed = (rehearsed(model, fn, BATCH) for fn in (text_loss, placing))
    assert placed.way == plain.way
    assert placed.digest == plain.digest
    assert placed.possible_cuts == plain.possible_cuts == [1, 2, 3, 4, 5]
    assert placed.lasting.named == plain.lasting.named
    assert _losses(model, placing, plain) == _losses(model, text_loss, plain)


def _losses(model: nn.Module, fn: Callable[..., Tensor], rehearsal: Rehearsal) -> list[float]:
    stages = cut(model, fn, rehearsal, [3])
    batches = [{key: value.clone() for key, value in BATCH.items()} for _ in range(2)]
    return [stages.forward(batch)[-1].loss.item() for batch in batches]


def test_what_is_in_another_place_has_the_same_name() -> None:
    recorder = Recorder()
    host = torch.ones(2)
    key = recorder.values.make(Key("event", 0, "output 0"), host)
    moved = placed_in_rehearsal(recorder, to_device, (host, torch.clone))
    assert moved is not host
    assert recorder.values.key_of(moved) == key
    assert recorder.notes.get(moved) is recorder.notes.get(host)


def test_a_stage_brings_nothing_to_the_device_that_is_not_there() -> None:
    stand_ins = StandIns(torch.device("cpu"))
    watch = StandInWatch(stand_ins, ())
    for missing in (stand_ins.make((2, 3), torch.float32), Absent.like(torch.ones(2), torch.device("cpu"))):
        assert placed_in_stage(watch, to_device, (missing, torch.clone)) is missing


def test_what_a_skipped_call_has_written_to_is_not_there_at_home_either() -> None:
    watch = StandInWatch(StandIns(torch.device("cpu")), ())
    host, other = torch.ones(2), torch.ones(2)
    moved = [placed_in_stage(watch, to_device, (tensor, torch.clone)) for tensor in (host, other)]
    watch.mark(moved[0])
    for tensor, each in zip((host, other), moved, strict=True):
        placed_in_stage(watch, bring_home, (tensor, each, each._version))
    assert watch.what(host)
    assert not watch.what(other)
