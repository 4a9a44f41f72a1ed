"""A rank whose stages live on the host, under a device budget: the same numbers, and the bytes of the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_ext.errors import BudgetTooSmall, InvalidArgument, InvalidBudget
from hydra_ext.pipeline import Pipeline
from hydra_ext.policy import SimulatedDevice
from support.pipeline import pipeline_memory, pipelines
from support.pipeline.pipeline_memory import ACTIVATION_BYTES, INPUT_BYTES, WEIGHT_BYTES
from support.pipeline.pipelines import Case
from support.ranks import run_ranks

SLACK = 2048  # scalars of the loss and of the graph, rounded up


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [
        ("2bw", 2, 2),
        pytest.param("2bw", 3, 3, marks=pytest.mark.full),
        pytest.param("gpipe", 3, 1, marks=pytest.mark.full),
        pytest.param("pipedream", 3, 3, marks=pytest.mark.full),
        pytest.param("2bw", 1, 1, marks=pytest.mark.full),
        pytest.param("1f1b", 2, 2, marks=pytest.mark.full),
        pytest.param("2bw", 4, 2, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_numbers_are_those_of_the_recurrence_with_poisoned_hosts(
    schedule: str, stages: int, ranks: int, every: int, tmp_path: Path
) -> None:
    cases = [
        Case(
            schedule=schedule,
            stages=stages,
            microbatches=1 if schedule == "pipedream" else 4,
            budget=budget,
            optimizer=optimizer,
            max_norm=None if schedule == "pipedream" else 0.5,
            dropout=0.0 if schedule == "2bw" else 0.1,
            recompute=recompute,
            evaluates=schedule == "2bw",
        )
        for budget in (400_000, 80_000)
        for optimizer, recompute in (("native-adamw", False), ("adamw", True))
    ][::every]
    results = run_ranks(pipelines.train_all, cases, folder=tmp_path, size=ranks)
    delay = {"2bw": [1] * stages, "pipedream": [stages - 1 - stage for stage in range(stages)]}.get(schedule, 0)
    for index, case in enumerate(cases):
        of_case = [result[index] for result in results]
        pipelines.same(of_case, pipelines.recurrence(case, delay), case, delay)
        for result in of_case:
            assert result["device"]["windows"] > 0
            assert result["device"]["faults"] == 0
            assert result["device"]["loads"] >= case.steps  # weights did move
            assert result["device"]["peak_bytes"] <= (case.budget or 0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "stages", "ahead"), [("2bw", 2, 0), ("2bw", 3, 0), ("2bw", 3, 1), ("1f1b", 3, 0), ("gpipe", 2, 0)]
)
def test_the_device_holds_what_the_formulas_say(
    schedule: str, stages: int, ahead: int, recompute: bool, tmp_path: Path
) -> None:
    """PipeDream-2BW, section 3.3: versions * W/d + in flight * (A/d + Ain), or A/d + in flight * Ain recomputed."""
    microbatches = 4
    of = (stages, schedule, ahead, microbatches, recompute)
    held = run_ranks(pipeline_memory.hold, *of, folder=tmp_path, size=stages)
    for stage, bytes_of in enumerate(held):
        versions = 2 if schedule == "2bw" else 1
        in_flight = microbatches if schedule == "gpipe" else 1 + (stages - 1 - stage) * (1 + ahead)
        if recompute:
            # The first stage's inputs are the caller's. A forward works on a copy of what it keeps.
            kept = in_flight * INPUT_BYTES if stage else 0
            activations = kept + ACTIVATION_BYTES + INPUT_BYTES
        else:
            activations = in_flight * (ACTIVATION_BYTES + INPUT_BYTES)
        assert bytes_of["weights"] == versions * WEIGHT_BYTES
        assert activations <= bytes_of["activations"] <= activations + SLACK
        assert bytes_of["windows"] > 0
        assert bytes_of["faults"] == bytes_of["evictions"] == 0


def test_each_version_is_loaded_once_where_there_is_room(tmp_path: Path) -> None:
    steps = 5
    for bytes_of in run_ranks(pipeline_memory.hold, 2, "2bw", 0, 4, False, folder=tmp_path):
        # The last step's version is made by the drain, and nothing runs with it; nor with the one before.
        assert bytes_of["loads"] == pipeline_memory.LAYERS * (steps - 1)


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    stages = pipelines.make_stages(1)
    with pytest.raises(BudgetTooSmall, match="cannot hold the largest block"):
        Pipeline(None, pipelines.adamw, stages=stages, microbatches=2, budget=100)
    with pytest.raises(InvalidBudget):
        Pipeline(None, pipelines.adamw, stages=stages, microbatches=2, budget="much")
    with pytest.raises(InvalidArgument, match="budget"):
        Pipeline(None, pipelines.adamw, stages=stages, microbatches=2, device=SimulatedDevice())
