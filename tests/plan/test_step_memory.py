"""The terms of a planned step's memory: their largest sum is the planner's peak."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_ext import _C
from hydra_ext.plan.segments import Coding, Freedom, Segment
from hydra_ext.plan.steps.memory import memory_of, moved_bytes
from hydra_ext.profile import Amount, ModuleFigures

pytestmark = pytest.mark.every_case

KEEP, OFFLOAD = _C.ActivationOption.KEEP, _C.ActivationOption.OFFLOAD
COMPRESS = _C.ActivationOption.COMPRESS
AGAIN, AGAIN_OFFLOADED = _C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED


def segment(name: str, draw: random.Random) -> Segment:
    saved, inputs, weights = draw.randrange(100), draw.randrange(100), draw.randrange(100)
    again = draw.choice((0, 7, 70))  # of what an earlier one has saved
    figures = ModuleFigures(
        name=name,
        forward_seconds=draw.random(),
        saved=Amount(fresh=saved, all=saved + again),
        inputs=Amount(fresh=inputs, all=inputs + draw.choice((0, 7))),
        parked_bytes=draw.randrange(20),
        forward_bytes=draw.randrange(200),
        backward_bytes=draw.randrange(200),
    )
    return Segment(
        figures=figures,
        backward_seconds=draw.random(),
        weight_bytes=weights,
        slot_bytes=draw.randrange(weights + 1),
        live_gradient_bytes=draw.randrange(100),
        gradient_bytes=draw.randrange(100),
        freedom=Freedom(
            recompute=_C.RecomputeScope.IN_ROUNDS, coding=Coding(stream_bytes=draw.randrange(50), seconds=1.0)
        ),
    )


def treated(options: list[Any], *, round_size: int = 1, stash_bytes: int = 0) -> Any:
    return SimpleNamespace(options=options, round_size=round_size, stash_bytes=stash_bytes)


@pytest.mark.parametrize("seed", range(50))
def test_the_largest_sum_is_the_planners_peak(seed: int) -> None:
    draw = random.Random(seed)
    segments = [segment(str(number), draw) for number in range(draw.randrange(1, 8))]
    found = treated(
        [draw.choice((KEEP, OFFLOAD, COMPRESS, AGAIN, AGAIN_OFFLOADED)) for _ in segments],
        round_size=draw.randrange(1, 5),
        stash_bytes=draw.randrange(300),
    )
    *_, peak = _C.simulate_activations(
        [each.core() for each in segments], **vars(found), microbatches=4, budget=2**40, to_device=1.0, to_host=1.0
    )
    points = memory_of(segments, found, 1000)
    assert max(point.total for point in points) == 1000 + peak
    assert [point.way for point in points] == ["forward"] * len(segments) + ["backward"] * len(segments)
    assert [point.segment for point in points] == [*(each.name for each in segments)] + [
        each.name for each in reversed(segments)
    ]


def test_what_is_on_the_host_is_what_the_planner_counts() -> None:
    draw = random.Random(1)
    segments = [segment(str(number), draw) for number in range(6)]
    cuts = [[each.core() for each in segments]]
    for room in range(0, 400, 40):
        found = _C.plan_activations(cuts, microbatches=2, budget=700, to_device=1e6, to_host=1e6, host_bytes=room)
        assert moved_bytes(segments, found) <= room
    by_hand = treated([OFFLOAD, AGAIN_OFFLOADED, KEEP, AGAIN, KEEP, KEEP], round_size=3)
    assert moved_bytes(segments, by_hand) == 3 * (segments[0].figures.saved.fresh + segments[1].figures.inputs.fresh)
