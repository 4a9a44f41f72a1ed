"""What a forward changes is in the state of the one rank that has it as it should be."""

from __future__ import annotations

from pathlib import Path

import torch

from support.plain.plain_state import BATCHES, model, state_after_a_step
from support.ranks import run_ranks
from support.split.split_models_own import text_loss


def test_a_replaced_buffer_is_in_one_ranks_state(tmp_path: Path) -> None:
    states, errors = zip(*run_ranks(state_after_a_step, folder=tmp_path), strict=True)
    expected = model()
    for batch in BATCHES:
        text_loss(expected, batch)
    assert set().union(*states) == set(expected.state_dict())
    found = [state["mean"] for state in states if "mean" in state]
    assert len(found) == 1
    assert torch.equal(found[0], expected.mean)
    assert all("only its own stages" in error and "pipe.state_dict()" in error for each in errors for error in each)
