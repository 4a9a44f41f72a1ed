"""What users do wrong, or at the wrong moment: an error before anything is changed, or the right result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.errors import (
    AlreadyOffloaded,
    BudgetTooSmall,
    HydraError,
    InvalidArgument,
    InvalidBudget,
    StateError,
    UnsupportedModel,
)
from hydra_ext.runtime import engine
from support.benches import ROOMY, activation_bytes, assert_same, parameter_bytes, tight_budget
from support.runtime.footprint import footprint
from support.runtime.outcomes import POISONED, outcome
from support.windows.window_subjects import language_loss, tiny_gpt2

# ---- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    "budget",
    ["", "8 GiBs", "lots", "-1GiB", "1e9", "GiB", "0", "0.1", 0, -5, 1.5, None, True, [], 2**63, 10**30, "9" * 400],
)
def test_a_budget_that_is_no_size_is_refused(budget: Any) -> None:
    with pytest.raises(InvalidBudget, match="budget="):
        hydra_ext.offload(nn.Linear(4, 4), budget=budget)


@pytest.mark.every_case
@pytest.mark.parametrize("budget", ["8GiB", "512 MiB", " 1.5gb ", "123456789", 2**30, 2**63 - 1])
def test_a_budget_that_is_a_size_is_taken(budget: Any) -> None:
    with hydra_ext.offload(nn.Linear(4, 4), budget=budget) as run:
        assert run.report().budget_bytes == run.core.memory.ledger.limit > 0


def test_a_budget_below_the_largest_block_is_refused_before_anything_is_changed() -> None:
    model = tiny_gpt2()
    before = footprint(model)
    with pytest.raises(BudgetTooSmall) as caught:
        hydra_ext.offload(model, budget=1000)
    error = caught.value
    assert footprint(model) == before
    assert f"'{error.block}'" in str(error)
    assert "budget=1000" in str(error)
    assert f"at least {error.smallest_budget} bytes" in str(error)
    assert error.block_bytes <= error.smallest_budget
    assert error.block in dict(model.named_modules())


def test_the_smallest_budget_that_a_refusal_names_can_be_entered_and_one_byte_less_cannot() -> None:
    model = tiny_gpt2()
    with pytest.raises(BudgetTooSmall) as caught:
        hydra_ext.offload(model, budget=1000)
    smallest = caught.value.smallest_budget
    with pytest.raises(BudgetTooSmall):
        hydra_ext.offload(model, budget=smallest - 1)
    with hydra_ext.offload(model, budget=smallest) as run:
        assert run.report().budget_bytes == smallest


def test_a_budget_below_the_activations_says_where_what_was_held_and_what_to_change() -> None:
    model = tiny_gpt2()
    budget = int(0.5 * activation_bytes(model, language_loss)) + parameter_bytes(model) // 5
    with hydra_ext.offload(model, budget=budget, checks=POISONED, activations=None) as run:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            language_loss(model, 0).backward()
        text = str(caught.value)
        assert "While running forward of block 'transformer." in text or "While running backward of block" in text
        for part in ("asked", f"({budget} bytes)", "held weights", "gradients", "activations", "in slots:"):
            assert part in text
        assert "Raise the budget" in text
        del caught
        assert run.core.memory.ledger.peak <= budget
        assert run.core.pager.pins == 0
        assert not run.core.gate.open


def test_training_goes_on_equal_after_running_out_of_memory_and_raising_the_budget() -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    expected = outcome(plain)
    small = int(0.5 * activation_bytes(model, language_loss)) + parameter_bytes(model) // 5
    with hydra_ext.offload(model, budget=small, checks=POISONED, activations=None) as run:
        for index in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                language_loss(model, index).backward()
            model.zero_grad()
        assert run.report().windows > 0
        run.core.memory.ledger.set_limit(tight_budget(model, language_loss))
        found = outcome(model, run)
        assert run.report().evictions > 0
    assert_same(expected, found)


def test_training_goes_on_equal_in_a_new_context_after_running_out_of_memory() -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    expected = outcome(plain)
    small = int(0.5 * activation_bytes(model, language_loss)) + parameter_bytes(model) // 5
    context = hydra_ext.offload(model, budget=small, checks=POISONED, activations=None)
    with pytest.raises(torch.OutOfMemoryError), context:
        language_loss(model, 0).backward()
    assert not engine.installed()
    model.zero_grad()
    with hydra_ext.offload(model, budget=tight_budget(model, language_loss), checks=POISONED) as run:
        found = outcome(model, run)
        assert run.report().windows > 0
    assert_same(expected, found)


# ---- other arguments ------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "gpt2"),
        ("model", nn.Linear),
        ("optimizer", "8GiB"),
        ("optimizer", [torch.ones(1)]),
        ("optimizer", torch.optim.SGD),
        ("param_dtype", "bf16"),
        ("param_dtype", torch.int8),
        ("grad_dtype", torch.int8),
        ("grad_dtype", torch.complex64),
        ("checks", {}),
        ("checks", Checks),
        ("blocks", "0"),
        ("blocks", nn.Linear(4, 4)),
        ("blocks", 3),
    ],
)
def test_an_argument_of_the_wrong_type_is_named_and_changes_nothing(name: str, value: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = footprint(model)
    with pytest.raises(InvalidArgument, match=f"^{name}=.*: give a ") as caught:
        hydra_ext.offload(**{"model": model, "budget": ROOMY, name: value})
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    assert footprint(model) == before


def test_blocks_may_be_a_list_of_modules_that_is_a_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    with hydra_ext.offload(model, budget=ROOMY, blocks=model[0]) as run:
        assert [block.name for block in run.layout.blocks] == ["0.0", "0.1", "1"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    ["to_device_bytes_per_second", "to_host_bytes_per_second", "latency_seconds", "host_memory_bytes_per_second"],
)
@pytest.mark.parametrize("value", [-1, float("nan"), "fast", True])
def test_a_speed_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}={value!r}: give a"):
        hydra_ext.SimulatedDevice(**{name: value})


# ---- models ---------------------------------------------------------------------------------------------------------


def with_weight(make: Callable[[], torch.Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    model[1].weight = nn.Parameter(make(), requires_grad=False)
    return model


class Labelled(torch.Tensor):
    """A tensor subclass with a mind of its own."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return labelled()
        raise NotImplementedError(function)


