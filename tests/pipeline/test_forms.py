"""Forms of messages that change in the middle of a run: the numbers are those of a plain loop."""

from __future__ import annotations

from pathlib import Path

from support.pipeline import pipeline_forms
from support.ranks import run_ranks


def test_short_batches_and_evaluations_describe_their_forms_once(tmp_path: Path) -> None:
    (first, *own), (last, *others) = run_ranks(pipeline_forms.train, folder=tmp_path)
    assert tuple(own) == tuple(others) == pipeline_forms.train_alone()
    assert first == {"activations": 3}  # four rows, one row, and four rows that require no gradient
    assert last == {"gradients": 2, "losses": 1}
