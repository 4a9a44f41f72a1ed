"""An interrupt that comes while a pipeline waits leaves the user's things as they are outside of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks import links
from hydra_ext.pipeline.stages import update
from hydra_ext.runtime import engine
from support.pipeline import pipelines
from support.pipeline.pipelines import Case


def test_an_interrupted_wait_for_an_update_leaves_the_users_own_parameters_and_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an error in ``fn`` finds it: with an update under way."""
    case = Case("2bw", stages=1, microbatches=2)
    stages = pipelines.make_stages(1)
    own = list(stages[0].parameters())
    pipe = Pipeline(None, pipelines.native_adamw, stages=stages, schedule="2bw", microbatches=2, seed=5)
    pipe.step(pipelines.data_of(case, 0), pipelines.loss_of)

    def interrupted(self: update.OptimizerStep) -> None:
        raise KeyboardInterrupt

    def fails(value: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        pipelines.wait_for_gradients(pipe)
        if pipelines.begun_updates(pipe):
            monkeypatch.setattr(update.OptimizerStep, "wait", interrupted)
            raise ValueError("the data are wrong")
        return pipelines.loss_of(value, microbatch)

    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        pipe.step(pipelines.data_of(case, 1), fails)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(found is wanted for found, wanted in zip(stages[0].parameters(), own, strict=True))
    pipe.close()


def test_an_interrupted_end_still_gives_back_what_was_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = pipelines.make_stages(1)
    pipe = Pipeline(None, pipelines.sgd, stages=stages, schedule="1f1b", microbatches=2, budget=80_000)
    pipe.step([pipelines.make_microbatch(0, index) for index in range(2)], pipelines.loss_of)
    weight = next(stages[0].parameters())
    assert engine.holds(weight)

    def interrupted(self: links.Links, timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(links.Links, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.close()
    assert not engine.holds(weight)
