"""Writes and parses trace files of a pipeline's ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_ext.pipeline import Pipeline
from hydra_ext.schedule import Action, ActionKind
from support.pipeline import pipelines
from support.pipeline.pipeline_reports import make
from support.pipeline.pipelines import Case

Event = dict[str, Any]


def traced(rank: int, case: Case, path: Path) -> dict[str, Any]:
    """Makes two steps without a trace, then those of the case. Returns the reports before and after these."""
    with make(case) as pipe:
        for step in range(2):
            pipe.step(pipelines.data_of(case, step), pipelines.loss_of)
        pipe.drain()
        before = pipe.report().as_dict()
        with pipe.trace(path):
            for step in range(2, 2 + case.steps):
                pipe.step(pipelines.data_of(case, step), pipelines.loss_of, max_norm=case.max_norm)
            pipe.drain()
    return {"before": before, "after": pipe.report().as_dict()}


class WrongData(Exception):
    pass


def failing(rank: int, path: Path) -> str:
    """Fails on wrong data of the first rank, in the third microbatch of the second step."""

    case = Case(schedule="gpipe", stages=2)
    stages = pipelines.make_stages(case.stages)
    pipe = Pipeline(None, pipelines.adamw, stages=stages, schedule=case.schedule, microbatches=case.microbatches)
    calls = Counter[str]()

    def count(module: object, args: object) -> None:
        calls["forward"] += 1
        if rank == 0 and calls["forward"] == case.microbatches + 3:
            raise WrongData("the third microbatch")

    stages[rank].register_forward_pre_hook(count)
    try:
        with pipe, pipe.trace(path):
            for step in range(2):
                pipe.step(pipelines.data_of(case, step), pipelines.loss_of)
    except Exception as error:  # noqa: BLE001 - which it is, is the test's subject
        return type(error).__name__
    return ""


@dataclass
class RankTrace:
    """One rank's file: its metadata, and its events by row."""

    about: dict[str, Any]
    events: list[Event]
    rows: dict[str, list[Event]]

    def actions(self, row: str) -> list[tuple[str, int]]:
        """Returns the token and batch of each action, in order."""
        return [(event["name"], event["args"]["batch"]) for event in self.rows[row]]


def read(path: Path) -> RankTrace:
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    rows: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    return RankTrace(content["otherData"], events, rows)


def tokens(actions: list[Action], kinds: tuple[ActionKind, ...]) -> list[tuple[str, int]]:
    return [(action.token, action.batch) for action in actions if action.kind in kinds]
