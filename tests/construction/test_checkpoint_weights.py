"""Weights out of a checkpoint's folder: what the manifest says of them, or an error, and nothing of what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import hydra_ext
from hydra_ext import errors
from hydra_ext.checkpoint.format import checksum, manifest
from hydra_ext.construction import fill, weight_files
from support.checkpoint.checkpoints import manifest_of
from support.construction.materialized import MODELS, SEED, Counted, materialized

FAMILY = MODELS["gpt2"]
ROOMY = 2**26
WEIGHTS = "model.safetensors"


@pytest.fixture
def plain() -> nn.Module:
    return FAMILY.make(SEED)


@pytest.fixture
def saved(plain: nn.Module, tmp_path: Path) -> Path:
    return save(plain, tmp_path)


def save(model: nn.Module, folder: Path) -> Path:
    with hydra_ext.offload(model, budget=ROOMY) as run:
        path = run.save(folder)
    assert path is not None
    return path


def flip(checkpoint: Path, tensor: str, byte: int) -> bytes:
    """Alters one bit of a tensor. Returns the whole file as it was."""
    file = checkpoint / WEIGHTS
    whole = file.read_bytes()
    place = manifest_of(checkpoint)["tensors"]["model"][tensor]["bytes"]
    damaged = bytearray(whole)
    damaged[range(*place)[byte]] ^= 0x40
    file.write_bytes(damaged)
    return whole


def assert_equal(model: nn.Module, names: set[str], plain: nn.Module) -> None:
    """These parameters have their numbers, and no others have any."""
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.is_meta is (name not in names), name
        assert parameter.is_meta or torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("inner", ["", WEIGHTS], ids=["folder", "file"])
@pytest.mark.parametrize("most", [weight_files._MAPPED_BYTES, 600], ids=["whole", "parts"])
@pytest.mark.parametrize("byte", [0, 1000, -1])
def test_a_flipped_bit_is_an_error_and_the_parameter_stays_on_meta(
    byte: int, most: int, inner: str, saved: Path, plain: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_MAPPED_BYTES", most)
    damaged, sound = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.ln_1.weight"
    whole = flip(saved, damaged, byte)
    model = materialized(Counted(FAMILY), saved / inner)
    fill(model, [sound])
    with pytest.raises(errors.WeightsError, match="checksum differs") as caught:
        fill(model, [damaged, "transformer.h.0.ln_2.weight"])
    assert (caught.value.file, caught.value.tensor) == (saved / WEIGHTS, damaged)
    assert_equal(model, {sound}, plain)
    (saved / WEIGHTS).write_bytes(whole)
    fill(model)
    assert_equal(model, set(dict(plain.named_parameters())), plain)


def test_blocks_before_a_damaged_one_have_their_numbers_and_it_is_gone_on_from(saved: Path, plain: nn.Module) -> None:
    whole = flip(saved, "transformer.ln_f.weight", 3)
    model = materialized(Counted(FAMILY), saved)
    context = hydra_ext.offload(model, budget=ROOMY)
    for _ in range(2):
        with pytest.raises(errors.WeightsError, match=r"transformer\.ln_f\.weight"), context:
            pytest.fail("it was entered")
        there = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
        assert "transformer.h.0.mlp.c_fc.weight" in there
        assert "transformer.ln_f.weight" not in there
        assert_equal(model, there, plain)
    (saved / WEIGHTS).write_bytes(whole)
    with context:
        assert_equal(model, set(dict(plain.named_parameters())), plain)


def test_a_flipped_bit_of_a_buffer_is_an_error_at_once(tmp_path: Path) -> None:
    family = MODELS["resnet"]
    saved = save(family.make(SEED), tmp_path)
    buffer = next(name for name, _ in family.build().named_buffers() if name.endswith("running_var"))
    flip(saved, buffer, 0)
    with pytest.raises(errors.WeightsError, match="checksum differs") as caught:
        materialized(Counted(family), saved)
    assert caught.value.tensor == buffer


def test_bytes_are_looked_at_once_and_as_many_at_a_time_as_are_mapped(
    saved: Path, plain: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 4096
    monkeypatch.setattr(weight_files, "_MAPPED_BYTES", most)
    model = materialized(Counted(FAMILY), saved)
    sizes: list[int] = []
    follow = checksum.follow
    monkeypatch.setattr(checksum, "follow", lambda sum_, data: sizes.append(len(data)) or follow(sum_, data))
    fill(model)
    assert sum(sizes) == sum(parameter.nbytes for parameter in plain.parameters())
    assert max(sizes) <= most


def test_two_tensors_that_are_one_are_compared_with_a_part_of_each_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_MAPPED_BYTES", 2048)
    tensor = torch.arange(4096.0).view(64, 64)
    save_file({"one": tensor, "other": tensor.clone()}, tmp_path / WEIGHTS)
    part, bits = weight_files.WeightFiles._part, weight_files._bits
    compared: list[StorageWeakRef] = []
    alive: list[int] = []

    def looked_at(*arguments: Any) -> Any:
        alive.append(sum(not storage.expired() for storage in compared))
        return part(*arguments)

    def noted(piece: Tensor) -> Tensor:
        compared.append(StorageWeakRef(piece.untyped_storage()))
        return bits(piece)

    monkeypatch.setattr(weight_files.WeightFiles, "_part", looked_at)
    monkeypatch.setattr(weight_files, "_bits", noted)
    weight_files.WeightFiles(tmp_path / WEIGHTS)._compare("one", "other", tensor)
    assert len(compared) == len(alive) == 32
    assert not any(alive)


def other_shape(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = torch.zeros(3)


def other_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].view(torch.int32)


def one_less(tensors: dict[str, Tensor]) -> None:
    del tensors["transformer.ln_f.weight"]


@pytest.mark.parametrize("change", [other_shape, other_dtype, one_less])
def test_another_file_in_the_checkpoints_place_is_refused(
    change: Callable[[dict[str, Tensor]], None], saved: Path
) -> None:
    tensors = load_file(saved / WEIGHTS)
    change(tensors)
    save_file(tensors, saved / WEIGHTS)
    with pytest.raises(errors.WeightsError, match="the manifest beside it") as caught:
        materialized(Counted(FAMILY), saved)
    assert caught.value.tensor == "transformer.ln_f.weight"


def altered(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def with_another_key(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'{"crc32"', b'{"crc33"', 1))


def linked_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


def unfinished(file: Path) -> None:
    file.rename(file.with_name(manifest.UNFINISHED))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "damage",
    [
        altered,
        with_another_key,
        linked_nowhere,
        unfinished,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-9]),
    ],
)
def test_a_damaged_manifest_is_an_error(damage: Callable[[Path], object], saved: Path) -> None:
    damage(saved / manifest.NAME)
    for path in (saved, saved / WEIGHTS):
        with pytest.raises(errors.WeightsError) as caught:
            materialized(Counted(FAMILY), path)
        assert caught.value.file.name in (manifest.NAME, manifest.UNFINISHED)


def test_a_manifest_of_somebody_else_and_a_file_that_ours_does_not_name_say_nothing(
    saved: Path, plain: nn.Module
) -> None:
    own = saved / "own.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(saved / WEIGHTS).items()}, own)
    model = materialized(Counted(FAMILY), own)
    fill(model)
    assert all(torch.equal(a, 2 * b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    (saved / manifest.NAME).write_text(json.dumps({"name": "another tool's", "checkpoint": "latest"}))
    model = materialized(Counted(FAMILY), saved)
    fill(model)
    assert_equal(model, set(dict(plain.named_parameters())), plain)
