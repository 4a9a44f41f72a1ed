"""Models without memory inside hydra_ext.offload: block by block they get their numbers, and train as plain ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, optim
from hydra_ext.construction import recipes, weight_files
from support.benches import parameter_bytes
from support.construction.constructors import Replaced
from support.construction.materialized import (
    MODELS,
    OPTIMIZERS,
    PLAIN,
    SEED,
    Counted,
    Watched,
    arena_bytes,
    budget_for,
    in_parts,
    materialized,
    train_briefly,
    write_weights,
)
from support.runtime.offloaded import offloaded
from support.training import differences, train

ROOMY = 2**26
POISONED = Checks(poison_hosts=True)


def weights_of(source: str, plain: nn.Module, folder: Path) -> Path | None:
    return None if source == "numbers" else write_weights(plain, folder / "weights")


@pytest.mark.parametrize("source", ["numbers", "files"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_has_the_bits_of_the_plain_one(
    kind: str, name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = MODELS[name]
    plain = family.make(SEED)
    weights = weights_of(source, plain, tmp_path)
    theirs = OPTIMIZERS[kind](list(plain.parameters()))
    budget = budget_for(plain, family)
    model = materialized(Counted(family), weights)
    parameters = list(model.parameters())
    ours = OPTIMIZERS[kind](parameters)
    in_parts(monkeypatch, model, 3)
    state = torch.get_rng_state()
    with offloaded(model, ours, budget=budget) as observed:
        assert torch.equal(torch.get_rng_state(), state)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True)), "not the numbers"
        assert observed.run.core.blocks.foreign_bytes == 0
        expected = train_briefly(plain, theirs, family)
        seen = train_briefly(model, ours, family)
    assert not differences((seen, model, ours), (expected, plain, theirs))
    again = train_briefly(model, ours, family), train_briefly(plain, theirs, family)  # a plain model from now on
    assert not differences((again[0], model, ours), (again[1], plain, theirs))


@pytest.mark.parametrize("parts", [1, 4])
def test_the_constructor_runs_once_for_each_group_of_blocks(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Counted(MODELS["gpt2"])
    model = materialized(build)
    group = in_parts(monkeypatch, model, parts)
    watched = Watched(model, monkeypatch)
    context = hydra_ext.offload(model, budget=ROOMY)
    largest = max(block.nbytes for block in context._layout.blocks)
    with context as run:
        assert build.calls == 1 + (1 if parts == 1 else len(_groups([b.nbytes for b in run.layout.blocks], group)))
        assert max(watched.waiting) <= max(group, largest)
        assert len(watched.waiting) == len(run.layout.blocks) > 2 * parts


def _groups(sizes: list[int], most: int) -> list[int]:
    groups: list[int] = []
    for size in sizes:
        if groups and groups[-1] + size <= most:
            groups[-1] += size
        else:
            groups.append(size)
    return groups


def test_of_files_one_block_at_a_time_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = MODELS["llama"]
    build = Counted(family)
    model = materialized(build, write_weights(family.make(SEED), tmp_path))
    watched = Watched(model, monkeypatch)
    with hydra_ext.offload(model, budget=ROOMY) as run:
        assert watched.waiting == [block.nbytes for block in run.layout.blocks]
    assert build.calls == 1


def test_all_of_it_lies_in_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[Any] = []
    place = hydra_ext.runtime.placement.devices.SimulatedPlace
    make = place.make_arena
    monkeypatch.setattr(place, "make_arena", lambda self: arenas.append(make(self)) or arenas[-1])
    family = MODELS["gpt2"]
    for weights in (None, write_weights(family.make(SEED), tmp_path)):
        model = materialized(Counted(family), weights)
        with hydra_ext.offload(model, budget=ROOMY) as run:
            assert arenas[-1].mapped_bytes == arena_bytes(run)
            assert run.core.blocks.foreign_bytes == 0


def test_parameters_of_all_kinds_get_their_numbers() -> None:
    """Some without elements, in no block; strided, frozen, of a part of something larger; in lists; with attributes."""
    torch.manual_seed(SEED)
    plain = Replaced()
    model = materialized(Replaced)
    model.layer3.weight.requires_grad_(False)
    parameters = dict(model.named_parameters())
    with hydra_ext.offload(model, budget=ROOMY):
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameters[name], parameter), name
            assert parameters[name].stride() == parameter.stride(), name
            assert parameters[name].requires_grad is (parameter.requires_grad and name != "layer3.weight")
    assert model.weight.partition == "columns"
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_what_shares_memory_with_the_callers_tensors_stays_there() -> None:
    table = torch.randn(5, 3)
    model = materialized(lambda: nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False), nn.Linear(3, 3)))
    with hydra_ext.offload(model, budget=ROOMY) as run:
        assert run.core.blocks.foreign_bytes == table.nbytes
        assert model[0].weight.data_ptr() == table.data_ptr()


def test_afterwards_it_is_an_ordinary_model(tmp_path: Path) -> None:
    family = MODELS["gpt2"]
    plain = family.make(SEED)
    model = materialized(Counted(family))
    before = model.state_dict()
    assert all(before[name].is_meta for name, _ in model.named_parameters())
    with hydra_ext.offload(model, budget=ROOMY):
        pass
    assert not differences(([], model, _none(model)), ([], plain, _none(plain)))
    family.make(9).load_state_dict(model.state_dict())
    theirs, ours = OPTIMIZERS["native"](list(plain.parameters())), OPTIMIZERS["native"](list(model.parameters()))
    twin = copy.deepcopy(model)
    expected = train_briefly(plain, theirs, family)
    with offloaded(model, ours, budget=ROOMY):
        seen = train_briefly(model, ours, family)
    assert not differences((seen, model, ours), (expected, plain, theirs))
    again = OPTIMIZERS["native"](list(twin.parameters()))
    assert not differences((train_briefly(twin, again, family), twin, again), (expected, plain, theirs))


def _none(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def test_parts_that_have_memory_already_keep_it() -> None:
    model = materialized(Counted(MODELS["gpt2"]))
    model.transformer.ln_f.weight = nn.Parameter(torch.full((64,), 3.0))
    with hydra_ext.offload(model, budget=ROOMY):
        assert torch.equal(model.transformer.ln_f.weight, torch.full((64,), 3.0))
        assert torch.equal(model.transformer.wte.weight, MODELS["gpt2"].make(SEED).transformer.wte.weight)


def _in_bf16() -> nn.Module:
    return MODELS["llama"].build().to(torch.bfloat16).train()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (_in_bf16, {}),
        (Counted(MODELS["llama"]), {"param_dtype": torch.bfloat16}),
        (Counted(MODELS["gpt2"]), {"activations": hydra_ext.Offload()}),
        (Counted(MODELS["gpt2"]), {"blocks": ["transformer.h.0", "transformer.h.1"]}),
    ],
    ids=["bf16", "param_dtype", "activations", "blocks"],
)
def test_options_mean_what_they_do_for_a_model_built_as_always(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    family = MODELS["llama" if build is _in_bf16 else build.family.name]  # type: ignore[attr-defined]
    results = []
    for materialize in (False, True):
        torch.manual_seed(SEED)
        model = hydra_ext.materialize(build) if materialize else build()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=POISONED, **options) as run:
            results.append((train(model, optimizer, family, PLAIN, steps=3), model, optimizer))
            assert run.report().windows > 0
    assert not differences(results[1], results[0])


@pytest.mark.full
def test_a_whole_step_at_once() -> None:
    family = MODELS["gpt2"]
    results = []
    for materialize in (False, True):
        model = materialized(Counted(family)) if materialize else family.make(SEED)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=POISONED) as run:
            out = [
                run.step(family.batches(step, 3), lambda batch, m=model: family.loss(m, batch), seeds=[1, 2, 3])
                for step in range(3)
            ]
            assert run.report().rounds > 0
            assert run.report().refusals == run.report().fallbacks == 0
        results.append(([out[step].loss for step in range(3)], model, optimizer))
    assert not differences(results[1], results[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_checkpoint_is_loaded_inside_the_context_or_read_as_weights(kind: str, tmp_path: Path) -> None:
    family = MODELS["gpt2"]
    plain = family.make(SEED)
    theirs = OPTIMIZERS[kind](list(plain.parameters()))
    with hydra_ext.offload(plain, theirs, budget=ROOMY) as run:
        train_briefly(plain, theirs, family)
        saved = run.save(tmp_path)
    model = materialized(Counted(family))
    ours = OPTIMIZERS[kind](list(model.parameters()))
    with offloaded(model, ours, budget=ROOMY) as observed:
        assert observed.run.load(tmp_path) is not None
        seen = train_briefly(model, ours, family)
    expected = train_briefly(plain, theirs, family)
    assert not differences((seen, model, ours), (expected, plain, theirs))
    weights = materialized(Counted(family), saved)
    with hydra_ext.offload(weights, budget=ROOMY):
        pass
    hydra_ext.load_model(saved, plain)
    assert all(torch.equal(a, b) for a, b in zip(weights.parameters(), plain.parameters(), strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("native", [True, False])
def test_state_of_a_native_optimizer_may_be_loaded_before(native: bool) -> None:
    """As it was saved, with masters; or of torch's, in another type than it is to have."""
    family = MODELS["llama"]
    build, options = (_in_bf16, {}) if native else (family.build, {"moments": torch.bfloat16})
    plain = _seeded(build)
    theirs = (optim if native else torch.optim).AdamW(plain.parameters(), lr=1e-3)
    train_briefly(plain, theirs, family)
    model, other = materialized(build), _seeded(build)
    ours, reference = optim.AdamW(model.parameters(), **options), optim.AdamW(other.parameters(), **options)
    for each in (ours, reference):
        each.load_state_dict(copy.deepcopy(theirs.state_dict()))
    with offloaded(model, ours, budget=ROOMY):
        seen = train_briefly(model, ours, family)
    assert not differences((seen, model, ours), (train_briefly(other, reference, family), other, reference))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def test_state_on_the_disk(tmp_path: Path) -> None:
    family = MODELS["gpt2"]
    plain = family.make(SEED)
    theirs = optim.AdamW(plain.parameters(), lr=1e-3)
    model = materialized(Counted(family))
    ours = optim.AdamW(model.parameters(), lr=1e-3)
    budget = 7 * parameter_bytes(plain) // 2  # of four times as much
    context = hydra_ext.offload(model, ours, budget=ROOMY, host_budget=budget, spill_dir=tmp_path, checks=POISONED)
    with context as run:
        seen = train_briefly(model, ours, family)
        assert run.report().disk_written_bytes > 0
    assert not differences((seen, model, ours), (train_briefly(plain, theirs, family), plain, theirs))


def test_tensors_larger_than_what_may_be_mapped_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_MAPPED_BYTES", 600)  # not a whole number of rows
    pieces: list[int] = []
    opened = weight_files._opened
    monkeypatch.setattr(weight_files, "_opened", lambda file: pieces.append(1) or opened(file))
    family = MODELS["resnet"]
    plain = family.make(SEED)
    model = materialized(Counted(family), write_weights(plain, tmp_path))
    with hydra_ext.offload(model, budget=ROOMY):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert len(pieces) > parameter_bytes(model) / 600


def test_the_group_is_as_large_as_it_is_said_to_be() -> None:
    assert recipes.GROUP_BYTES == 2 * 2**30
