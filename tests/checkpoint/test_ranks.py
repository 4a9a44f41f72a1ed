"""Several ranks: one writes, all of them go on, and all of them hear of an error."""

from __future__ import annotations

from pathlib import Path

import hydra_ext
from hydra_ext.checkpoint.verifying import verify
from support.checkpoint import checkpoint_ranks as bodies
from support.checkpoint.checkpoints import manifest_of
from support.ranks import run_ranks


def test_a_resumed_run_of_two_ranks_is_the_uninterrupted_one(tmp_path: Path) -> None:
    assert run_ranks(bodies.resume, tmp_path / "ckpt", folder=tmp_path) == [[], []]
    content = manifest_of(tmp_path / "ckpt" / "step-00000003")["content"]
    assert len(content["ranks"]) == 2
    assert content["ranks"][0] != content["ranks"][1]
    means = {"body.1.running_mean", "body.1.running_var", "body.4.running_mean", "body.4.running_var"}
    assert [set(buffers) for buffers in content["buffers"]] == [set(), means]


def test_one_rank_goes_on_from_a_checkpoint_of_two(tmp_path: Path) -> None:
    assert run_ranks(bodies.own_buffers, tmp_path / "ckpt", folder=tmp_path) == [[True], [False]]


def test_every_rank_hears_of_an_error(tmp_path: Path) -> None:
    first, second = run_ranks(bodies.failures, tmp_path / "ckpt", folder=tmp_path)
    expected = [
        ("done", "done"),
        ("SaveFailed", "RankFailed 0"),
        ("RankFailed 1", "InvalidArgument"),
        ("RankFailed 1", "StateError"),
        ("done", "done"),
        ("RankFailed 1", "CheckpointMismatch"),
        ("RankFailed 1", "CheckpointError"),
        ("done", "done"),
    ]
    assert list(zip(first, second, strict=True)) == expected
    assert [verdict.state for verdict in verify(tmp_path / "ckpt")] == ["whole"]


def test_ranks_without_a_shared_folder_hear_so(tmp_path: Path) -> None:
    for heard in run_ranks(bodies.apart, tmp_path / "ckpt", folder=tmp_path):
        assert "is not the same on all ranks: give a shared folder" in heard


def test_a_signal_to_one_rank_ends_both_behind_a_save(tmp_path: Path) -> None:
    expected = [["RankFailed", 143, 3, 0], ["ZeroDivisionError", 143, 3, 0]]
    assert run_ranks(bodies.terminated, tmp_path / "ckpt", folder=tmp_path) == expected
    assert hydra_ext.load_model(tmp_path / "ckpt", bodies.JOB.make(0).model).step == 3
