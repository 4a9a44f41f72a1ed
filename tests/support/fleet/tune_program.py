"""Two trials of Ray Tune, each a job; one of them is restored from its checkpoint. Prints their losses as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray import tune

from hydra_ext.fleet import Job
from hydra_ext.integrations.tune import trainable
from support.fleet import trainings

STEPS = 6


def make_job(configuration: Mapping[str, Any]) -> Job:
    torch.set_num_threads(1)
    return trainings.job("a", lr=configuration["lr"], steps=STEPS)


def main(folder: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    train = trainable(make_job, budget="1MiB", device="simulated", save_every=2)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([1e-2, 1e-3])},
        run_config=tune.RunConfig(storage_path=folder, name="sweep", verbose=0),
    )
    first = [(each.config["lr"], each.metrics["loss"], each.metrics["evaluation"]) for each in tuner.fit()]
    restored = tune.Tuner.restore(f"{folder}/sweep", trainable=train, restart_errored=True).get_results()
    kept = [each.checkpoint is not None and each.metrics["step"] == STEPS for each in restored]
    ray.shutdown()
    print(json.dumps({"first": first, "kept": kept}))


if __name__ == "__main__":
    main(sys.argv[1])
