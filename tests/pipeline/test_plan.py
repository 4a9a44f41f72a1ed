"""`Pipeline(plan="auto")`: the bits of the same choices by hand, on all ranks; what is given is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.pipeline import Pipeline
from hydra_ext.schedule import make
from support.pipeline.pipeline_plans import both, made, refused
from support.pipeline.pipelines import make_stages, sgd
from support.ranks import run_ranks


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("layers", {}, marks=pytest.mark.full),
        ("layers", {"replicas": 2, "recompute": True}),
        pytest.param("layers", {"replicas": 1, "schedule": "1f1b"}, marks=pytest.mark.full),
        ("layers", {"replicas": 1, "schedule": "gpipe", "stages": 4, "microbatches": 2}),
        ("layers", {"cuts": ["3"], "replicas": 1, "microbatches": 4, "budget": 2**20}),
        ("stateful", {"replicas": 1, "recompute": True, "microbatches": 4}),
        ("unbuilt", {}),
        pytest.param("gpt2", {"replicas": 1}, marks=pytest.mark.full),
    ],
)
def test_a_plan_has_the_bits_of_its_choices_by_hand(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_ranks(both, name, options, folder=tmp_path)
    assert all(rank["same"] for rank in ranks)
    assert ranks[0]["choice"] == ranks[1]["choice"]
    assert ranks[0]["text"] == ranks[1]["text"]
    choice = ranks[0]["choice"]
    assert choice["width"] * choice["depth"] == 2
    assert choice["schedule"] == options.get("schedule", "2bw")
    for key, chosen in (("replicas", "width"), ("recompute",) * 2, ("stages",) * 2, ("microbatches",) * 2):
        assert choice[chosen] == options.get(key, choice[chosen])


@pytest.mark.full
def test_four_ranks_follow_one_plan(tmp_path: Path) -> None:
    ranks = run_ranks(both, "layers", {"schedule": "1f1b"}, folder=tmp_path, size=4)
    assert all(rank["same"] for rank in ranks)
    assert len({str(rank["choice"]) for rank in ranks}) == 1
    assert ranks[0]["choice"]["width"] * ranks[0]["choice"]["depth"] == 4


@pytest.mark.full
def test_all_ranks_call_fn_equally_often(tmp_path: Path) -> None:
    ranks = run_ranks(both, "layers", {"replicas": 1}, folder=tmp_path)
    assert ranks[0]["calls"] == ranks[1]["calls"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 5}, "no number of lines and no size of microbatches divides them"),
        ({"replicas": 1, "stages": 40}, "no schedule of 2bw allows these numbers"),
        ({"budget": 64}, "the leanest plan needs"),
        ({"stages": 3, "cuts": ["1"]}, "contradict each other"),
    ],
)
def test_what_cannot_be_planned_is_refused_on_all_ranks(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    for kind, text in run_ranks(refused, options, folder=tmp_path):
        assert kind in ("PlanError", "PlanDoesNotFit", "RankFailed")
        assert message in text


def test_one_process_plans_as_well() -> None:
    model, batches, loss = made("layers")
    with Pipeline(model, sgd, seed=5, schedule="1f1b", plan="auto") as pipe:
        with pytest.raises(StateError, match="not planned yet"):
            pipe.report()
        first = pipe.step(list(batches[0].chunk(4)), lambda x: loss(model, x)).loss
        assert pipe.plan is not None
        assert (pipe.plan.choice.microbatches, pipe.plan.choice.depth) == (4, 1)
        assert len(pipe.step(list(batches[1].chunk(4)), lambda x: loss(model, x)).losses) == 4
    assert torch.isfinite(first)


def test_plans_that_make_no_sense_are_refused() -> None:
    model, _, _ = made("layers")
    cases: list[tuple[Any, dict[str, Any]]] = [
        (model, {"plan": "fast"}),
        (model, {"plan": "auto", "schedule": "pipedream"}),
        (model, {"plan": "auto", "schedule": make("1f1b", stages=1, microbatches=2)}),
        (None, {"plan": "auto", "stages": make_stages(1)}),
    ]
    for given, options in cases:
        with pytest.raises(InvalidArgument, match="plan="):
            Pipeline(given, sgd, **options)
