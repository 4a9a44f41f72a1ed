"""What goes wrong in a save or a load of a pipeline: every rank raises, and what was there before is as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import hydra_ext
from hydra_ext.checkpoint.verifying import verify
from support.checkpoint import saving_beside
from support.pipeline import pipeline_save_failures as bodies
from support.pipeline import pipelines
from support.pipeline.pipeline_failures import run_to_the_end
from support.ranks import run_ranks


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.full)])
def test_whatever_fails_on_one_rank_fails_on_both_and_the_pipeline_goes_on(stride: int, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    first, second = run_ranks(bodies.failing_saves, folder, stride, folder=tmp_path)
    assert len(first["heard"]) > 6
    for (failing, n, *heard), (_, _, *other) in zip(first["heard"], second["heard"], strict=True):
        here, there = (*heard, *other) if failing == 0 else (*other, *heard)
        assert (here, there) in (("SaveFailed", f"RankFailed {failing}"), ("done", "done")), f"rank {failing}, {n}"
    assert first["losses"] == second["losses"]
    assert [verdict.state for verdict in verify(folder)] == ["whole", "whole"]
    assert sorted(each.name for each in folder.iterdir())[-1] == "step-00000003"
    assert hydra_ext.load_model(folder, nn.Sequential(*pipelines.make_stages(2))).step == 3


@pytest.mark.parametrize("stride", [23, pytest.param(2, marks=pytest.mark.full)])
def test_a_pipeline_is_loaded_whole_whenever_another_one_saves(stride: int, tmp_path: Path) -> None:
    first, second = run_ranks(saving_beside.rotated_loads, tmp_path, stride, folder=tmp_path)
    assert first == second
    assert all(name for _, _, name in first)
    assert len(first) > 100 / stride


KILLS = [
    (1, 1),
    *((1, n) for n in range(2, 5)),
    *((0, n) for n in range(1, 12)),
]  # every file or folder that is made safe


@pytest.mark.parametrize(
    ("victim", "n"), [KILLS[0], *(pytest.param(*kill, marks=pytest.mark.full) for kill in KILLS[1:])]
)
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before_or_this_one(
    victim: int, n: int, tmp_path: Path
) -> None:
    ended = run_to_the_end(bodies.killed_in_a_save, victim, n, tmp_path, folder=tmp_path, size=2, without=[victim])
    assert ended[1 - victim]["kind"] == "RankFailed"
    assert f"rank {victim} has failed" in ended[1 - victim]["error"]
    folder = tmp_path / "ckpt"
    states = {verdict.path.name: verdict.state for verdict in verify(folder)}
    assert states.pop("step-00000001") == "whole"
    before_the_folder, after_the_rename = (victim, n) == KILLS[4], (victim, n) == KILLS[-1]
    assert states == ({} if before_the_folder else {"step-00000002": "whole" if after_the_rename else "unfinished"})
    newest = 2 if after_the_rename else 1
    assert hydra_ext.load_model(folder, nn.Sequential(*pipelines.make_stages(2))).step == newest
    with hydra_ext.offload(nn.Linear(1, 1), budget="1MiB") as run:
        run.save(folder)  # collects what the killed one has left
    assert sorted(each.name for each in folder.iterdir()) == ["step-00000000", f"step-0000000{newest}"]


def test_damage_that_one_rank_finds_is_raised_by_both_before_anything_is_changed(tmp_path: Path) -> None:
    places = [
        ("model-00001-of-00002.safetensors", -1),
        ("model-00002-of-00002.safetensors", -1),
        ("optimizer-00002-of-00002.safetensors", -1),
        ("training-00002-of-00002.safetensors", -1),
        ("model-00002-of-00002.safetensors", 20),
        ("manifest.json", 100),
    ]
    first, second = run_ranks(bodies.damaged_loads, tmp_path / "ckpt", places, folder=tmp_path)
    assert first["heard"] == second["heard"]
    assert {kind for kind, _, _ in first["heard"]} == {"CheckpointError"}
    assert [file for _, file, _ in first["heard"]] == [file for file, _ in places]
    tensors = [tensor for _, _, tensor in first["heard"]]
    assert all(tensor.startswith("0.") for tensor in tensors[:1])
    assert all("1." in tensor for tensor in tensors[1:4])
    assert tensors[4:] == [None, None]
    for results in (first, second):
        assert all(results["unchanged"])
        assert results["losses"][0] == results["losses"][1]


def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(bodies.refusals, tmp_path / "ckpt", folder=tmp_path)
    expected = [
        (r"StateError: pipe\.save: .* call pipe\.prepare", None),
        (r"StateError: pipe\.load: .* call pipe\.prepare", None),
        ("done", None),
        ("InvalidArgument: pipe.save: keep=0", None),
        ("RankFailed: rank 1 has failed to save a checkpoint", "InvalidArgument: pipe.save: extra is a set"),
        ("RankFailed: rank 1 has failed", "SaveFailed: .*which rank 0 has made, does not exist .* all ranks see"),
        ("UnsupportedState: schedule= is not in the same state", None),
        ("RankFailed: rank 1 has failed", r"StateError: pipe\.save: '1\..*' has a gradient that no step has used"),
        ("CheckpointMismatch: .* 1 steps old .* 0 steps old .*hydra_ext.load_model", None),
        ("CheckpointMismatch: .*the optimizer was a 'torch.optim.adamw.AdamW', and is a torch.optim.sgd.SGD", None),
        ("CheckpointMismatch: .* 0 steps old .* 1 steps old ", None),
        ("CheckpointMismatch: .*schedule= was None, and is 'torch.optim.lr_scheduler.ExponentialLR'", None),
        ("RankFailed: rank 1 has failed in the forward of", "StateError: pipe.save was called in the forward of"),
    ]
    for number, (of_first, of_second) in enumerate(expected):
        for found, wanted in ((first[number], of_first), (second[number], of_second or of_first)):
            assert re.match(wanted, found, re.DOTALL), f"{number}: {found}"
