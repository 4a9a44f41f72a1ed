"""Whole sweeps of small language models, undisturbed and under fire."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from hydra_ext.fleet import Fleet
from support.fleet import drives, language_models
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import driven, shoot, wait_for, workers

KILLS = 20


@pytest.mark.full
def test_twelve_language_models_on_two_devices(tmp_path: Path) -> None:
    """Three architectures with four rates: each has the bits of the model alone."""
    jobs = language_models.jobs()
    results = Fleet(tmp_path, devices=2, budget="1MiB").run(jobs)
    assert_as_alone(results, jobs)
    assert all(len(job.losses) == 30 for job in results.values())


@pytest.mark.full
def test_twenty_kills_at_random_times_change_no_number(tmp_path: Path) -> None:
    """Of workers, of whole gangs, and of the fleet's own process; each time the fleet goes on."""
    folder, chance, killed = tmp_path / "fleet", random.Random(1), list[str]()
    while len(killed) < KILLS:
        with driven(folder, "twelve_jobs") as driver:
            process = driver.pid
            wait_for(lambda process=process: bool(workers(process)), driver)  # type: ignore[misc]
            while len(killed) < KILLS and driver.poll() is None:
                time.sleep(chance.uniform(0.4, 1.2))  # until the next kill, whose moment is drawn
                what = chance.choice(("worker", "worker", "gang", "driver"))
                if shoot(process, what, chance):
                    killed.append(what)
                    if what == "driver":
                        break
            assert driver.poll() is None or what == "driver", "the fleet has ended before all kills"
    assert set(killed) == {"worker", "gang", "driver"}
    results = Fleet(folder).resume()
    assert_as_alone(results, drives.twelve_jobs())
    failures = [stretch.failure for job in results.values() for stretch in job.stretches if stretch.failure]
    assert len(failures) >= KILLS
