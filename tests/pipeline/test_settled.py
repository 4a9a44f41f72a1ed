"""What is settled when a pipeline begins, or while it has work under way, cannot be changed unseen."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext.errors import InvalidSchedule, StateError, UnsupportedModel
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.gradients import BatchGradients
from hydra_ext.schedule import Schedule
from support.pipeline import pipelines
from support.pipeline.pipelines import Case

HEAD = "hydra-schedule 1 stages=1 ranks=1 microbatches=2 versions="


def pipeline(schedule: Any, stages: list[nn.Module] | None = None) -> Pipeline:
    stages = stages or pipelines.make_stages(1)
    return Pipeline(None, pipelines.sgd, stages=stages, schedule=schedule, microbatches=2, seed=5)


@pytest.fixture
def closed() -> Iterator[Callable[[Pipeline], Pipeline]]:
    """Closes pipelines at the end, whatever the test has met."""
    with ExitStack() as stack:
        yield lambda pipe: stack.enter_context(closing(pipe))


def step(pipe: Pipeline, number: int, **options: Any) -> Any:
    data = [pipelines.make_microbatch(number, index) for index in range(2)]
    return pipe.step(data, pipelines.loss_of, **options)


# ---- schedules of users' own ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD + "delay-1\nrank 0: U0-2 F0.0 B0.0 R0-1 F0.1 B0.1", "gradients of the previous batch"),
        (HEAD + "flush\nrank 0: F0.0 B0.0 F0.1 R0 U0 B0.1", "the gradients are not complete"),
        (HEAD + "flush\nrank 0: F0.0 B0.0 F0.1 B0.1 R0", "put U of batch 0 before it"),
    ],
)
def test_a_schedule_that_would_give_other_numbers_is_refused(text: str, problem: str) -> None:
    schedule = Schedule.parse(text)
    with pytest.raises(InvalidSchedule, match=problem):
        schedule.verify()
    with pytest.raises(InvalidSchedule, match=problem):
        pipeline(schedule)


def test_losses_are_those_of_their_microbatches_in_whatever_order_they_are_computed() -> None:
    with pipeline("1f1b") as plain, pipeline(Schedule.parse(HEAD + "flush\nrank 0: F0.1 B0.1 F0.0 B0.0 R0 U0")) as own:
        expected, found = step(plain, 0), step(own, 0)
        assert torch.equal(torch.stack(found.losses), torch.stack(expected.losses))
        assert not torch.equal(*expected.losses)


# ---- what is trained ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("frozen_first", [True, False])
def test_what_is_trained_is_settled_at_the_beginning(schedule: str, frozen_first: bool, closed: Any) -> None:
    (stage,) = stages = pipelines.make_stages(1)
    changed = next(iter(stage.parameters()))
    changed.requires_grad_(not frozen_first)
    pipe = closed(pipeline(schedule, stages))
    step(pipe, 0)
    pipe.drain()
    before = changed.detach().clone()
    changed.requires_grad_(frozen_first)
    with pytest.raises(StateError, match="made trainable" if frozen_first else "was frozen"):
        step(pipe, 1)
    assert torch.equal(changed, before)


def test_hooks_that_come_later_are_refused_where_they_would_not_run(closed: Any) -> None:
    (stage,) = stages = pipelines.make_stages(1)
    pipe = closed(pipeline("2bw", stages))
    step(pipe, 0)
    next(iter(stage.parameters())).register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UnsupportedModel, match="hooks"):
        step(pipe, 1)


# ---- weights --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drained", [True, False])
def test_weights_are_taken_over_when_nothing_is_under_way(drained: bool, closed: Any) -> None:
    (stage,) = stages = pipelines.make_stages(1)
    pipe = closed(pipeline("2bw", stages))
    step(pipe, 0)
    step(pipe, 1)
    if drained:
        pipe.drain()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    if not drained:
        with pytest.raises(StateError, match=r"batch 0 is under way: call drain\(\)"):
            pipe.refresh()
        return
    pipe.refresh()
    losses = torch.stack(step(pipe, 2).losses)
    assert torch.allclose(losses, torch.tensor(float(pipelines.CLASSES)).log())


# ---- updates --------------------------------------------------------------------------------------------------------
def spoiled(pipe: Pipeline, number: int) -> Any:
    case = Case(microbatches=2, spoils=(0, number))
    return pipe.step(pipelines.data_of(case, number), pipelines.loss_of, max_norm=1.0)


def test_an_update_that_is_skipped_in_a_drain_is_told_of_by_the_next_step() -> None:
    with pipeline("2bw") as pipe:
        outputs = [step(pipe, 0, max_norm=1.0), spoiled(pipe, 1)]
        pipe.drain()
        outputs += [step(pipe, number, max_norm=1.0) for number in (2, 3, 4)]
    assert [output.skipped for output in outputs] == [False, False, True, False, False]
    assert outputs[2].grad_norm.isnan()
    assert outputs[3].grad_norm is None
    assert outputs[4].grad_norm.isfinite()


def test_an_update_that_is_skipped_at_the_end_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipeline("2bw")
    spoiled(pipe, 0)
    with caplog.at_level(logging.WARNING, logger="hydra_ext"):
        pipe.close()
    assert "the update of batch 0 was skipped: its gradients' norm is nan" in caplog.text


@pytest.mark.parametrize(
    ("norm", "skipped"), [(None, False), (0.0, False), (1e30, False), (math.inf, True), (math.nan, True)]
)
def test_an_update_whose_norm_is_no_finite_number_is_skipped(norm: float | None, skipped: bool) -> None:
    assert BatchGradients(0, [], max_norm=1.0, norm=norm).skipped == skipped
