"""Models without memory that offload cannot fill: why, and the model as it was, or so that entering again works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hydra_ext
from hydra_ext import errors, optim
from hydra_ext.runtime import engine
from hydra_ext.runtime.placement import moving_in
from support.construction.materialized import (
    MODELS,
    SEED,
    Counted,
    in_parts,
    materialized,
    train_briefly,
    write_weights,
)
from support.runtime.offloaded import offloaded
from support.training import differences

ROOMY = 2**26
FAMILY = MODELS["gpt2"]


def assert_as_it_was(model: nn.Module) -> None:
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not engine.installed()


def assert_trains_as_the_plain_one(context: hydra_ext.offload, model: nn.Module, optimizer: Any) -> None:
    plain = FAMILY.make(SEED)
    theirs = torch.optim.AdamW(plain.parameters())
    with context:
        seen = train_briefly(model, optimizer, FAMILY)
    assert not differences((seen, model, optimizer), (train_briefly(plain, theirs, FAMILY), plain, theirs))


class FailingAt:
    """What is done when a block has moved in: at one of them, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, block: int, fail: Callable[[], object]) -> None:
        self.moved = 0
        add = moving_in._add

        def note(core: Any, block_: Any) -> None:
            add(core, block_)
            self.moved += 1
            if self.moved == block:
                fail()

        monkeypatch.setattr(moving_in, "_add", note)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_a_file_that_fails_in_the_middle_leaves_numbers_or_meta_and_mended_it_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FAMILY.make(SEED)
    model = materialized(Counted(FAMILY), write_weights(plain, tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    whole = {file: file.read_bytes() for file in tmp_path.glob("*.safetensors")}
    FailingAt(monkeypatch, 4, lambda: [file.write_bytes(content[:-8]) for file, content in whole.items()])
    context = hydra_ext.offload(model, optimizer, budget=ROOMY)
    with pytest.raises(errors.WeightsError, match=r"cannot be read as safetensors"), context:
        pytest.fail("it was entered")
    filled = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    assert 4 <= len(filled) < len(list(model.parameters()))
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], dict(plain.named_parameters())[name]) for name in filled)
    assert not engine.installed()
    with pytest.raises(errors.WeightsError), context:
        pytest.fail("it was entered")
    for file, content in whole.items():
        file.write_bytes(content)
    assert_trains_as_the_plain_one(context, model, optimizer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, errors.BuildDiffers])
def test_what_ends_the_filling_leaves_numbers_or_meta_and_it_is_gone_on_from(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Counted(FAMILY)
    model = materialized(build)
    optimizer = torch.optim.AdamW(model.parameters())
    in_parts(monkeypatch, model, 4)
    family = build.family
    fail = raise_interrupt if error is KeyboardInterrupt else lambda: setattr(build, "family", MODELS["resnet"])
    FailingAt(monkeypatch, 6, fail)
    context = hydra_ext.offload(model, optimizer, budget=ROOMY)
    with pytest.raises(error), context:
        pytest.fail("it was entered")
    there = [not parameter.is_meta for parameter in model.parameters()]
    assert any(there)
    assert not all(there)
    build.family = family
    assert_trains_as_the_plain_one(context, model, optimizer)


def other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].to(torch.bfloat16)


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = torch.zeros(1)


def gone(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["transformer.ln_f.weight"]


@pytest.mark.parametrize(
    ("change", "says"),
    [(other_dtype, "is torch.bfloat16"), (other_shape, r"has shape \(1,\)"), (gone, "transformer.ln_f.weight")],
)
def test_files_that_have_become_others_are_refused_before_anything_is_changed(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, tmp_path: Path
) -> None:
    plain = FAMILY.make(SEED)
    model = materialized(Counted(FAMILY), write_weights(plain, tmp_path))
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        if "transformer.ln_f.weight" in tensors:
            change(tensors)
            save_file(tensors, file)
    with pytest.raises(errors.WeightsError, match=says) as caught, hydra_ext.offload(model, budget=ROOMY):
        pytest.fail("it was entered")
    assert caught.value.tensor == "transformer.ln_f.weight"
    assert_as_it_was(model)


def with_gaps() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(torch.randn(3, 6)[:, ::2])
    return layer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(3, 3, device="meta"), "'weight' is on the meta device.*build the model by hydra_ext.mater"),
        (lambda: copy.deepcopy(materialized(lambda: nn.Linear(3, 3))), "not a copy"),
        (lambda: materialized(with_gaps), "strides that overlap or leave gaps"),
    ],
)
def test_models_that_cannot_be_filled_are_refused_at_once(make: Callable[[], nn.Module], says: str) -> None:
    model = make()
    with pytest.raises(errors.UnsupportedModel, match=says):
        hydra_ext.offload(model, budget=ROOMY)
    assert_as_it_was(model)


