"""What a checkpoint looks like to others: Hugging Face's loaders, safetensors, and load_model."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import hydra_ext
from hydra_ext.checkpoint.format import writer
from hydra_ext.checkpoint.format.header import CODES, DTYPES
from hydra_ext.errors import CheckpointError, CheckpointMismatch
from support.checkpoint.checkpoints import Job, differences, manifest_of, offloaded


def saved(model: nn.Module, folder: Path, **options: object) -> Path:
    with hydra_ext.offload(model, budget="64MiB") as run:
        return run.save(folder, **options)


@pytest.mark.parametrize("shard_bytes", [2**31, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_reads_it(
    shard_bytes: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", shard_bytes)
    made = Job("gpt2", "split", "none", dtype).make(0)
    with offloaded(made) as run:
        made.steps(2)
        folder = run.save(tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert ("model.safetensors" in names) == (shard_bytes > 2**20)
    assert ("model.safetensors.index.json" in names) == (shard_bytes < 2**20)
    assert {"config.json", "generation_config.json"} < names
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert read.dtype == dtype
    assert read.lm_head.weight is read.transformer.wte.weight
    assert not differences(dict(read.state_dict()), dict(made.model.state_dict()))
    assert type(transformers.AutoModelForCausalLM.from_pretrained(folder)) is transformers.GPT2LMHeadModel
    loaded = hydra_ext.load_model(folder, type(read)(read.config).to(dtype))
    assert (loaded.step, loaded.extra, loaded.path) == (2, None, folder)


def test_shards_end_at_blocks_and_have_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 60_000)
    made = Job("gpt2").make(0)
    with offloaded(made) as run:
        folder = run.save(tmp_path)
        blocks = [[name for name, _ in block.parameters] for block in run.layout.blocks]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file_of = index["weight_map"]
    for names in blocks:
        assert len({file_of[name] for name in names}) == 1
    files = {name: load_file(folder / name) for name in set(file_of.values())}
    assert len(files) > 3
    for file, tensors in files.items():
        assert set(tensors) == {name for name, where in file_of.items() if where == file}
        several = len({next(i for i, block in enumerate(blocks) if name in block) for name in tensors}) > 1
        assert not several or sum(t.nbytes for t in tensors.values()) <= 60_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files.values() for t in f.values())
    assert manifest_of(folder)["ties"] == [["transformer.wte.weight", "lm_head.weight"]]
    assert "lm_head.weight" not in file_of


class Odd(nn.Module):
    """A buffer of each type that safetensors has, of odd sizes and shapes, besides parameters that lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for code, dtype in zip(CODES.values(), CODES, strict=True):
            values = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
            self.register_buffer(f"b{code}", values)
        self.register_buffer("complex", torch.randn(3, 2, dtype=torch.complex64, generator=generator).conj())
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("strided", torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("expanded", torch.arange(3.0).expand(4, 3))
        self.register_buffer("nan", torch.tensor([float("nan"), -0.0, float("inf")]))
        self.register_buffer("lost", torch.ones(2), persistent=False)
        self.weight = nn.Parameter(torch.randn(4, 3, generator=generator).t())
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def bits(tensor: torch.Tensor) -> list[int]:
    tensor = tensor.detach().resolve_conj()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_type_comes_back_bit_for_bit_and_safetensors_reads_it(tmp_path: Path) -> None:
    model = Odd()
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    folder = saved(model, tmp_path)
    other = Odd()
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            if name == "expanded":
                other.expanded = torch.zeros(4, 3)
            else:
                tensor.copy_(torch.zeros_like(tensor))
    hydra_ext.load_model(tmp_path, other)
    assert {name: bits(tensor) for name, tensor in other.state_dict().items()} == expected
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == expected.keys()
        assert file.metadata() == {"format": "pt"}
        for name in file.keys():  # noqa: SIM118 - no mapping
            assert bits(file.get_tensor(name)) == expected[name]
    assert "lost" not in expected
    for record in manifest_of(folder)["tensors"]["model"].values():
        assert record["bytes"][0] % DTYPES[record["dtype"]].itemsize == 0  # as some readers need it


def test_files_can_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    folder = saved(nn.Linear(2, 2), tmp_path)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o666 & ~0o022} or modes == {0o666 & ~_umask()}


def _umask() -> int:
    return int(
        next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("Umask")).split()[1], 8
    )


# ---- load_model -----------------------------------------------------------------------------------------------------


def test_load_model_takes_the_newest_or_the_one_that_is_named(tmp_path: Path) -> None:
    with hydra_ext.offload(model := nn.Linear(2, 2), budget="1MiB") as run:
        paths = []
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(model.weight, value)
            paths.append(run.save(tmp_path, keep=3, extra=value))
    assert [path.name for path in paths] == ["step-00000000", "step-00000000-2", "step-00000000-3"]
    other = nn.Linear(2, 2)
    assert hydra_ext.load_model(tmp_path, other).extra == 3.0
    assert other.weight[0, 0].item() == 3.0
    for path, value in zip(paths, (1.0, 2.0, 3.0), strict=True):
        assert hydra_ext.load_model(str(path), other).extra == value
        assert other.weight[0, 0].item() == value
    link = tmp_path / "best"
    link.symlink_to(paths[1].name)
    assert hydra_ext.load_model(link, other).extra == 2.0


@pytest.mark.parametrize("place", ["", "missing"])
def test_load_model_wants_a_checkpoint(place: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        hydra_ext.load_model(tmp_path / place, nn.Linear(2, 2))


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True, more: bool = False, width: int = 3, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.first = nn.Linear(3, width, bias=False, dtype=dtype)
        self.second = nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight
        if more:
            self.more = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"tied": False},
            [
                "the checkpoint has no tensor 'second.weight', which the model has",
                "'first.weight', 'second.weight' are one tensor in the checkpoint, and not in the model",
            ],
        ),
        (
            {"more": True},
            [
                "the checkpoint has no tensor 'more.weight', which the model has",
                "the checkpoint has no tensor 'more.bias', which the model has",
            ],
        ),
        ({"width": 4}, ["'first.weight' is of shape [3, 3] in the checkpoint, [4, 3] in the model"]),
        ({"dtype": torch.bfloat16}, ["'first.weight' is F32 in the checkpoint, torch.bfloat16 in the model"]),
    ],
)
def test_another_model_gets_the_list_of_differences(options: dict, expected: list[str], tmp_path: Path) -> None:
    saved(Tied(), tmp_path)
    other = Tied(**options)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match="nothing was changed") as caught:
        hydra_ext.load_model(tmp_path, other)
    assert list(caught.value.differences) == expected
    assert not differences(dict(other.state_dict()), before)


def test_a_model_that_was_not_tied_is_not_taken_for_one_that_is(tmp_path: Path) -> None:
    saved(Tied(tied=False), tmp_path)
    with pytest.raises(CheckpointMismatch) as caught:
        hydra_ext.load_model(tmp_path, Tied())
    assert caught.value.differences == (
        "the model has no tensor 'second.weight', which the checkpoint has",
        "'first.weight', 'second.weight' are one tensor in the model, and were not in the checkpoint",
    )
