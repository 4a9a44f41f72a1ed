"""Disks that are really full: it is told, nothing changes, and with room it goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.checkpoint import small_disks
from support.checkpoint.small_disks import LAYERS

pytestmark = pytest.mark.mounts

LAYER = 5 * 4096 + 2 * 4 * 4096 + 4 * 4096  # weights and bias, moments, gradient


def test_a_spill_dir_without_room_is_told_on_entering_and_with_room_it_works(tmp_path: Path) -> None:
    seen = small_disks.observe(small_disks.spilling, tmp_path)
    first, second = seen["told"]
    found = re.search(r"takes .*?\((\d+) bytes\) in spill_dir '(.*)', where .*?\((\d+) bytes\) are free", first)
    assert found is not None, first
    assert (int(found[1]), found[2], int(found[3])) == (LAYERS * LAYER, str(tmp_path), 2**20)
    assert f"in spill_dir '{tmp_path}'" in second
    assert "No space left on device" in second
    assert seen["unchanged"]
    assert (seen["used"], seen["names"]) == (0, [])
    assert seen["on disk"] > 0
    assert seen["reserved"] == LAYERS * LAYER
    assert seen["same losses"]
    assert seen["same state"]
    assert seen["left"] == 0


@pytest.mark.full
def test_a_disk_that_becomes_full_as_saved_tensors_leave_is_told_and_with_room_the_step_works(tmp_path: Path) -> None:
    seen = small_disks.observe(small_disks.stashing, tmp_path)
    assert f"in spill_dir '{tmp_path}'" in seen["told"]
    assert "No space left on device" in seen["told"]
    assert "give a larger host_budget=" in seen["told"]
    assert 0 < seen["model"] < seen["full"] <= 3 * 2**20
    assert seen["written"] > 3 * 2**20
    assert seen["same losses"]
    assert seen["same state"]
    assert seen["left"] == 0


@pytest.mark.full
def test_a_checkpoint_without_room_leaves_the_one_before_and_the_run_as_they_are(tmp_path: Path) -> None:
    seen = small_disks.observe(small_disks.saving, tmp_path)
    assert seen["needed"] > seen["free"] > 0
    assert str(tmp_path / "checkpoints") in seen["told"]
    assert seen["left"] == 0
    assert seen["kept"] == [["whole", True]]
    assert seen["states"] == ["whole"] * 2
    assert seen["on disk"] > 0
    assert seen["same losses"]
    assert seen["same state"]
    assert seen["goes on"]