def hooked(model: nn.Module) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)


def held_by_a_graph(model: nn.Module) -> None:
    model.kept = model[0].weight.expand_as(model[0].weight)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (hooked, errors.UnsupportedModel, "0.weight has hooks while it is on meta"),
        (held_by_a_graph, errors.UnsupportedModel, "torch still uses 0.weight"),
        (lambda model: model.to(torch.bfloat16), errors.ModelChanged, "change shapes and dtypes inside it"),
    ],
)
def test_what_has_been_done_to_the_model_is_refused_before_anything_is_changed(
    change: Callable[[nn.Module], Any], error: type[Exception], says: str
) -> None:
    model = materialized(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    change(model)
    with pytest.raises(error, match=says), hydra_ext.offload(model, budget=ROOMY):
        pytest.fail("it was entered")
    assert_as_it_was(model)


def loaded(model: nn.Module) -> torch.optim.Optimizer:
    plain = nn.Linear(3, 3)
    saved = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 3)).sum().backward()
    saved.step()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved.state_dict())
    return optimizer


@pytest.mark.parametrize("make", [loaded, lambda model: torch.optim.Adagrad(model.parameters())])
def test_optimizers_that_have_lost_their_state_to_meta_are_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model = materialized(lambda: nn.Linear(3, 3))
    optimizer = make(model)
    with (
        pytest.raises(errors.InvalidOptimizer, match="of 'weight' on meta, without numbers"),
        hydra_ext.offload(model, optimizer, budget=ROOMY),
    ):
        pytest.fail("it was entered")
    assert_as_it_was(model)


@pytest.mark.parametrize("forms", [("split", "fp32"), ("fp32", "split")])
def test_masters_of_another_form_are_refused_where_weights_are_needed_to_convert_them(forms: tuple[str, str]) -> None:
    def build() -> nn.Module:
        return nn.Linear(3, 3).to(torch.bfloat16)

    plain = build()
    saved = optim.AdamW(plain.parameters(), master=forms[0])
    plain(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    saved.step()
    state = saved.state_dict()
    for group in state["param_groups"]:
        del group["master"]
    optimizer = optim.AdamW(materialized(build).parameters(), master=forms[1])
    with pytest.raises(errors.InvalidOptimizer, match="masters in another form"):
        optimizer.load_state_dict(state)
    assert not optimizer.state
    optim.AdamW(materialized(build).parameters(), master=forms[0]).load_state_dict(state)


def test_a_host_budget_that_is_too_small_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    model = materialized(Counted(FAMILY))
    optimizer = optim.AdamW(model.parameters())
    with (
        pytest.raises(errors.HostBudgetTooSmall),
        hydra_ext.offload(model, optimizer, budget=ROOMY, host_budget=2**16, spill_dir=tmp_path),
    ):
        pytest.fail("it was entered")
    assert_as_it_was(model)


def test_nothing_is_loaded_to_meta(tmp_path: Path) -> None:
    plain = FAMILY.make(SEED)
    with offloaded(plain, None, budget=ROOMY) as observed:
        FAMILY.loss(plain, FAMILY.batches(1, 1)[0])
        observed.run.save(tmp_path)
    model = materialized(Counted(FAMILY))
    with pytest.raises(errors.UnsupportedState, match=r"is on meta, so there is no memory to load into"):
        hydra_ext.load_model(tmp_path, model)


def test_a_step_of_parameters_on_meta_is_refused() -> None:
    model = materialized(lambda: nn.Linear(3, 3))
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device="meta")).sum().backward()
    with pytest.raises(errors.InvalidOptimizer, match="the gradient of parameter 0 is on meta"):
        optimizer.step()
