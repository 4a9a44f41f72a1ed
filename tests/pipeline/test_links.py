"""Messages arrive whole, in order and as they lie in memory, whatever the layouts and however many are expected."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hydra_ext.pipeline.ranks import messages
from support.pipeline import pipeline_links
from support.pipeline.pipeline_links import ALIKE, LAYOUTS, WORDY, crossing_bytes
from support.plain import link_failures
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


def test_receives_that_meet_no_message_stay_few(tmp_path: Path) -> None:
    """Each is kept until the link ends."""
    alike = [LAYOUTS.index(ALIKE)] * 2
    layouts = [layout for other in (1, 2, 1, 2, 1) * 4 for layout in (*alike, other)]
    program = (layouts, [0] * len(layouts))
    _, (result,) = run_ranks(pipeline_links.exchange, [program], 5, True, folder=tmp_path)
    assert result["wrong"] == []
    assert result["abandoned"] == 5  # of 20


def test_who_fails_on_a_link_by_itself_is_named_and_not_its_peer(tmp_path: Path) -> None:
    sending, receiving = run_ranks(link_failures.whom_ranks_name, folder=tmp_path)
    named = {case: heard for case, (_, heard) in receiving.items()}
    assert named == {case: heard for case, (_, heard) in sending.items()}
    no_memory = f"RuntimeError: {link_failures.NO_MEMORY}"
    for case, beginning in {
        "no memory for what arrives": f"rank 1 has failed receiving test from rank 0: {no_memory}",
        "no memory for what is expected": f"rank 1 has failed: {no_memory}",
        "no entry of what was sent": "rank 0 has failed sending test to rank 1: MemoryError: no room",
        "no entry of what has arrived": "rank 1 has failed receiving test from rank 0: MemoryError: no room",
        "the sender leaves": "rank 0 has failed: it has closed its pipeline, and this rank still waits for it",
    }.items():
        assert named.pop(case).startswith(beginning), case
    assert not named
    assert receiving["no memory for what is expected"][0] == no_memory
    assert sending["no entry of what was sent"][0].startswith("RankFailed: rank 0")  # flush() has not waited in vain


# ---- forms ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def words_of_forms(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    sent, arrived = run_ranks(pipeline_links.through_forms, folder=tmp_path_factory.mktemp("forms"))
    return [{"name": name, "words": sent[name], "wrong": arrived[name]} for name in sent]


def test_only_a_new_form_is_described(words_of_forms: list[dict[str, Any]]) -> None:
    """The words before the tensors of each message: those of the prologue alone, unless its form is new."""
    for found in words_of_forms:
        assert found["wrong"] == [], found["name"]
        described = ["new" if len(words) > 1 else "known" for words in found["words"]]
        assert all(words[0] == messages.PROLOGUE_WORDS for words in found["words"]), found["name"]
        changes = found["name"] in pipeline_links.CHANGES
        assert described == ["new", "known", "new" if changes else "known", "known", "known"], found["name"]


def test_a_form_that_was_forgotten_is_described_again(tmp_path: Path) -> None:
    sent, arrived = run_ranks(pipeline_links.through_many_forms, 70, folder=tmp_path)
    assert arrived == []
    assert [len(words) > 1 for words in sent] == [True] * 70 + [True, False]


def test_tensors_are_sent_before_they_are_announced(tmp_path: Path) -> None:
    """So that NCCL's receive on the other GPU waits for no send that has not begun."""
    order, _ = run_ranks(pipeline_links.order_of_sends, folder=tmp_path)
    assert order == ["tensors", "words", "words", "tensors", "words"]
