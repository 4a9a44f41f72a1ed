"""A fleet's guide by Optuna: its samplers propose jobs, and its pruners stop them (ask and tell)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hydra_ext.errors import InvalidArgument, MissingDependency
from hydra_ext.fleet.guides import Guide
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.results import JobResult

_JOB = "hydra_ext job"  # attribute of a trial: the name of its job, by which a fleet that resumes finds it


class OptunaGuide(Guide):
    """Proposes jobs by a study, and tells it their losses and results.

    A trial's value is the job's evaluation, or its last loss without one; intermediate values are the losses. With a
    study that Optuna keeps (``storage=``) a fleet that resumes goes on with its trials.

    Args:
        study: Of ``optuna.create_study``, with its sampler and pruner, to be minimised.
        make_job: Makes a job from an ``optuna.Trial``, which suggests values; each job needs a name of its own.
        trials: Number of jobs in all.
        at_once: Number of jobs that are open at a time: as many as the fleet has devices, or a few more.

    Raises:
        MissingDependency: Optuna is not installed.
        InvalidArgument: A number is not positive, or the study is to be maximised.
    """

    def __init__(self, study: Any, make_job: Callable[[Any], Job], *, trials: int, at_once: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise MissingDependency("OptunaGuide needs Optuna: pip install optuna") from error
        for name, value in (("trials", trials), ("at_once", at_once)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name}={value!r}: give a whole number of at least 1")
        if study.direction != optuna.study.StudyDirection.MINIMIZE:
            raise InvalidArgument("the study maximises, and losses are to be small: create_study(direction='minimize')")
        self._states = optuna.trial.TrialState
        self._study = study
        self._make_job = make_job
        self._left = trials
        self._at_once = at_once
        self._trials: dict[str, Any] = {}
        self._pruned: set[str] = set()
        for past in study.get_trials(deepcopy=False):
            if _JOB in past.user_attrs:
                self._left -= 1
                if past.state == self._states.RUNNING:
                    self._trials[past.user_attrs[_JOB]] = optuna.trial.Trial(study, past._trial_id)

    def propose(self, running: int) -> Sequence[Job]:
        jobs: list[Job] = []
        while self._left > 0 and running + len(jobs) < self._at_once:
            trial = self._study.ask()
            job = self._make_job(trial)
            trial.set_user_attr(_JOB, job.name)
            self._trials[job.name] = trial
            self._left -= 1
            jobs.append(job)
        return jobs

    def stops(self, job: str, step: int, loss: float) -> bool:
        trial = self._trials.get(job)
        if trial is None:
            return False
        trial.report(loss, step)
        if not trial.should_prune():
            return False
        self._pruned.add(job)
        return True

    def ended(self, result: JobResult) -> None:
        trial = self._trials.pop(result.name, None)
        if trial is None:
            return
        value = result.evaluation if result.evaluation is not None else result.loss
        if result.is_done and value is not None:
            self._study.tell(trial, value)
        elif result.name in self._pruned:
            self._study.tell(trial, state=self._states.PRUNED)
        else:
            self._study.tell(trial, state=self._states.FAIL)
