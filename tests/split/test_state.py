"""What a forward keeps beside its result is right in every stage that reads it, or the cut is refused."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_ext.errors import SplitError
from hydra_ext.state.foreign import is_installed
from support.split.split_models import Batch
from support.split.split_models_beside import (
    AsksForGraph,
    Cache,
    Counter,
    Counting,
    CountingRepeats,
    FirstTime,
    GivesCounter,
    Info,
    Measures,
    SetsUp,
    UsesCache,
)
from support.split.split_models_own import Stack, text, text_loss
from support.split.split_models_state import (
    AssignsAtTheEnd,
    AssignsOnly,
    AveragesWeight,
    CarriesOut,
    CountsSteps,
    KeepsInQueue,
    KeepsStates,
    Logs,
    Momentum,
    OwnLoads,
    ReadsLoads,
    ReadsTables,
    Tables,
    Truncated,
)
from support.split.split_stages import Fn, assert_same, cut, rehearsed, run, run_plainly, shared, without

BATCHES = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]


def possible_cuts(model: nn.Module, fn: Fn = text_loss, batches: list[Any] = BATCHES) -> list[int]:
    """Each gives what the whole model gives in several microbatches."""
    expected = run_plainly(model, fn, batches)
    rehearsal = rehearsed(copy.deepcopy(model), fn, batches[0])  # nothing here depends on what a rehearsal puts back
    for boundary in rehearsal.possible_cuts:
        found = run(model, fn, batches, [boundary], rehearsal)
        assert_same(found, expected, shared(model, rehearsal, [boundary]))
    return rehearsal.possible_cuts


def why(model: nn.Module, boundary: int, fn: Fn = text_loss) -> str:
    """A cut there is refused."""
    return "; ".join(rehearsed(model, fn, BATCHES[0]).boundaries[boundary].reasons)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- buffers that are replaced, not written to -----------------------------------------------------------------------
def test_a_buffer_that_the_glue_replaces_is_written() -> None:
    assert possible_cuts(AssignsAtTheEnd()) == [5]  # the glue after the last layer is no longer before the cut
    assert "mean is used on both sides of the cut, and written" in why(AssignsAtTheEnd(), 3)


def test_the_stage_that_replaces_a_buffer_has_the_right_one() -> None:
    assert possible_cuts(AssignsOnly()) == [1, 2, 3, 4, 5]


def test_a_buffer_that_only_its_block_replaces_stays_in_its_stage() -> None:
    assert possible_cuts(OwnLoads()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("at_the_end", "cuts"), [(False, [5]), (True, [1, 5])])
def test_a_buffer_that_a_block_replaces_is_read_in_its_stage_only(at_the_end: bool, cuts: list[int]) -> None:
    model = ReadsLoads()
    model.at_the_end = at_the_end
    assert possible_cuts(model) == cuts
    assert "load is used on both sides of the cut, and written" in why(model, 2)


@pytest.mark.parametrize(("after", "cuts"), [(0, [1, 2, 3, 4, 5]), (2, [1, 2, 3, 4, 5]), (3, [1, 2, 4, 5])])
def test_a_buffer_that_every_stage_counts_alike_is_set_where_all_come_that_read_it(after: int, cuts: list[int]) -> None:
    assert possible_cuts(CountsSteps(after)) == cuts
    assert after != 3 or "set for the next microbatch" in why(CountsSteps(after), 3)


# ---- buffers and weights made from weights ---------------------------------------------------------------------------
def test_a_weight_that_a_buffer_is_made_from_is_there() -> None:
    assert possible_cuts(AveragesWeight()) == [1, 2, 3, 4, 5]


def test_weights_that_follow_others_have_them() -> None:
    assert possible_cuts(Momentum(at_the_end=False)) == list(range(1, 11))
    # the slow layers, the events 6 to 9, are used there and written to after the last
    assert possible_cuts(Momentum(at_the_end=True)) == [1, 2, 3, 4, 5, 6, 10]


# ---- tensors that one microbatch keeps for the next ------------------------------------------------------------------
def test_tensors_deep_in_containers_are_carried_in_one_stage() -> None:
    assert possible_cuts(KeepsStates()) == [5]
    assert "states[2][0] is carried from one microbatch to the next" in why(KeepsStates(), 3)


@pytest.mark.parametrize(
    ("kept", "name"),
    [(deque([torch.zeros(())], maxlen=1), "kept[0]"), (SimpleNamespace(mean=torch.zeros(())), "kept.mean")],
)
def test_tensors_in_queues_and_objects_are_carried_in_one_stage(kept: Any, name: str) -> None:
    rehearsal = rehearsed(KeepsInQueue(kept), text_loss, BATCHES[0])
    assert rehearsal.possible_cuts == [5]
    assert f"{name} is carried" in rehearsal.boundaries[1].reasons[0]


def test_what_the_function_carries_outside_of_the_model_is_refused() -> None:
    rehearsal = rehearsed(CarriesOut(), Truncated(), BATCHES[0])
    assert rehearsal.possible_cuts == []
    assert all("kept outside the model" in boundary.reasons[0] for boundary in rehearsal.boundaries[1:6])


def test_functions_of_the_package_are_a_librarys_wherever_it_lies() -> None:
    """In an editable install that is not among the installed packages."""
    assert is_installed(is_installed)
    assert not is_installed(test_functions_of_the_package_are_a_librarys_wherever_it_lies)


def test_a_table_that_was_there_before_is_not_to_be_carried() -> None:
    assert possible_cuts(ReadsTables(), Tables()) == [1, 2, 3, 4, 5]


def test_one_that_is_made_for_the_next_microbatch_is_refused() -> None:
    rehearsal = rehearsed(ReadsTables(), Tables(fills=True), BATCHES[0])
    assert rehearsal.possible_cuts == [1]  # after which it is read and made
    assert "kept outside the model" in rehearsal.boundaries[2].reasons[0]


def test_a_function_may_keep_what_only_its_end_reads() -> None:
    assert possible_cuts(Stack(), Logs()) == [1, 2, 3, 4, 5]


# ---- numbers, flags and names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "name"), [("flag", "first"), ("name", "name"), ("counts", "counts['all'][0]")])
def test_what_glue_sets_for_the_next_microbatch_is_set_in_every_stage_that_reads_it(kind: str, name: str) -> None:
    assert possible_cuts(FirstTime(kind)) == [5]
    assert f"{name} is set after block layers.3" in why(FirstTime(kind), 3)


def test_what_only_a_block_counts_and_reads_stays_in_its_stage() -> None:
    assert possible_cuts(Counting()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda layer: layer.calls, "calls"),
        (lambda layer: float(layer.calls > 1000), "calls"),  # which no replay of a few microbatches would show
        (lambda layer: layer.stats["calls"], "stats['calls']"),
        (lambda layer: layer.object.number, "object.number"),
        (lambda layer: len(layer.seen), "seen"),
    ],
)
def test_what_a_block_counts_is_read_before_a_cut_only(read: Callable[[Any], float], name: str) -> None:
    assert possible_cuts(Counting(read)) == [1]
    assert f"block layers.0 changes layers.0.{name}, which is read between blocks" in why(Counting(read), 4)


def test_calls_of_one_counting_block_stay_together() -> None:
    assert possible_cuts(CountingRepeats()) == [1, 5]
    assert "which is read in block layers.0" in why(CountingRepeats(), 2)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "cuts"), [(Counter, [1, 5]), (list, [1]), (dict, [1]), (lambda: SimpleNamespace(number=0), [1])]
)
def test_what_blocks_count_in_what_they_are_given_is_refused(kind: Callable[[], Any], cuts: list[int]) -> None:
    assert possible_cuts(GivesCounter(kind)) == cuts
    assert "block layers.0 changes argument 1" in why(GivesCounter(kind), 3)


@pytest.mark.parametrize("kind", [Cache, dict])
def test_caches_of_which_each_block_reads_its_own_part_may_be_cut(kind: Callable[[], Any]) -> None:
    assert possible_cuts(UsesCache(kind)) == [1, 2, 3, 4, 5]


def test_settings_that_are_found_out_where_they_are_read_may_be_cut() -> None:
    assert possible_cuts(SetsUp()) == [1, 2, 3, 4, 5]


def test_a_rehearsal_leaves_the_classes_of_what_it_watched() -> None:
    model = Counting(lambda layer: layer.object.number)
    before = [(type(module), dict(module.__dict__)) for module in model.modules()]
    rehearsed(model, text_loss, BATCHES[0])
    assert [(type(module), dict(module.__dict__)) for module in model.modules()] == before
    assert all(type(layer.object) is Counter for layer in model.layers)  # type: ignore[union-attr]


# ---- what is asked of values of other stages, and what is returned of them -------------------------------------------
@pytest.mark.parametrize("asks", [lambda h: h.requires_grad, lambda h: h.grad_fn is not None, lambda h: not h.is_leaf])
def test_whether_a_value_has_a_graph_is_known_where_the_value_is_not(asks: Callable[[torch.Tensor], bool]) -> None:
    assert possible_cuts(AsksForGraph(asks)) == [1, 2, 3, 4, 5]


def test_the_graph_of_a_value_that_is_not_there_is_an_error() -> None:
    model = AsksForGraph(lambda h: "Add" in h.grad_fn.name())
    stages = cut(model, text_loss, rehearsed(model, text_loss, BATCHES[0]), [4])
    with pytest.raises(SplitError, match=r"grad_fn\.name is read of a value whose graph is on another stage"):
        stages.forward(BATCHES[0])


def measured(wrap: Callable[[torch.Tensor, torch.Tensor], Any]) -> Fn:
    def fn(model: nn.Module, batch: Batch) -> Any:
        out, norm, count = model(batch["x"])
        return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten()), wrap(norm, count)

    return fn


@pytest.mark.parametrize("boundary", [1, 3, 5])
def test_metrics_in_objects_have_the_values_and_no_graph(boundary: int) -> None:
    model = Measures()
    fn = measured(lambda norm, count: {"space": SimpleNamespace(norm=norm, parts=[(count,)]), "info": Info(norm, "a")})
    expected = fn(model, BATCHES[0])[1]
    found = cut(model, fn, rehearsed(model, fn, BATCHES[0]), [boundary]).forward(BATCHES[0])[-1].metrics
    assert torch.equal(found["space"].norm, expected["space"].norm)
    assert torch.equal(found["space"].parts[0][0], expected["space"].parts[0][0])
    assert torch.equal(found["info"].early, expected["info"].early)
    assert found["info"].name == "a"
    assert not found["space"].norm.requires_grad
    assert not found["info"].early.requires_grad


def test_metrics_that_cannot_be_searched_are_refused() -> None:
    fn = measured(lambda norm, _count: torch.distributions.Normal(norm, 1.0))
    assert "fn returns a Normal, which may hide tensors" in why(Measures(), 3, fn)


def test_a_metric_of_which_the_rehearsal_knew_nothing_is_missed() -> None:
    model = Measures()
    fn = measured(lambda norm, _count: Info(norm, "a"))
    rehearsal = rehearsed(model, fn, BATCHES[0])
    crossing = rehearsal.boundaries[3].values
    norms = [key for key in crossing if not rehearsal.values[key].shape]
    assert len(norms) == 1
    with pytest.raises(SplitError, match="a metric depends on a value of another stage"):
        cut(model, fn, without(rehearsal, 3, norms[0]), [3]).forward(BATCHES[0])
