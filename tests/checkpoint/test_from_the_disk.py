"""Checkpoints of runs whose weights and optimizer state are on the disk: read from there, and put back there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hydra_ext
from hydra_ext import Run, SimulatedDevice
from support.benches import assert_same
from support.runtime.native import BATCHES, state
from support.runtime.on_disk import DEPTH, DEVICE_BUDGET, GRADIENT, ON_DISK, offloaded, pair


def step_over(run: Run, model: nn.Module, batches: torch.Tensor) -> None:
    for batch in batches:
        run.step(batch.split(2), lambda part: model(part).pow(2).mean(), max_norm=0.1)


@pytest.mark.full
def test_a_save_reads_the_disk_and_leaves_everything_there(tmp_path: Path) -> None:
    _, _, whole, theirs = pair()
    with hydra_ext.offload(whole, theirs, budget=DEVICE_BUDGET, device=SimulatedDevice()) as run:
        step_over(run, whole, BATCHES)
        run.save(tmp_path / "other")
    _, _, model, ours = pair()
    (tmp_path / "spill").mkdir()
    with offloaded(model, ours, tmp_path / "spill") as run:
        step_over(run, model, BATCHES)
        run.core.update.finish()
        before = run.report()
        saved = run.save(tmp_path / "checkpoints")
        after = run.report()
        assert (before.disk_bytes, before.disk_weight_bytes) == (after.disk_bytes, after.disk_weight_bytes)
        moved = after.disk_read_bytes - before.disk_read_bytes
        assert moved == DEPTH * (ON_DISK + 2 * GRADIENT)  # each once
    for file in saved.glob("*.safetensors"):
        assert_same(
            list(load_file(file).values()), list(load_file(tmp_path / "other" / saved.name / file.name).values())
        )


@pytest.mark.full
@pytest.mark.parametrize("spilled", [True, False])
def test_a_run_goes_on_from_a_checkpoint_on_the_disk_as_on_the_host(spilled: bool, tmp_path: Path) -> None:
    _, _, one, theirs = pair()
    (tmp_path / "spill").mkdir()
    with offloaded(one, theirs, tmp_path / "spill") as run:
        step_over(run, one, BATCHES[:2])
        run.save(tmp_path / "checkpoints")
        step_over(run, one, BATCHES[2:])
    _, _, model, ours = pair()
    there = offloaded(model, ours, tmp_path / "spill")
    here = hydra_ext.offload(model, ours, budget=DEVICE_BUDGET, device=SimulatedDevice())
    with there if spilled else here as run:
        step_over(run, model, BATCHES)  # somewhere else
        assert run.load(tmp_path / "checkpoints") is not None
        if spilled:
            assert run.report().disk_weight_bytes == DEPTH * ON_DISK
            assert run.report().disk_bytes >= DEPTH * (ON_DISK + 2 * GRADIENT)
        step_over(run, model, BATCHES[2:])
    assert_same(state(one, theirs), state(model, ours))
