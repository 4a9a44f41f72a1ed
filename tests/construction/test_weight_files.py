"""Parameters from safetensors files: by name, only what is asked for, and never something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hydra_ext.construction import fill, materialize, weight_files
from hydra_ext.errors import WeightsError
from support.construction.constructors import CONSTRUCTORS, gpt2, resnet, vit

SHARD = "model-0000{}-of-00002.safetensors"


def trained(build: Callable[[], nn.Module]) -> nn.Module:
    """Parameters and buffers unlike those of any constructor."""
    model = build()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.add_(3)
    return model


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor once, as libraries save it."""
    kept = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items() if name in kept}


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    parts = {SHARD.format(1): names[::2], SHARD.format(2): names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(params=["file", "folder", "shards"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, Tensor]], Path]:
    def write(tensors: dict[str, Tensor]) -> Path:
        if request.param == "shards":
            write_shards(tmp_path, tensors)
            return tmp_path
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors" if request.param == "file" else tmp_path

    return write


@pytest.mark.parametrize("name", ["gpt2", "bf16 llama", "vit", "resnet", "t5", "encoder", "recurrent", "weight norm"])
def test_what_is_filled_is_what_the_files_hold(name: str, written: Callable[[dict[str, Tensor]], Path]) -> None:
    build = CONSTRUCTORS[name]
    model = trained(build)
    expected = dict(model.named_parameters())
    path = written(stored(model))
    state = torch.get_rng_state()
    names = list(expected)
    for own in (names[: len(names) // 2], names[1::2], names):
        filled = materialize(build, weights=path)
        fill(filled, own)
        for name, parameter in filled.named_parameters():
            assert parameter.is_meta is (name not in own)
            assert parameter.is_meta or torch.equal(parameter, expected[name])
        buffers = dict(filled.named_buffers())
        assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["gpt2", "bf16 llama", "t5"])
def test_a_folder_that_a_library_saved_in_shards_is_read(name: str, tmp_path: Path) -> None:
    model: Any = trained(CONSTRUCTORS[name])
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    filled = materialize(CONSTRUCTORS[name], weights=tmp_path)
    fill(filled)
    loaded = dict(filled.named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def test_what_the_files_replace_is_not_drawn(tmp_path: Path) -> None:
    save_file(stored(gpt2()), tmp_path / "model.safetensors")
    drawn = torch.zeros(3)

    def build() -> nn.Module:
        model = gpt2()
        drawn.copy_(torch.rand(3))
        return model

    torch.manual_seed(4)
    materialize(build, weights=tmp_path)
    torch.manual_seed(4)
    assert torch.equal(drawn, torch.rand(3)), "numbers were drawn for parameters"


def test_tied_weights_may_be_stored_under_any_name(tmp_path: Path) -> None:
    tensors = stored(gpt2())
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight") + 1
    save_file(tensors, tmp_path / "model.safetensors")
    model = materialize(gpt2, weights=tmp_path)
    fill(model, ["transformer.wte.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("most", [weight_files._MAPPED_BYTES, 600])
def test_tied_weights_under_two_names_have_to_be_the_same_bytes(
    most: int, written: Callable[[dict[str, Tensor]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_MAPPED_BYTES", most)
    tensors = stored(gpt2())
    tensors["transformer.wte.weight"][0, 0] = torch.nan
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    model = materialize(gpt2, weights=written(tensors))
    fill(model)
    assert torch.equal(_bits(model.lm_head.weight), _bits(tensors["lm_head.weight"]))
    tensors["transformer.wte.weight"][-1, -1] = 0.0
    for other in (-0.0, 1.0, torch.nan):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["lm_head.weight"][-1, -1] = other
        with pytest.raises(WeightsError, match=r"lm_head\.weight.*transformer\.wte\.weight|wte.*lm_head") as caught:
            materialize(gpt2, weights=written(tensors))
        assert caught.value.tensor in ("lm_head.weight", "transformer.wte.weight")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int32)


def test_a_tied_weight_of_another_shape_is_refused_under_either_name(tmp_path: Path) -> None:
    tensors = stored(gpt2())
    tensors["lm_head.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="shape") as caught:
        materialize(gpt2, weights=tmp_path)
    assert caught.value.tensor == "lm_head.weight"


def test_filled_parameters_do_not_live_in_the_file(tmp_path: Path) -> None:
    model = trained(vit)
    save_file(stored(model), tmp_path / "model.safetensors")
    filled = materialize(vit, weights=tmp_path)
    fill(filled)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    expected = dict(model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in filled.named_parameters())


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["head.weight"] = torch.zeros(2)


def reshaped(tensors: dict[str, Tensor]) -> None:
    tensors["classifier.1.bias"] = torch.zeros(4)


def recast(tensors: dict[str, Tensor]) -> None:
    tensors["classifier.1.bias"] = torch.zeros(3, dtype=torch.bfloat16)


def buffer_reshaped(tensors: dict[str, Tensor]) -> None:
    tensors["resnet.embedder.embedder.normalization.running_mean"] = torch.zeros(4)


@pytest.mark.parametrize(
    ("change", "tensor", "says"),
    [
        (lambda tensors: tensors.pop("classifier.1.bias"), "classifier.1.bias", "has no tensor classifier.1.bias"),
        (renamed, "head.weight", "which the model does not have"),
        (reshaped, "classifier.1.bias", r"shape \(4,\); in the model it is \(3,\)"),
        (recast, "classifier.1.bias", "is torch.bfloat16; in the model it is torch.float32"),
        (buffer_reshaped, "resnet.embedder.embedder.normalization.running_mean", "shape"),
    ],
)
def test_files_that_do_not_fit_the_model_are_refused_by_name_before_anything_is_read(
    change: Callable[[dict[str, Tensor]], Any], tensor: str, says: str, written: Callable[[dict[str, Tensor]], Path]
) -> None:
    tensors = stored(resnet())
    change(tensors)
    path = written(tensors)
    with pytest.raises(WeightsError, match=says) as caught:
        materialize(resnet, weights=path)
    assert caught.value.tensor == tensor
    assert path in (caught.value.file, caught.value.file.parent)
    assert str(caught.value.file) in str(caught.value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "neither model.safetensors nor"),
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "only files beside it"),
        ('{"weight_map": {"a": "/tmp/other.safetensors"}}', "only files beside it"),
        ('{"weight_map": {"a": ".."}}', "only files beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "cannot be read"),
        ('{"weight_map": {"a": "there.safetensors"}}', "has no tensor a"),
    ],
)
def test_an_index_that_is_damaged_or_leads_elsewhere_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2)}, tmp_path / "there.safetensors")
    if content is not None:
        (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=says) as caught:
        materialize(resnet, weights=tmp_path)
    assert caught.value.file.is_relative_to(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(stored(resnet()), file)
    whole = file.read_bytes()
    for content in (whole[:100], whole[:-8], b"", b"\xff" * 200):
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"model\.safetensors") as caught:
            materialize(resnet, weights=file)
        assert caught.value.file == file


def test_a_file_that_goes_away_before_it_is_needed_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(stored(resnet()), file)
    model = materialize(resnet, weights=file)
    file.unlink()
    with pytest.raises(WeightsError, match="cannot be read"):
        fill(model)


@pytest.mark.parametrize("stored_as", [torch.float32, torch.float64, torch.float16])
def test_floating_numbers_of_another_dtype_are_rounded_if_asked_for(stored_as: torch.dtype, tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(300, 7, dtype=stored_as), "bias": torch.randn(300, dtype=stored_as)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = materialize(lambda: nn.Linear(7, 300, dtype=torch.bfloat16), weights=tmp_path, cast=True)
    fill(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name].to(torch.bfloat16))


def test_whole_numbers_are_not_cast(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 7, dtype=torch.int32), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"weight is torch.int32; in the model it is torch.float32"):
        materialize(lambda: nn.Linear(7, 3), weights=tmp_path, cast=True)


def test_tensors_are_found_by_other_names(tmp_path: Path) -> None:
    tensors = {"old.w": torch.randn(3, 7), "old.b": torch.randn(3), "unused": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    names = {"old.w": "weight", "old.b": "bias"}
    model = materialize(lambda: nn.Linear(7, 3), weights=tmp_path, rename=names.get)
    fill(model)
    assert torch.equal(model.weight, tensors["old.w"])
    assert torch.equal(model.bias, tensors["old.b"])
    with pytest.raises(WeightsError, match="has a tensor unused, which the model does not have"):
        materialize(lambda: nn.Linear(7, 3), weights=tmp_path, rename=lambda name: names.get(name, name))
    with pytest.raises(WeightsError, match="gives both the name weight"):
        materialize(lambda: nn.Linear(7, 3), weights=tmp_path, rename=lambda name: "weight")
