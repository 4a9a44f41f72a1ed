"""Optuna's studies as guides of fleets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from hydra_ext.errors import InvalidArgument
from hydra_ext.fleet import Fleet, Job, Outcome
from hydra_ext.integrations.optuna_guide import OptunaGuide
from support.fleet import trainings
from support.fleet.comparison import assert_as_alone

TRIALS, STEPS = 5, 9


def make_job(trial: Any) -> Job:
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    optimizer = partial(torch.optim.AdamW, lr=rate)
    return trainings.job(f"trial-{trial.number}", optimizer=optimizer, steps=STEPS, evaluate=None)


def make_study() -> optuna.Study:
    return optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.PercentilePruner(50.0, n_startup_trials=1, n_warmup_steps=3),
    )


def test_a_study_proposes_jobs_and_prunes_them(tmp_path: Path) -> None:
    study = make_study()
    guide = OptunaGuide(study, make_job, trials=TRIALS, at_once=2)
    results = Fleet(tmp_path, devices=2, budget="1MiB").run([], techniques=["plain"], guide=guide)
    states = [trial.state.name for trial in study.trials]
    assert len(states) == TRIALS
    assert set(states) <= {"COMPLETE", "PRUNED"}
    assert states.count("COMPLETE") >= 1
    for trial in study.trials:
        job = results[f"trial-{trial.number}"]
        assert job.outcome is (Outcome.DONE if trial.state.name == "COMPLETE" else Outcome.STOPPED)
        assert trial.intermediate_values == dict(job.losses)
        if trial.state.name == "COMPLETE":
            assert trial.value == job.loss
            assert_as_alone(results, [make_job(optuna.trial.FixedTrial(trial.params, trial.number))])


def test_a_study_goes_on_with_the_trials_that_were_open() -> None:
    study = make_study()
    first = OptunaGuide(study, make_job, trials=TRIALS, at_once=2)
    names = [job.name for job in first.propose(0)]
    assert first.propose(2) == []
    again = OptunaGuide(study, make_job, trials=TRIALS, at_once=9)
    again.stops(names[1], 1, 0.5)
    assert [trial.intermediate_values for trial in study.trials] == [{}, {1: 0.5}]
    assert len(again.propose(2)) == TRIALS - 2


def test_arguments_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="trials=0: give a whole number"):
        OptunaGuide(make_study(), make_job, trials=0, at_once=1)
    with pytest.raises(InvalidArgument, match="the study maximises"):
        OptunaGuide(optuna.create_study(direction="maximize"), make_job, trials=1, at_once=1)
