"""Where weights have two versions a native optimizer makes the next one while the older one is computed with."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.stages import update
from support.pipeline import pipelines
from support.pipeline.pipelines import Case
from support.ranks import run_ranks

PATIENCE = 120.0


def in_time(pipe: Pipeline) -> Any:
    """A ``fn`` after which the next action finds the last step's gradients."""

    def loss_of(value: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        pipelines.wait_for_gradients(pipe)
        return pipelines.loss_of(value, microbatch)

    return loss_of


@pytest.mark.parametrize("budget", [None, 80_000])
@pytest.mark.parametrize("optimizer", ["native-adamw", "native-sgd"])
def test_one_rank_makes_its_updates_behind_the_whole_next_step(
    optimizer: str, budget: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each update waits for the last microbatch of the next step: it would wait in vain if that came after it.

    Hosts are not poisoned: the update reads them while the device computes (tests/pipeline/test_tier.py poisons them).
    """
    case = Case(schedule="2bw", stages=1, optimizer=optimizer, budget=budget, max_norm=0.5, steps=8, decays=True)
    seen = threading.Semaphore(0)
    found = []
    run = update._StepBehind._run

    def held(self: update._StepBehind, pool: _C.ThreadPool) -> None:
        found.append(seen.acquire(timeout=PATIENCE))
        run(self, pool)

    monkeypatch.setattr(update._StepBehind, "_run", held)
    stages = pipelines.make_stages(1)
    pipe = pipelines.pipeline_of(case, stages, poisons=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizers[0], 0.9)
    outputs = []
    with pipe.trace(tmp_path / "trace.json"):
        for step in range(case.steps):
            data = pipelines.data_of(case, step)

            def loss_of(value: Tensor, microbatch: dict[str, Tensor], data: Any = data, step: int = step) -> Tensor:
                if step > 0 and microbatch is data[-1]:
                    seen.release()
                return in_time(pipe)(value, microbatch)

            outputs.append(pipe.step(data, loss_of, max_norm=case.max_norm))
            scheduler.step()
        pipe.drain()
    report = pipe.report()
    pipe.close()
    assert report.device is None or report.device.windows > 0
    assert found == [True] * (case.steps - 1)  # nothing runs behind the last update, in the drain
    assert (report.updates, report.updates_behind) == (case.steps, case.steps - 1)
    assert f"{case.steps} updates, {case.steps - 1} of them behind" in str(report)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    behind = [event for event in events if rows.get(event.get("tid")) == "updates behind the computation"]
    assert [event["args"]["batch"] for event in behind if event["ph"] == "X"] == list(range(case.steps - 1))
    expected = pipelines.recurrence(case, 1)
    for output, losses in zip(outputs, expected.losses, strict=True):
        assert torch.equal(torch.stack(list(output.losses)), losses)
    for weight, wanted in zip(stages[0].parameters(), expected.weights[0], strict=True):
        assert torch.equal(weight, wanted)


def test_several_ranks_make_them_behind_as_well(tmp_path: Path) -> None:
    case = Case(schedule="2bw", stages=2, optimizer="native-adamw", steps=6, waits=True)
    cases = [dataclasses.replace(case, max_norm=norm) for norm in (None, 0.5)]
    for results in run_ranks(pipelines.train_all, cases, folder=tmp_path, size=2):
        assert [result["updates_behind"] for result in results] == [case.steps - 1 for case in cases]


class Watched(torch.optim.SGD):
    """Says in which thread it steps."""

    def step(self, closure: Any = None) -> None:
        assert threading.current_thread() is threading.main_thread()
        super().step(closure)


def watched(parameters: Any) -> torch.optim.Optimizer:
    return Watched(parameters, lr=0.05, momentum=0.9)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    """A hook after the step sees what the step has made."""
    optimizer = pipelines.native_sgd(parameters)

    def check(*_: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert all(state["momentum_buffer"].any() for state in optimizer.state.values())
        assert len(optimizer.state) == len(parameters)

    optimizer.register_step_post_hook(check)
    return optimizer


@pytest.mark.parametrize("make", [watched, hooked])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_other_optimizers_and_hooks_see_updates_where_they_always_did(make: Any, schedule: str) -> None:
    case = Case(schedule=schedule, stages=1, steps=4)
    with pipelines.pipeline_of(case, pipelines.make_stages(1), make) as pipe:
        for step in range(case.steps):
            pipe.step(pipelines.data_of(case, step), pipelines.loss_of)
        pipe.drain()
        report = pipe.report()
    assert (report.updates, report.updates_behind) == (case.steps, 0)


@pytest.mark.parametrize("native_stage", [0, 1])
def test_an_update_counts_as_behind_only_where_all_of_a_ranks_stages_were(native_stage: int) -> None:
    case = Case(schedule="2bw", stages=2, microbatches=2, steps=4)
    makes = [pipelines.native_sgd if stage == native_stage else pipelines.sgd for stage in range(2)]
    pipe = pipelines.pipeline_of(case, pipelines.make_stages(2), lambda parameters: makes.pop(0)(parameters))
    with pipe:
        for step in range(case.steps):
            pipe.step(pipelines.data_of(case, step), in_time(pipe))
    assert {each.stage for each in pipe._engine.executor.updates.behind} == {native_stage}
    assert (pipe.report().updates, pipe.report().updates_behind) == (case.steps, 0)


def test_an_update_that_fails_behind_is_an_error_of_the_step_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(schedule="2bw", stages=1, optimizer="native-adamw")
    pipe = pipelines.pipeline_of(case, pipelines.make_stages(1))
    for step in range(2):
        pipe.step(pipelines.data_of(case, step), pipelines.loss_of)

    def broken(self: update._StepBehind, pool: _C.ThreadPool) -> None:
        self._error = MemoryError("no room")

    monkeypatch.setattr(update._StepBehind, "_run", broken)
    pipe.step(pipelines.data_of(case, 2), in_time(pipe))
    with pytest.raises(MemoryError, match="no room"):
        pipe.step(pipelines.data_of(case, 3), pipelines.loss_of)
    pipe.close()
