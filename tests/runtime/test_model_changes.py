"""Models that change inside their context: the right result, or an error that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.errors import (
    ModelChanged,
)
from support.benches import ROOMY, assert_same, tight_budget
from support.runtime.outcomes import POISONED, outcome
from support.windows.window_subjects import WIDTH, batch, hidden, language_loss, tiny_gpt2


def refuses_and_then_trains_on(change: Callable[[nn.Module], Any], undo: Callable[[nn.Module, Any], Any]) -> None:
    """The change is refused where it is made or at the next forward; undone, all goes on equal."""
    plain, model = tiny_gpt2(), tiny_gpt2()
    expected = outcome(plain)
    with hydra_ext.offload(model, budget=tight_budget(model, language_loss), checks=POISONED) as run:
        memo = copy.deepcopy(model.state_dict())

        def change_and_run() -> None:
            nonlocal memo
            changed = change(model)
            memo = memo if changed is None else changed
            language_loss(model, 0)

        with pytest.raises(ModelChanged):
            change_and_run()
        assert not run.core.gate.open
        undo(model, memo)
        assert_same(expected, outcome(model, run))
        assert run.report().evictions > 0


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
    ],
)
def test_another_dtype_device_or_place_in_memory_for_the_whole_model_is_refused_and_changes_nothing(
    convert: Callable[[nn.Module], Any],
) -> None:
    refuses_and_then_trains_on(lambda model: convert(model) and None, lambda _model, _memo: None)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16)])
def test_another_dtype_for_a_part_of_the_model_is_refused_at_the_next_forward(
    convert: Callable[[nn.Module], Any],
) -> None:
    def restore(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
        model.transformer.h[1].float()
        model.load_state_dict(state)

    refuses_and_then_trains_on(lambda model: convert(model.transformer.h[1]) and None, restore)


def test_another_shape_of_a_parameter_is_refused_at_the_next_forward() -> None:
    def shrink(model: nn.Module) -> torch.Tensor:
        weight = model.transformer.h[1].mlp.c_fc.weight
        before = weight.data
        weight.data = torch.ones(2, 3)
        return before

    def restore(model: nn.Module, before: torch.Tensor) -> None:
        model.transformer.h[1].mlp.c_fc.weight.data = before

    refuses_and_then_trains_on(shrink, restore)


def test_moves_that_change_nothing_are_allowed() -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        assert model.to("cpu") is model
        assert model.to(torch.float32) is model
        assert model.cpu().float() is model
        model.transformer.h[0].to("cpu")
        assert_same(outcome(plain), outcome(model, run))
        assert run.report().windows > 0


def test_an_added_parameter_is_refused_at_the_next_forward() -> None:
    def add(model: nn.Module) -> None:
        model.lm_head.register_parameter("scale", nn.Parameter(torch.ones(1)))

    refuses_and_then_trains_on(add, lambda model, _memo: delattr(model.lm_head, "scale"))


def test_an_added_module_is_refused_at_the_next_forward() -> None:
    def add(model: nn.Module) -> None:
        model.transformer.h[0].extra = nn.Linear(4, 4)

    refuses_and_then_trains_on(add, lambda model, _memo: delattr(model.transformer.h[0], "extra"))


def test_a_removed_parameter_is_refused_at_the_next_forward() -> None:
    def remove(model: nn.Module) -> nn.Parameter:
        bias = model.transformer.ln_f.bias
        del model.transformer.ln_f.bias
        return bias

    def restore(model: nn.Module, bias: nn.Parameter) -> None:
        model.transformer.ln_f.bias = bias

    refuses_and_then_trains_on(remove, restore)


class LowRank(nn.Module):
    """A layer, and beside it two small ones that are trained."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


def test_a_module_with_more_parameters_put_in_the_place_of_another_is_refused_at_the_next_forward() -> None:
    def wrap(model: nn.Module) -> None:
        model.transformer.ln_f = LowRank(model.transformer.ln_f, WIDTH)

    def unwrap(model: nn.Module, _memo: Any) -> None:
        model.transformer.ln_f = model.transformer.ln_f.inner

    refuses_and_then_trains_on(wrap, unwrap)
    model = tiny_gpt2()
    with hydra_ext.offload(model, budget=ROOMY):
        wrap(model)
        says = "the modules of 'transformer' replaced 'ln_f' by one with 'down.weight', 'up.weight'"
        with pytest.raises(ModelChanged, match=says):
            language_loss(model, 0)


class Halved(nn.Module):
    """A layer, and nothing to train beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / 2


def wrap_module(model: nn.Module) -> None:
    model.transformer.ln_f = Halved(model.transformer.ln_f)


def exchange_modules(model: nn.Module) -> None:
    blocks = model.transformer.h
    blocks[0].mlp, blocks[1].mlp = blocks[1].mlp, blocks[0].mlp


def drop_module(model: nn.Module) -> None:
    model.transformer.ln_f = nn.Identity()


def replace_parameter(model: nn.Module) -> None:
    layer = model.transformer.h[1].mlp.c_fc
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def replace_module(model: nn.Module) -> None:
    model.transformer.h[1] = copy.deepcopy(model.transformer.h[1])


@pytest.mark.parametrize("replace", [replace_parameter, replace_module, wrap_module, exchange_modules, drop_module])
def test_what_is_replaced_inside_the_context_trains_as_in_plain_pytorch(replace: Callable[[nn.Module], None]) -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        found = outcome(model, run)
        replace(model)
        found += outcome(model, run)
        assert run.report().windows > 0
    expected = outcome(plain)
    replace(plain)
    assert_same(expected + outcome(plain), found)


def test_the_models_inputs_may_be_anything_the_model_takes() -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    plain.eval(), model.eval()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run, torch.no_grad():
        found = [model(inputs_embeds=hidden(0)).logits, model(batch(1), attention_mask=torch.ones(2, 4)).logits]
        assert run.report().windows == 2
    with torch.no_grad():
        assert_same([plain(inputs_embeds=hidden(0)).logits, plain(batch(1)).logits], found)
