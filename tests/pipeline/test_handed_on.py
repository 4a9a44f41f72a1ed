"""What a stage hands on arrives as it was then, whatever writes to that memory later; and nothing is kept for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.plain import handed_on
from support.plain.handed_on import COUNT, KEPT
from support.ranks import run_ranks


def test_memory_that_is_written_to_again_arrives_as_it_was(tmp_path: Path) -> None:
    _, seen = run_ranks(handed_on.numbers_seen, folder=tmp_path)
    assert seen == [[{float(number)} for _ in KEPT] for number in range(1, COUNT + 1)]


def test_writing_to_what_is_still_on_its_way_ends_the_pipeline(tmp_path: Path) -> None:
    for error in run_ranks(handed_on.write_too_soon, folder=tmp_path):
        assert "rank 0 has failed while sending microbatch 3 of batch 0 (test to rank 1)" in error
        assert "was written to before it was sent: return a clone()" in error


def test_of_forms_that_never_repeat_both_ends_keep_the_last_ones(tmp_path: Path) -> None:
    (_, sent), (arrived, received) = run_ranks(handed_on.texts_that_never_repeat, folder=tmp_path)
    texts = [f"{number}" if number % 3 else "again" for number in range(200)]
    texts += [f"{number}" for number in range(200)] + ["", "again"]
    assert arrived == [f"{text} {number}" for number, text in enumerate(texts)]
    assert sent == received == 64


@pytest.mark.full
def test_numbers_in_metrics_are_not_kept(tmp_path: Path) -> None:
    for metrics, kept in run_ranks(handed_on.steps_with_numbers, folder=tmp_path):
        assert metrics == [[step, step] for step in range(100)]
        assert max(kept) == 64


def test_what_cannot_be_sent_is_told_and_the_next_message_arrives(tmp_path: Path) -> None:
    told, arrived = run_ranks(handed_on.what_cannot_be_sent, folder=tmp_path)
    kinds = (
        "a torch.sparse_coo tensor of torch.float32",
        "a torch.strided tensor of torch.qint8",
        "a torch.sparse_csr",
    )
    for error, kind in zip(told, kinds, strict=True):
        assert error.startswith(kind)
    assert arrived == ["of one: [[1.0, 1.0]]"]