def labelled() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Labelled, (4, 4))


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(4).to_sparse(), "only dense parameters"),
        (lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.empty(4, 4, device="meta"), "meta device"),
        (lambda: torch.randn(1).expand(4, 4), "strides"),
        (lambda: torch.randn(4, 8)[:, ::2], "strides"),
        (labelled, "subclass"),
    ],
    ids=["sparse", "quantised", "meta", "expanded", "with gaps", "subclass"],
)
def test_a_parameter_that_cannot_be_paged_is_named(make: Callable[[], torch.Tensor], says: str) -> None:
    model = with_weight(make)
    before = footprint(model)
    with pytest.raises(UnsupportedModel, match=f"'1.weight' .*{says}"):
        hydra_ext.offload(model, budget=ROOMY)
    assert footprint(model) == before


def test_a_parameter_without_a_shape_yet_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"'0\.weight' has no shape yet; run one forward"):
        hydra_ext.offload(nn.Sequential(nn.LazyLinear(4)), budget=ROOMY)


def test_a_parameter_made_in_inference_mode_is_named() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModel, match=r"'0\.weight' was made in inference mode"):
        hydra_ext.offload(model, budget=ROOMY)


@pytest.mark.every_case
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cuda:0", "nonsense", 7])
def test_a_device_that_is_not_there_is_a_typed_error_and_changes_nothing(device: Any) -> None:
    assert not torch.cuda.is_available()
    model = nn.Linear(4, 4)
    before = footprint(model)
    with pytest.raises((HydraError, TypeError), match="device"), hydra_ext.offload(model, budget=ROOMY, device=device):
        pass
    assert footprint(model) == before


