"""`hydra_ext.plan.pipeline`: choices against all others and an evaluator of its own, and plans of models."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import InvalidArgument, NotOnFakeTensors, PlanDoesNotFit, PlanError
from hydra_ext.plan import Card, PipelinePlan, pipeline
from hydra_ext.plan.pipelines.chains import affine
from hydra_ext.plan.pipelines.question import Constraints
from hydra_ext.plan.pipelines.search import search
from support.models.zoo import FAMILIES
from support.plan import lines

SAME = 1e-9  # relative; sums in another order
SLOW = Card(
    name="slow",
    memory_bytes=2**30,
    half_flops=1e9,
    full_flops=1e9,
    memory_bytes_per_second=1e9,
    link_bytes_per_second=1e8,
)


def found_way(plan: PipelinePlan) -> lines.Way:
    choice = plan.choice
    return lines.Way(
        choice.width,
        choice.depth,
        choice.samples,
        choice.microbatches,
        choice.schedule,
        choice.recompute,
        plan.cuts,
    )


@pytest.mark.parametrize("seed", range(16))
def test_no_other_choice_is_better(seed: int) -> None:
    draw = random.Random(seed)
    chains, cluster, batch = lines.random_chain(draw), lines.random_cluster(draw), draw.choice([4, 6, 8])
    ways = list(lines.all_ways(chains, cluster.devices, batch))
    if not ways:
        with pytest.raises(PlanError):
            search(chains.__getitem__, cluster, Constraints(batch=batch))
        return
    seconds = {way: lines.seconds(way, chains[way.samples], cluster) for way in ways}
    held = {way: max(lines.rank_bytes(way, chains[way.samples], cluster)) for way in ways}
    least, most = min(held.values()), max(held.values())
    last = 0.0
    for budget in (None, most, (least + most) / 2, (3 * least + most) / 4, least):
        limited = replace(cluster, budget=None if budget is None else int(budget) + 1)
        plan = search(chains.__getitem__, limited, Constraints(batch=batch))
        best = min(seconds[way] for way in ways if budget is None or held[way] <= int(budget) + 1)
        assert plan.seconds == pytest.approx(best, rel=SAME)
        way = found_way(plan)
        assert plan.seconds == pytest.approx(seconds[way], rel=SAME)
        assert plan.rank_bytes == pytest.approx(lines.rank_bytes(way, chains[way.samples], cluster), abs=8)
        assert plan.seconds >= last * (1 - SAME), "more memory is never slower"
        last = plan.seconds
    with pytest.raises(PlanDoesNotFit) as caught:
        search(chains.__getitem__, replace(cluster, budget=int(least) - 1), Constraints(batch=batch))
    assert caught.value.needed_bytes == pytest.approx(least, abs=4)
    assert caught.value.limit_bytes == int(least) - 1


# ---- models ---------------------------------------------------------------------------------------------------------
def uneven() -> nn.Module:
    """Blocks of which the first costs as much as the others together."""
    widths = (512, 128, 128, 128, 128)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for width in widths))


def planned(model: nn.Module, **options: Any) -> PipelinePlan:
    given: dict[str, Any] = {"devices": 2, "device": SLOW, "schedule": "1f1b", **options}
    return pipeline(model, torch.randn(32, 64), lambda x: model(x).square().mean(), **given)


def test_stages_have_unequal_numbers_of_blocks() -> None:
    plan = planned(uneven(), replicas=1)
    assert [{name[0] for name in stage.names} for stage in plan.stages] == [{"0"}, {"1", "2", "3", "4"}]
    assert plan.cuts == (plan.stages[1].begin,)
    assert [stage.rank for stage in plan.stages] == [0, 1]


def test_a_plan_is_the_same_each_time_and_leaves_the_model_alone() -> None:
    model = uneven()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, again = planned(model, schedule=None), planned(model, schedule=None)
    assert first == again
    assert str(first) == str(again)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_given_is_kept() -> None:
    plan = planned(uneven(), schedule="gpipe", stages=4, replicas=1, microbatches=8, recompute=True)
    choice = plan.choice
    assert (choice.schedule, choice.stages, choice.depth, choice.width) == ("gpipe", 4, 2, 1)
    assert (choice.microbatches, choice.samples, choice.recompute) == (8, 4, True)
    assert {each.choice.schedule for each in plan.alternatives} == {"gpipe"}
    assert {each.choice.recompute for each in plan.alternatives} == {True}


def test_more_memory_is_never_slower() -> None:
    model = uneven()
    roomy = planned(model, schedule=None, devices=4)
    budgets = sorted({each.nbytes for each in roomy.alternatives})
    plans = [planned(model, schedule=None, devices=4, budget=budget) for budget in budgets[:: len(budgets) // 3]]
    assert all(max(plan.rank_bytes) <= (plan.budget or 0) for plan in plans)
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= roomy.seconds


def test_a_slow_link_carries_what_is_less() -> None:
    """Activations between stages, or gradients of all weights."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    assert planned(model, link=1e6, batch=32).choice.width == 1
    assert planned(model, link=1e6, batch=1024).choice.width == 2


