"""A model filled in parts against the one that the ordinary constructor makes from the same random state."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hydra_ext.construction import fill, materialize
from support.construction.constructors import CONSTRUCTORS, FromNumbers, OwnGenerator, Replaced, gpt2

SEED = 11


def seed_all() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def random_bytes() -> tuple[bytes, object, bytes]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()


def same(one: Tensor, other: Tensor) -> bool:
    alike = (one.dtype, one.shape, one.stride(), one.requires_grad) == (
        (other.dtype, other.shape, other.stride(), other.requires_grad)
    )
    return alike and one.device == other.device and torch.equal(one, other)


def subsets(names: list[str]) -> list[list[str]]:
    half = len(names) // 2
    return [names, names[:half], names[half:], names[::3], names[-1:]]


@pytest.mark.parametrize("build", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_what_is_filled_is_equal_and_the_rest_stays_on_meta(build: Callable[[], nn.Module]) -> None:
    seed_all()
    ordinary = build()
    end = random_bytes()
    expected = dict(ordinary.named_parameters())
    for own in subsets(list(expected)):
        seed_all()
        model = materialize(build)
        assert random_bytes() == end
        parameters = dict(model.named_parameters())
        assert list(parameters) == list(expected)
        assert all(parameter.is_meta for parameter in parameters.values())
        fill(model, own)
        assert random_bytes() == end
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name], "another object"
            if name in own:
                assert same(parameter, expected[name]), name
            else:
                assert parameter.is_meta, name
                assert (parameter.shape, parameter.dtype) == (expected[name].shape, expected[name].dtype)
        buffers = dict(model.named_buffers())
        assert set(buffers) == {name for name, _ in ordinary.named_buffers()}
        assert all(same(buffers[name], buffer) for name, buffer in ordinary.named_buffers())


@pytest.mark.parametrize("build", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_parts_filled_one_after_the_other_make_the_whole(build: Callable[[], nn.Module]) -> None:
    seed_all()
    expected = dict(build().named_parameters())
    seed_all()
    model = materialize(build)
    names = list(expected)
    for part in (names[1::2], names[::2], names):
        torch.rand(3)  # what is drawn in between changes nothing
        fill(model, part)
    assert all(same(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_tied_weights_are_filled_by_any_of_their_names_and_stay_tied() -> None:
    torch.manual_seed(SEED)
    expected = gpt2().transformer.wte.weight
    for name in ("lm_head.weight", "transformer.wte.weight"):
        torch.manual_seed(SEED)
        model = materialize(gpt2)
        assert model.lm_head.weight is model.transformer.wte.weight
        fill(model, [name])
        assert model.lm_head.weight is model.transformer.wte.weight
        assert same(model.lm_head.weight, expected)


def test_a_model_that_was_filled_trains_as_the_ordinary_one_with_an_optimizer_made_before() -> None:
    ids = torch.arange(12).reshape(2, 6)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(SEED)
    ordinary = gpt2()
    expected = train(ordinary, torch.optim.AdamW(ordinary.parameters()))
    torch.manual_seed(SEED)
    model = materialize(gpt2)
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model)
    assert all(torch.equal(one, other) for one, other in zip(train(model, optimizer), expected, strict=True))


@pytest.mark.parametrize(
    "name", ["gpt2", "vit", "bert", "recurrent", "orthogonal", "truncated", "scaled", "another dtype"]
)
def test_the_constructor_runs_once_for_the_model_and_once_for_a_part(name: str) -> None:
    calls = 0

    def counted() -> nn.Module:
        nonlocal calls
        calls += 1
        return CONSTRUCTORS[name]()

    model = materialize(counted)
    assert calls == 1
    fill(model, list(dict(model.named_parameters()))[::2])
    assert calls == 2


def test_attributes_that_depend_on_numbers_are_right() -> None:
    torch.manual_seed(SEED)
    ordinary = FromNumbers()
    torch.manual_seed(SEED)
    model = materialize(FromNumbers)
    assert (model.count, model.third.out_features) == (ordinary.count, 1 + ordinary.count)
    assert torch.equal(model.scale, ordinary.scale)


def test_attributes_of_parameters_and_later_freezing_survive_filling() -> None:
    model = materialize(Replaced)
    model.left.requires_grad_(False)
    model.right.note = "kept"
    fill(model)
    assert model.weight.partition == "columns"
    assert model.right.note == "kept"
    assert not model.left.requires_grad
    assert model.again is model.left
    # Parameters in one piece of memory get their own: none keeps the other's alive.
    assert model.left.untyped_storage().nbytes() == model.left.nbytes


def test_a_generator_from_outside_is_advanced_once_by_all_calls_together() -> None:
    def drawing(generator: torch.Generator) -> Callable[[], nn.Module]:
        return lambda: nn.ParameterList([torch.rand(4, generator=generator), torch.rand(4, generator=generator)])

    reference = torch.Generator().manual_seed(3)
    expected = drawing(reference)()
    generator = torch.Generator().manual_seed(3)
    model = materialize(drawing(generator))
    assert torch.equal(generator.get_state(), reference.get_state())
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=reference))
    fill(model, ["1"])
    fill(model, ["0"])
    assert torch.equal(generator.get_state(), reference.get_state())
    assert all(same(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))


def test_the_default_dtype_and_the_grad_mode_of_materialize_hold_in_fill() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.recorded = (layer.weight.abs().sum() * 2).requires_grad
        return layer

    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            model = materialize(build)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        fill(model)
    assert model.weight.dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
    assert not model.recorded
    assert not model.weight.is_inference()


def test_what_was_there_before_and_is_used_by_the_constructor_is_left_alone() -> None:
    table = torch.randn(5, 3)
    before = table.clone()
    model = materialize(lambda: nn.Sequential(nn.Embedding.from_pretrained(table), nn.Linear(3, 3)))
    assert torch.equal(table, before)
    fill(model)
    assert torch.equal(table, before)
    assert model[0].weight.data_ptr() == table.data_ptr()


def test_filling_twice_changes_nothing() -> None:
    model = materialize(OwnGenerator)
    fill(model, ["a"])
    with torch.no_grad():
        model.a.fill_(1.0)
    fill(model)
    assert torch.equal(model.a, torch.ones(6))
