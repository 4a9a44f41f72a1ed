"""An evaluation needs no more memory for many microbatches than for few."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.watch import Watch
from support.pipeline import pipeline_evaluations, pipelines
from support.pipeline.pipeline_evaluations import COUNT
from support.ranks import run_ranks


class Noted(pipelines.Layer):
    """Keeps what it knows of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.outputs.append(weakref.ref(output))
        return output


def test_an_evaluation_keeps_nothing_of_microbatches_that_a_stage_has_handed_on() -> None:
    first, last = pipelines.make_stages(2)
    noted = Noted()
    alive = []

    def fn(value: Tensor, microbatch: Any) -> Tensor:
        alive.append(sum(output() is not None for output in noted.outputs))
        return pipelines.loss_of(value, microbatch)

    stages = [nn.Sequential(first, noted), last]
    with Pipeline(None, pipelines.sgd, schedule="gpipe", microbatches=2, stages=stages) as pipe:
        losses = pipe.evaluate([pipelines.make_microbatch(0, index) for index in range(COUNT)], fn).losses
    assert len(noted.outputs) == len(losses) == COUNT
    assert alive == [0] * COUNT


def test_a_fast_stage_does_not_send_an_evaluation_ahead_of_a_slow_one(tmp_path: Path) -> None:
    (undelivered, losses), (_, same) = run_ranks(pipeline_evaluations.evaluate, folder=tmp_path)
    assert len(undelivered) == COUNT
    assert max(undelivered) <= 1
    assert losses == same


def test_the_other_ranks_are_told_of_an_error_in_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_value: Tensor, _microbatch: Any) -> Tensor:
        raise ArithmeticError("no loss")

    told: list[BaseException] = []
    monkeypatch.setattr(Watch, "fail_with", lambda _self, error: told.append(error))
    stages = pipelines.make_stages(1)
    with Pipeline(None, pipelines.sgd, schedule="1f1b", microbatches=1, stages=stages, seed=5) as pipe:
        with pytest.raises(ArithmeticError, match="no loss") as raised:
            pipe.evaluate([pipelines.make_microbatch(0, 0)], failing)
        assert told == [raised.value]
