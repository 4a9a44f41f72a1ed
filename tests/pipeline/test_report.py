"""A rank's report says what it holds, has done and has moved, and what its schedule makes of the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydra_ext import schedule
from hydra_ext._C import Action, ActionKind
from hydra_ext.pipeline.tally import RECENT, Tally
from hydra_ext.schedule.meaning import delay_of, meaning_of
from support.pipeline import pipeline_reports, pipelines
from support.pipeline.pipelines import CLASSES, WIDTH, Case
from support.ranks import run_ranks

APPROXIMATE = "approximate, not the numbers of plain training"


def crossing_bytes(case: Case) -> int:
    """Of the activations between two stages in the whole training; of their gradients as well."""
    rows = [data["ids"].numel() for step in range(case.steps) for data in pipelines.data_of(case, step)]
    return sum(rows) * WIDTH * pipeline_reports.PARAMETER_BYTES


def weights_bytes(case: Case, stage: int) -> int:
    return sum(parameter.nbytes for parameter in pipelines.make_stages(case.stages)[stage].parameters())


def action(kind: ActionKind, *, batch: int = 0) -> Action:
    return Action(kind, stage=0, batch=batch, microbatch=0)


def one(report: dict[str, Any]) -> dict[str, Any]:
    (stage,) = report["stages"]
    return stage


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "versions", "in_flight"), [("2bw", 2, (3, 2, 1)), ("1f1b", 1, (3, 2, 1)), ("gpipe", 1, (5, 5, 5))]
)
def test_a_report_has_the_figures_of_the_schedule(
    kind: str, versions: int, in_flight: tuple[int, ...], tmp_path: Path
) -> None:
    case = Case(schedule=kind, stages=3, microbatches=5, steps=6)
    ranks = run_ranks(pipeline_reports.figures, case, folder=tmp_path, size=3)
    crossing = crossing_bytes(case)
    for rank, result in enumerate(ranks):
        report = result["end"]
        stage = one(report)
        assert (report["rank"], report["ranks"], report["place"], report["replica"]) == (rank, 3, rank, 0)
        assert (stage["stage"], stage["blocks"], stage["shared_bytes"]) == (rank, (), 0)
        assert stage["parameter_bytes"] == weights_bytes(case, rank)
        assert stage["version_bytes"] == versions * weights_bytes(case, rank)
        assert stage["peak_in_flight"] == in_flight[rank]
        assert report["steps"] == report["updates"] == case.steps
        assert report["skipped_updates"] == 0
        assert report["activations_sent_bytes"] == report["gradients_received_bytes"] == crossing * (rank < 2)
        assert report["activations_received_bytes"] == report["gradients_sent_bytes"] == crossing * (rank > 0)


def test_times_add_up_to_no_more_than_there_was(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(pipeline_reports.figures, Case(stages=2, steps=8), folder=tmp_path)):
        report = result["end"]
        waited = {cause: report[f"waited_for_{cause}_seconds"] for cause in ("activations", "gradients", "reductions")}
        assert 0 < report["computing_seconds"] < result["seconds"] - sum(waited.values())
        assert (waited["activations"] > 0, waited["gradients"] > 0) == (rank == 1, rank == 0)
        assert 0 < report["bubble"] < 1


@pytest.mark.parametrize("stages", [1, 2])
def test_a_delay_is_called_approximate_wherever_a_report_prints(stages: int, tmp_path: Path) -> None:
    cases = [Case(schedule=kind, stages=stages, steps=2) for kind in ("2bw", "1f1b", "gpipe")]
    for results in run_ranks(pipeline_reports.all_figures, cases, folder=tmp_path, size=stages):
        delayed, *flushing = [result["text"] for result in results]
        assert f"2bw: each update uses gradients of the weights before the newest: {APPROXIMATE}" in delayed
        for text in flushing:
            assert ": the numbers of plain training" in text
            assert "approximate" not in text
        assert results[0]["steps"]["updates"] == 0  # both are still to come
        assert results[1]["steps"]["updates"] == 2


def test_what_a_schedule_means_follows_from_its_versions() -> None:
    text = "hydra-schedule 1 stages=1 ranks=1 microbatches=1 versions=delay-1\nrank 0: U0-2 F0.0 B0.0 R0"
    assert delay_of(schedule.Schedule.parse(text)) == 1
    assert delay_of(schedule.make("pipedream", stages=4, microbatches=1)) == 3
    assert delay_of(schedule.make("pipedream", stages=1, microbatches=1)) == 0
    assert delay_of(schedule.make("interleaved", stages=4, ranks=2, microbatches=2)) == 0
    assert meaning_of(3) == f"updates use gradients of weights that are up to 3 updates old: {APPROXIMATE}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["2bw", "1f1b"])
def test_a_plain_modules_report_names_its_blocks_and_what_stages_share(kind: str, tmp_path: Path) -> None:
    first, last = run_ranks(pipeline_reports.figures_of_plain_module, kind, folder=tmp_path)
    assert first["before"]["stages"] == ()
    assert first["before"]["steps"] == 0
    assert "the first step splits the model" in first["before_text"]
    assert one(first)["blocks"] == ("embedding", "layers.0", "layers.1")
    assert one(last)["blocks"] == ("layers.2", "layers.3", "head")
    layer = sum(parameter.nbytes for parameter in pipeline_reports.Layer().parameters())
    embedding = CLASSES * WIDTH * pipeline_reports.PARAMETER_BYTES
    for report in (first, last):
        assert one(report)["parameter_bytes"] == 2 * layer + embedding
        assert one(report)["shared_bytes"] == embedding


def test_updates_that_were_skipped_are_counted(tmp_path: Path) -> None:
    for report in run_ranks(pipeline_reports.skipped_updates, folder=tmp_path):
        assert (report["steps"], report["updates"], report["skipped_updates"]) == (4, 3, 1)


def test_replicas_are_told_apart(tmp_path: Path) -> None:
    case = Case(stages=2, replicas=2, steps=2)
    ranks = [result["steps"] for result in run_ranks(pipeline_reports.figures, case, folder=tmp_path, size=4)]
    assert [(r["place"], r["places"], r["replica"], r["replicas"]) for r in ranks] == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 2),
        (1, 2, 1, 2),
    ]


def test_the_bubble_is_of_the_last_steps() -> None:
    tally = Tally([0])
    assert tally.bubble == 0.0
    tally.count_step(100.0)
    for _ in range(RECENT):
        tally.count_action(action(ActionKind.FORWARD), 3.0, 1.0)
        tally.count_action(action(ActionKind.SEND_ACTIVATION), 1.0, 0.0)
        tally.count_action(action(ActionKind.BACKWARD), 5.0, 0.5)
        tally.count_step(10.0)
    assert tally.bubble == pytest.approx(0.35)
    assert tally.computing_seconds == 6.5 * RECENT
    assert tally.waited_seconds == {"activations": RECENT, "gradients": RECENT / 2, "reductions": 0.0, "losses": 0.0}
    tally.count_loss_wait(16.0)
    assert tally.bubble == pytest.approx(1.0 - 6.5 * RECENT / (10.0 * RECENT + 16.0))


def test_an_evaluation_leaves_nothing_in_flight() -> None:
    tally = Tally([0])
    for _ in range(3):
        tally.count_action(action(ActionKind.FORWARD, batch=-2), 1.0, 0.0)
    assert tally.peak_in_flight == {0: 0}
    assert tally.computing_seconds == 3.0
