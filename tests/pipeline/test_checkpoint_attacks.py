"""A manifest that was written to deceive: whatever it says of a pipeline, nothing is changed by it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ext.errors import CheckpointError
from hydra_ext.pipeline import Pipeline
from support.checkpoint import damaged
from support.pipeline import pipeline_save_failures as bodies
from support.pipeline import pipelines
from support.pipeline.pipeline_save_failures import own
from support.ranks import run_ranks

WEIGHT = "0.0.embedding.weight"
NORM = "0.1.norm.weight"
BIAS = "0.1.norm.bias"


def pipeline() -> Pipeline:
    return Pipeline(None, pipelines.adamw, stages=pipelines.make_stages(1), schedule="2bw", microbatches=2, seed=5)


def step(pipe: Pipeline) -> None:
    pipe.step([pipelines.make_microbatch(0, index) for index in range(2)], pipelines.loss_of)


def put(*path: Any, value: Any) -> Callable[[Any], Any]:
    def edit(body: Any) -> Any:
        place = body["content"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = copy.deepcopy(value)
        return body

    return edit


LIES = {
    "versions": put("versions", value=[]),
    "a number of versions": put("versions", WEIGHT, value=3),
    "text for versions": put("versions", WEIGHT, value="x"),
    "a version that is no tensor": put("versions", WEIGHT, value=[5]),
    "a version that is a type": put("versions", WEIGHT, value=[{"$": "dtype", "name": "float32"}]),
    "a version that is not there": put("versions", WEIGHT, value=[{"$": "tensor", "name": "none"}]),
    "another tensor's version": put("versions", WEIGHT, value=[{"$": "tensor", "name": f"1 before/{NORM}"}]),
    "another tensor's version of its shape": put("versions", NORM, value=[{"$": "tensor", "name": f"1 before/{BIAS}"}]),
    "too few versions": put("versions", WEIGHT, value=[]),
    "progress": put("pipeline", value=3),
    "no progress": put("pipeline", value={}),
    "another number of batches": put("pipeline", "batches", value=7),
    "evaluations": put("pipeline", "evaluations", value=-1),
    "seed": put("pipeline", "seed", value="5"),
    "updates": put("pipeline", "updates", value=5),
    "an update": put("pipeline", "updates", value=[{"batch": 0}]),
    "an update's norm": put("pipeline", "updates", value=[{"batch": 0, "norm": "1", "skipped": False}]),
    "no ranks": put("ranks", value=[]),
    "random states": put("ranks", 0, value={}),
    "buffers": put("buffers", value={}),
    "a replica's buffers": put("buffers", 0, value=[]),
    "a buffer": put("buffers", 0, value={WEIGHT: 5}),
    "a buffer of another shape": put("buffers", 0, value={WEIGHT: {"$": "tensor", "name": f"1 before/{NORM}"}}),
    "the optimizer's groups": put("optimizer", "groups", value=[{}]),
    "the optimizer's state": put("optimizer", "state", WEIGHT, value=[]),
    "a moment that is a number": put("optimizer", "state", WEIGHT, "exp_avg", value=1.0),
    "a moment of another shape": put(
        "optimizer", "state", WEIGHT, "exp_avg", value={"$": "tensor", "name": f"{NORM}/exp_avg"}
    ),
    "another moment": put(
        "optimizer", "state", WEIGHT, "exp_avg", value={"$": "tensor", "name": f"{WEIGHT}/exp_avg_sq"}
    ),
    "another's moment": put("optimizer", "state", NORM, "exp_avg", value={"$": "tensor", "name": f"{BIAS}/exp_avg"}),
    "no moments": put("optimizer", "state", NORM, value={"step": 1.0}),
    "a rate that is text": put("optimizer", "groups", 0, "options", "lr", value="x"),
    "betas of 2": put("optimizer", "groups", 0, "options", "betas", value=[2.0, 2.0]),
    "the schedule": put("schedule", value=5),
    "the scaler": put("scaler", value=5),
    "the loaders": put("loaders", value=5),
    "a loader's state": put("loaders", value={"states": [5], "ranks": [0]}),
    "a loader for more ranks": put("loaders", value={"states": [{"class": "x", "state": {}}], "ranks": [0, 0]}),
    "a loader that is not there": put("loaders", value={"states": [{"class": "x", "state": {}}], "ranks": [1]}),
    "a loader's class": put("loaders", value={"states": [{"class": 1, "state": {}}], "ranks": [0]}),
    "a loader's tensor": put(
        "loaders",
        value={
            "states": [
                {
                    "class": "x",
                    "state": {"at": {"$": "tensor", "name": "loader/at"}},
                    "tensors": {"loader/at": ["F32", [2], "00"]},
                }
            ],
            "ranks": [0],
        },
    ),
}


FORGED = (  # what is wrong for the optimizer of the first stage, of the second one, and of both
    put("optimizer", "state", "0.0.embedding.weight", value={"step": 1.0}),
    put("optimizer", "state", "1.2.head.weight", "exp_avg_sq", value=None),
    put("optimizer", "groups", 0, "options", "lr", value="x"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with pipeline() as pipe:
        step(pipe)
        return pipe.save(folder)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_changes_nothing(lie: str, saved: Path) -> None:
    manifest = saved / "manifest.json"
    truth = manifest.read_bytes()
    damaged.change(saved, LIES[lie])
    try:
        with pipeline() as pipe:
            step(pipe)
            before, states = own(pipe), torch.get_rng_state()
            with pytest.raises(CheckpointError) as caught:
                pipe.load(saved)
            assert caught.value.file.is_relative_to(saved)
            assert all(map(torch.equal, own(pipe), before))
            assert torch.equal(torch.get_rng_state(), states)
            manifest.write_bytes(truth)
            assert pipe.load(saved) is not None
    finally:
        manifest.write_bytes(truth)


@pytest.mark.full
def test_an_optimizer_that_cannot_go_on_on_one_rank_is_refused_on_both(tmp_path: Path) -> None:
    run_ranks(bodies.saves_once, tmp_path / "ckpt", folder=tmp_path)
    forged = [tmp_path / str(number) for number in range(len(FORGED))]
    for lie, folder in zip(FORGED, forged, strict=True):
        shutil.copytree(tmp_path / "ckpt", folder)
        damaged.change(next(folder.iterdir()), lie)
    for heard in run_ranks(bodies.refused_loads, tmp_path / "ckpt", forged, folder=tmp_path):
        assert heard == [["CheckpointError", "step-00000001", None, True]] * len(forged)
