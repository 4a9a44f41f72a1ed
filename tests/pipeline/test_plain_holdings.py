"""What a rank holds of a model: nothing of others' parts stays in memory, or is given away as if it were there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.stages import splitting
from support.pipeline.pipelines import sgd
from support.ranks import run_ranks
from support.split.listed_models import LISTED, ByTuple, train_all
from support.split.split_models_own import Stack, text, text_loss

BATCH = text(torch.Generator().manual_seed(1))


@pytest.mark.full
def test_weights_in_lists_are_those_of_the_modules_and_others_are_given_back(tmp_path: Path) -> None:
    cases = [
        (name, schedule) for schedule in ("1f1b", "2bw") for name in LISTED if (name, schedule) != ("tuple", "2bw")
    ]
    expected: dict[str, torch.Tensor] = {}
    ranks = run_ranks(train_all, cases, folder=tmp_path)
    for rank, results in enumerate(ranks):
        for (name, schedule), found in zip(cases, results, strict=True):
            losses = expected.setdefault(schedule, found["losses"])  # of the model without lists
            assert torch.equal(found["losses"], losses), f"{name}, {schedule}, rank {rank}"
            assert found["undead"] == [], f"{name}, {schedule}, rank {rank}"
            whole = {n.partition(".down")[0] for n in found["states"]} & {f"layers.{i}" for i in range(4)}
            assert whole == {f"layers.{i}" for i in ((0, 1) if rank == 0 else (2, 3))}
            assert "" not in found["states"]
            assert "layers" not in found["states"]


def test_weights_in_a_tuple_cannot_have_versions() -> None:
    model = ByTuple()
    with (
        pytest.raises(UnsupportedModel, match=r"'layers.0.up.weight' is also in the tuple ByTuple.up.*make it a list"),
        Pipeline(model, sgd, schedule="2bw", stages=2, cuts=["layers.2"], microbatches=1) as pipe,
    ):
        pipe.prepare(BATCH, lambda batch: text_loss(model, batch))


def test_a_model_that_is_not_built_is_rehearsed_where_the_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hydra_ext.materialize(Stack)
    devices: list[Any] = []

    def noted(name: str) -> None:
        function = getattr(splitting, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            devices.append((name, kwargs["device"]))
            return function(*args, **kwargs)

        monkeypatch.setattr(splitting, name, call)

    noted("rehearse")
    noted("time_events")
    with Pipeline(model, sgd, schedule="1f1b", microbatches=1) as pipe:
        pipe.prepare(BATCH, lambda batch: text_loss(model, batch))
        assert devices == [(name, pipe._device) for name in ("rehearse", "time_events")]
