"""Messages arrive whole, in order and as they lie in memory, whatever the layouts and however many are expected."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support import pipeline_links
from support.pipeline_links import ALIKE, LAYOUTS, WORDY, crossing_bytes
from support.ranks import run_ranks


def random_program(seed: int) -> tuple[list[int], list[int]]:
    """Runs of messages of one layout, as a pipeline has them, broken here and there."""
    chance = random.Random(seed)
    layouts: list[int] = []
    while len(layouts) < 24:
        layouts += [chance.randrange(len(LAYOUTS) + 1)] * chance.choice((1, 1, 2, 3, 6))
    return layouts, [chance.choice((0, 0, 1, 2, 5)) for _ in layouts]


@pytest.mark.parametrize("first", [0, pytest.param(100, marks=pytest.mark.full)])
def test_messages_of_changing_layouts_arrive_as_they_were_sent(first: int, tmp_path: Path) -> None:
    programs = [random_program(seed) for seed in range(first, first + 25)]
    _, results = run_ranks(pipeline_links.exchange, programs, folder=tmp_path)
    for (layouts, _), result in zip(programs, results, strict=True):
        assert result["wrong"] == [], layouts
        expected = (crossing_bytes((*LAYOUTS, WORDY)[layout], index) for index, layout in enumerate(layouts))
        assert result["bytes"] == sum(expected)
    assert sum(result["ahead"] for result in results) > 25


def test_what_repeats_is_received_ahead(tmp_path: Path) -> None:
    """From the third message on: one layout, and one message expected at a time."""
    _, (result,) = run_ranks(pipeline_links.exchange, [([LAYOUTS.index(ALIKE)] * 12, [0] * 12)], folder=tmp_path)
    assert result["wrong"] == []
    assert result["ahead"] >= 10
