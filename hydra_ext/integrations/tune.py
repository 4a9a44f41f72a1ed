"""A job as a trainable of Ray Tune, whose schedulers and searches then decide which jobs go on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra_ext.errors import MissingDependency
from hydra_ext.fleet.devices import choose
from hydra_ext.fleet.job import Job, seed_of
from hydra_ext.fleet.techniques import Gang, technique_named
from hydra_ext.fleet.techniques.building import Batches, seed_everything
from hydra_ext.policy import SimulatedDevice


def trainable(
    make_job: Callable[[Mapping[str, Any]], Job],
    *,
    budget: int | str = "auto",
    device: SimulatedDevice | str | None = None,
    technique: str = "offload",
    save_every: int = 100,
) -> Callable[[dict[str, Any]], None]:
    """A function for ``ray.tune.Tuner`` that trains a job on one device.

    It reports ``loss`` and ``step`` after every step, and ``evaluation`` after the last one. Checkpoints are those of
    ``run.save``; a trial that Tune restores, pauses or clones goes on from one.

    Args:
        make_job: Makes the job from a configuration.
        budget: Device bytes.
        device: By default the GPU that Ray has given the trial, or a simulated device without one.
        technique: A technique for one device.
        save_every: Steps between checkpoints.

    Raises:
        MissingDependency: Ray Tune is not installed.
    """
    try:
        from ray import tune
    except ImportError as error:
        raise MissingDependency("trainable() needs Ray Tune: pip install 'ray[tune]'") from error

    def train(configuration: dict[str, Any]) -> None:
        job = make_job(configuration)
        chosen = choose(None if device is None else [device], budget)[:1]
        opener = technique_named(technique)
        gang = Gang(device=chosen[0], rank=0, ranks=1)
        with opener.open(job, gang, opener.search(job, chosen)) as session:
            step, given = 0, tune.get_checkpoint()
            if given is not None:
                with given.as_directory() as folder:
                    found = session.load(Path(folder))
                step = 0 if found is None else int(found[1]["step"])
            batches = Batches(job)
            while step < job.steps:
                microbatches = batches.of_step(step)
                loss = session.step(microbatches, job.seeds(step, len(microbatches)))
                step += 1
                told: dict[str, Any] = {"loss": loss, "step": step}
                if step == job.steps and job.evaluate is not None:
                    seed_everything(seed_of(job.seed, "evaluation"))
                    told["evaluation"] = session.evaluate(list(job.evaluate()))
                if step % save_every and step < job.steps:
                    tune.report(told)
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    session.save(Path(folder), {"step": step})
                    tune.report(told, checkpoint=tune.Checkpoint.from_directory(folder))

    return train