def test_too_little_memory_is_refused_with_the_bytes_that_would_do() -> None:
    model = uneven()
    with pytest.raises(PlanDoesNotFit, match="the leanest plan needs") as caught:
        planned(model, budget=1000)
    needed = caught.value.needed_bytes
    assert max(planned(model, budget=needed).rank_bytes) == needed
    with pytest.raises(PlanDoesNotFit):
        planned(model, budget=needed - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 5}, "no number of lines and no size of microbatches divides them"),
        ({"stages": 9}, "for a model of at most 6 stages"),
        ({"replicas": 3}, "give a batch that is a multiple of the devices"),
        ({"schedule": "pipedream"}, "give one or several of 1f1b, gpipe, interleaved, 2bw"),
        ({"schedule": ()}, "give one or several"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(uneven(), **options)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 0},
        {"batch": 0},
        {"microbatches": 0},
        {"replicas": -1},
        {"stages": True},
        {"link": 0},
        {"latency": -1.0},
        {"device": "no such card"},
        {"state_copies": float("nan")},
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        planned(uneven(), **options)


def test_an_example_needs_rows() -> None:
    model = uneven()
    for example in (torch.tensor(1.0), (torch.randn(2, 64), torch.randn(3, 64)), {}):
        with pytest.raises(InvalidArgument, match="give samples along the first dimension"):
            pipeline(model, example, lambda x: model(x).square().mean(), devices=2, device=SLOW)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_fn_that_needs_numbers_is_planned_from_real_microbatches(param_dtype: torch.dtype | None) -> None:
    model = uneven()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def plain(x: Tensor) -> Tensor:
        return model(x.to(model[0][0].weight.dtype)).mean() * 2.0

    def needing(x: Tensor) -> Tensor:
        return model(x.to(model[0][0].weight.dtype)).mean() * (2.0 if x.sum().item() > 0 else 1.0)

    options: dict[str, Any] = {"devices": 2, "device": SLOW, "link": 1e9, "param_dtype": param_dtype}
    example = torch.rand(8, 64)
    dry, real = (pipeline(model, example, fn, **options) for fn in (plain, needing))
    assert dry.measured_because is None
    assert "item" in str(real.measured_because)
    assert str(real.measured_because) in str(real)
    assert (real.choice, real.cuts) == (dry.choice, dry.cuts)
    assert real.rank_bytes == pytest.approx(dry.rank_bytes, abs=16)  # a condition is a number more
    assert real.seconds == pytest.approx(dry.seconds, rel=0.01)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fn_that_needs_numbers_is_refused_where_there_are_none() -> None:
    with torch.device("meta"):
        model = uneven()

    def fn(x: Tensor) -> Tensor:
        return model(x).mean() * (2.0 if x.sum().item() > 0 else 1.0)

    with pytest.raises(NotOnFakeTensors, match="Leave out"):
        pipeline(model, torch.randn(8, 64), fn, devices=2, device=SLOW)


@pytest.mark.full
def test_a_model_on_meta_has_the_plan_of_the_real_one() -> None:
    family = FAMILIES["gpt2"]
    model, batch = family.make(0), family.batches(1, 1)[0]
    with torch.device("meta"):
        unbuilt = family.make(0)
    options: dict[str, Any] = {"devices": 4, "batch": 16, "device": "rtx4090-24", "link": "10GB", "schedule": "1f1b"}
    plans = [pipeline(each, batch, lambda mb, each=each: family.loss(each, mb), **options) for each in (model, unbuilt)]
    assert plans[0] == plans[1]
    text = str(plans[0])
    assert "microbatches of" in text
    assert "binds" in text


def test_chains_of_other_paths_do_not_lie_on_one_line() -> None:
    small = lines.random_chain(random.Random(0))[1]
    other = replace(small, samples=4, names=tuple(f"other {name}" for name in small.names))
    with pytest.raises(PlanError, match="takes other paths"):
        affine(small, other)


def test_it_is_public() -> None:
    assert hydra_ext.plan.pipeline is pipeline
