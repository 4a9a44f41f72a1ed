"""What else reads a pipeline's checkpoint, and what else a pipeline reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

import hydra_ext
from hydra_ext.cli import main
from support.checkpoint.checkpoints import manifest_of
from support.pipeline.pipeline_checkpoints import SAVED, check, load_and_go_on, plain, read_as_weights, save_and_go_on
from support.plain.plain_models import OPTIMIZERS, Case
from support.ranks import run_ranks

TIED = Case("gpt2", cuts=("transformer.h.2",), microbatches=3, steps=5)
FLUSHED = Case("llama", microbatches=3, steps=5)
LATE = Case("llama", schedule="2bw", microbatches=3, steps=5)
CASES = (TIED, FLUSHED, LATE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By two ranks; of each case the folder of its number."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_and_go_on, CASES, folder, folder=folder)
    return folder


@pytest.mark.full
def test_other_programs_read_the_weights(saved: Path) -> None:
    checkpoint = saved / "0" / f"step-0000000{SAVED}"
    files = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(files.values()) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert files["transformer.h.1.ln_1.weight"] != files["transformer.h.2.ln_1.weight"]
    model = TIED.subject.make()
    assert hydra_ext.load_model(saved / "0", model).step == SAVED
    expected = model.state_dict()
    assert set(files) == set(expected) - {"lm_head.weight"}
    for name, file in files.items():
        with safe_open(checkpoint / file, framework="pt") as tensors:
            assert torch.equal(tensors.get_tensor(name), expected[name])
    theirs = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.state_dict().items())
    assert main.run(["verify", str(saved / "0")]) == 0


def test_the_stages_of_a_model_without_memory_are_read_from_it_and_what_is_damaged_is_not(
    saved: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    for copy in (checkpoint, tmp_path / "whole"):
        shutil.copytree(saved / "0" / f"step-0000000{SAVED}", copy)
    damaged, on_rank_0 = "transformer.h.2.ln_1.weight", "transformer.h.1.ln_1.weight"
    whole = run_ranks(read_as_weights, TIED, checkpoint, folder=tmp_path)
    assert [why for why, _ in whole] == ["", ""]
    assert on_rank_0 in whole[0][1]
    assert damaged in whole[1][1]
    record = manifest_of(checkpoint)["tensors"]["model"][damaged]
    data = bytearray((checkpoint / record["file"]).read_bytes())
    data[record["bytes"][1] - 1] ^= 1
    (checkpoint / record["file"]).write_bytes(data)
    ranks = run_ranks(read_as_weights, TIED, checkpoint, folder=tmp_path)
    assert ranks[1][0].startswith(f"WeightsError: {checkpoint / record['file']}: {damaged}: ")
    assert ranks[0][0] != ""
    assert damaged not in ranks[0][1] + ranks[1][1]


def offloaded_run(saves: Path | None, loads: Path | None) -> list[torch.Tensor]:
    """Losses of the steps: to the save, or from the checkpoint on."""
    model = FLUSHED.subject.make()
    optimizer = OPTIMIZERS[FLUSHED.optimizer](model.parameters())
    losses = []
    with hydra_ext.offload(model, optimizer, budget="1MiB") as run:
        if loads is not None:
            assert run.load(loads) is not None
        for batches in FLUSHED.data()[run.steps : SAVED if saves is not None else FLUSHED.steps]:
            optimizer.zero_grad()
            told = []
            for batch in batches:
                loss = FLUSHED.subject.fn(model, batch)
                (loss / len(batches)).backward()
                told.append(loss.detach())
            optimizer.step()
            losses.append(torch.stack(told))
        if saves is not None:
            run.save(saves, extra={"rank": 0})
    return losses


def test_a_run_on_one_device_goes_on_from_it(saved: Path) -> None:
    losses = offloaded_run(None, saved / "1")
    expected = plain(FLUSHED).losses[SAVED:]
    assert len(losses) == len(expected) == 2
    assert all(map(torch.equal, losses, expected))


@pytest.mark.full
def test_it_goes_on_from_a_run_on_one_device(tmp_path: Path) -> None:
    offloaded_run(tmp_path / "run" / "0", None)
    ranks = run_ranks(load_and_go_on, [FLUSHED], [tmp_path / "run"], folder=tmp_path)
    check(FLUSHED, [result for (result,) in ranks], SAVED)


def test_a_run_refuses_a_training_whose_next_step_uses_older_weights(saved: Path) -> None:
    with pytest.raises(hydra_ext.errors.CheckpointMismatch, match=r"older weights.*load_model"):
        offloaded_run(None, saved / "2")


class WithASpare(nn.Module):
    """One of its blocks is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.spare = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("stages", [1, 2])
def test_what_no_forward_uses_is_saved_too(stages: int, tmp_path: Path) -> None:
    model = WithASpare()
    model.spare[0].running_mean.fill_(3.0)
    with hydra_ext.Pipeline(model, OPTIMIZERS["sgd"], schedule="gpipe", microbatches=1, stages=stages) as pipe:
        pipe.step([torch.ones(2, 4)], model)
        pipe.save(tmp_path)
        expected = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    other = WithASpare()
    hydra_ext.load_model(tmp_path, other)
    found = other.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(found["spare.0.running_mean"], torch.full((4,), 3.0))
