"""Trace files say what every rank did, when, and what it waited for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hydra_ext.errors import TraceFileError
from hydra_ext.schedule import Schedule
from support.pipeline import pipeline_traces
from support.pipeline.pipeline_reports import make
from support.pipeline.pipeline_traces import RankTrace, read, tokens
from support.pipeline.pipelines import Case
from support.ranks import run_ranks
from support.schedules import B, F, U


def traces(folder: Path, count: int) -> list[RankTrace]:
    assert sorted(path.name for path in folder.glob("step*")) == [f"step.rank{rank}.json" for rank in range(count)]
    return [read(folder / f"step.rank{rank}.json") for rank in range(count)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["2bw", "1f1b"])
def test_every_rank_writes_the_schedules_actions_of_the_traced_steps(kind: str, tmp_path: Path) -> None:
    case = Case(schedule=kind, stages=3, steps=3, max_norm=1.0)
    run_ranks(pipeline_traces.traced, case, tmp_path / "step.json", folder=tmp_path, size=3)
    for rank, trace in enumerate(traces(tmp_path, 3)):
        schedule = Schedule.parse(trace.about["schedule"])
        stream = schedule.stream(rank)
        for _ in range(2):
            stream.next_batch(case.microbatches)
        stream.drain()
        actions = [action for _ in range(3) for action in stream.next_batch(case.microbatches)] + stream.drain()
        assert trace.actions("compute") == tokens(actions, (F, B))
        assert trace.actions("updates") == tokens(actions, (U,))
        assert [event["args"]["batch"] for event in trace.rows["reductions"]] == [2, 3, 4]
        for event in trace.rows["compute"]:
            args = event["args"]
            assert args["version"] == schedule.version_of(rank, args["batch"])
            assert (event["pid"], args["stage"]) == (rank, rank)
        assert ("approximate" in trace.about["numbers"]) == (kind == "2bw")


def test_links_have_rows_whose_bytes_are_the_reports(tmp_path: Path) -> None:
    case = Case(stages=3, steps=2)
    results = run_ranks(pipeline_traces.traced, case, tmp_path / "step.json", folder=tmp_path, size=3)
    ranks = traces(tmp_path, 3)
    every = [(batch, microbatch) for batch in (2, 3) for microbatch in range(case.microbatches)]
    for hop in (0, 1):
        for what, link, source, target in (
            ("activations", f"activations of stage {hop}", hop, hop + 1),
            ("gradients", f"gradients for stage {hop}", hop + 1, hop),
        ):
            received = moved(ranks[target], f"{link} from rank {source}", "receive")
            assert list(received) == every
            name = f"{what}_received_bytes"
            assert sum(received.values()) == results[target]["after"][name] - results[target]["before"][name]
            sent = moved(ranks[source], f"{link} to rank {target}", "send")
            assert list(sent) == every[: len(sent)]  # the last may still have been under way
            assert len(sent) >= case.microbatches
            assert sent.items() <= received.items()


def moved(trace: RankTrace, row: str, category: str) -> dict[tuple[int, int], int]:
    """Bytes, by batch and microbatch, of the traced batches."""
    events = [event for event in trace.rows[row] if event["args"]["batch"] >= 2]
    assert {event["cat"] for event in events} == {category}
    return {(event["args"]["batch"], event["args"]["microbatch"]): event["args"]["bytes"] for event in events}


def test_waits_are_named_and_nothing_overlaps(tmp_path: Path) -> None:
    run_ranks(pipeline_traces.traced, Case(stages=2, steps=3), tmp_path / "step.json", folder=tmp_path)
    first, last = traces(tmp_path, 2)
    assert {event["name"] for event in first.rows["waits"]} == {"waits for gradients", "waits for reductions"}
    assert {event["name"] for event in last.rows["waits"]} == {"waits for activations", "waits for reductions"}
    for trace in (first, last):
        own = [*trace.rows["compute"], *trace.rows["waits"], *trace.rows["updates"]]
        rows = [own] + [events for name, events in trace.rows.items() if name not in ("compute", "waits", "updates")]
        for events in rows:
            for before, after in pairwise(sorted(events, key=lambda event: (event["ts"], event["ts"] + event["dur"]))):
                assert before["ts"] + before["dur"] <= after["ts"]


def test_files_of_several_ranks_have_one_clock(tmp_path: Path) -> None:
    """On this machine: what one rank receives it does not have before the other one has begun to compute it."""
    run_ranks(pipeline_traces.traced, Case(stages=2, steps=3), tmp_path / "step.json", folder=tmp_path)
    first, last = traces(tmp_path, 2)
    assert {event["pid"] for event in first.events} | {event["pid"] for event in last.events} == {0, 1}
    begun = {(e["args"]["batch"], e["args"]["microbatch"], e["cat"]): e["ts"] for e in first.rows["compute"]}
    for event in last.rows["compute"]:
        other = begun[event["args"]["batch"], event["args"]["microbatch"], event["cat"]]
        assert other <= event["ts"] if event["cat"] == "forward" else event["ts"] <= other


def test_an_error_inside_still_writes_what_led_to_it(tmp_path: Path) -> None:
    kinds = run_ranks(pipeline_traces.failing, tmp_path / "step.json", folder=tmp_path)
    assert kinds == ["WrongData", "RankFailed"]
    first, last = traces(tmp_path, 2)
    assert first.about["error"] == "WrongData: the third microbatch"
    assert "RankFailed" in last.about["error"]
    assert "the third microbatch" in last.about["error"]
    assert first.actions("compute")[-1] == ("F0.2", 1)
    assert last.rows["waits"][-1]["name"] == "waits for activations"


def test_one_rank_alone_writes_the_file_that_was_named(tmp_path: Path) -> None:
    with make(Case(stages=1)) as pipe:
        with pipe.trace(tmp_path / "empty.json"):
            pass
        with (
            pytest.raises(TraceFileError, match=r"no_folder.*give pipe.trace\(\) a path"),
            pipe.trace(tmp_path / "no_folder" / "step.json"),
        ):
            pass
    assert read(tmp_path / "empty.json").rows["compute"] == []
