"""A model beside its host's memory is saved and loaded without a copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoint import checkpoint_memory

SLACK = 6 * 2**20  # of Python, and of pieces that are read and written


@pytest.mark.full
def test_saving_and_loading_hold_one_tensor_more(tmp_path: Path) -> None:
    grown = checkpoint_memory.observe(tmp_path)
    layer = checkpoint_memory.LAYER_BYTES
    assert grown["save"] < layer + SLACK, grown
    assert grown["load"] < layer + SLACK, grown  # of momentum, what was there before makes room
    assert grown["load_model"] < layer + SLACK, grown