def test_blocks_that_are_no_modules_of_the_model_are_named() -> None:
    model = tiny_gpt2()
    with pytest.raises(UnsupportedModel, match=r"'transformer\.h\.9'"):
        hydra_ext.offload(model, budget=ROOMY, blocks=["transformer.h.9"])
    with pytest.raises(UnsupportedModel, match="not a module"):
        hydra_ext.offload(model, budget=ROOMY, blocks=[nn.Linear(2, 2)])
    with pytest.raises(UnsupportedModel, match="lies inside"):
        hydra_ext.offload(model, budget=ROOMY, blocks=["transformer.h.1", "transformer.h.1.mlp"])


def test_a_scripted_model_is_refused_by_name_and_nothing_is_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(model, torch.ones(1, 4)))
    before = footprint(scripted)
    with pytest.raises(UnsupportedModel, match="'1'"), hydra_ext.offload(scripted, budget=ROOMY):
        pass
    assert footprint(scripted) == before
    assert not engine.installed()


def test_a_model_without_parameters_is_as_it_is() -> None:
    with hydra_ext.offload(nn.ReLU(), budget="1MiB") as run:
        assert run.report().blocks == 0


# ---- contexts -------------------------------------------------------------------------------------------------------


def test_a_model_inside_a_context_cannot_be_offloaded_once_more() -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    expected = outcome(plain)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        with pytest.raises(AlreadyOffloaded), hydra_ext.offload(model, budget=ROOMY):
            pass
        found = outcome(model, run)
        assert run.report().windows > 0
    assert_same(expected, found)


def test_a_model_cannot_be_offloaded_from_inside_its_own_forward() -> None:
    model = tiny_gpt2()

    def offload_again(*_args: Any) -> None:
        with pytest.raises((AlreadyOffloaded, UnsupportedModel)), hydra_ext.offload(model.transformer, budget=ROOMY):
            pass

    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        handle = model.lm_head.register_forward_pre_hook(offload_again)
        language_loss(model, 0).backward()
        handle.remove()
        assert run.report().windows == 2


def part_of(model: nn.Module) -> nn.Module:
    return model.transformer.h[0]


def around(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"inner": model, "head": nn.Linear(4, 4)})


def beside(model: nn.Module) -> nn.Module:
    other = tiny_gpt2()
    other.transformer.h[0] = model.transformer.h[0]
    return other


def tied_to(model: nn.Module) -> nn.Module:
    other = nn.Linear(4, 4)
    other.weight = model.lm_head.weight
    return other


@pytest.mark.parametrize("other_of", [part_of, around, beside, tied_to])
def test_two_contexts_cannot_share_what_they_move(other_of: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    expected = outcome(plain)
    other = other_of(model)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        with pytest.raises(AlreadyOffloaded), hydra_ext.offload(other, budget=ROOMY):
            pass
        assert_same(expected, outcome(model, run))
        assert run.report().windows > 0


@pytest.mark.parametrize("other_of", [part_of, around, beside, tied_to])
def test_contexts_over_shared_parts_may_follow_each_other(other_of: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    with hydra_ext.offload(other_of(model), budget=ROOMY):
        pass
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        assert_same(outcome(plain), outcome(model, run))


def test_a_context_object_is_entered_once() -> None:
    context = hydra_ext.offload(nn.Linear(4, 4), budget=ROOMY)
    with context, pytest.raises(StateError, match="entered before"), context:
        pass
    with pytest.raises(StateError, match="entered before"), context:
        pass
    assert not engine.installed()


def test_a_model_can_be_offloaded_again_and_again() -> None:
    plain, model = tiny_gpt2(), tiny_gpt2()
    budget = tight_budget(model, language_loss)
    for first in range(3):
        expected = outcome(plain, steps=1, first=first)
        with hydra_ext.offload(model, budget=budget, checks=POISONED) as run:
            assert_same(expected, outcome(model, run, steps=1, first=first))
            assert run.report().evictions > 0


def test_the_smallest_budget_counts_buffers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_buffer("table", torch.zeros(5000))
    with pytest.raises(BudgetTooSmall) as caught:
        hydra_ext.offload(model, budget=1000)
    error = caught.value
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert error.smallest_budget == error.block_bytes + buffers
    with pytest.raises(BudgetTooSmall):
        hydra_ext.offload(model, budget=error.smallest_budget - 1)
    with hydra_ext.offload(model, budget=error.smallest_budget):
        pass
