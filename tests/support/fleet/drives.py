"""Fleets in processes of their own, which can be killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.fleet import Fleet, Job
from hydra_ext.fleet.cluster.progress import ProgressReader
from hydra_ext.policy import SimulatedDevice
from support.fleet import trainings

PATIENCE = 60.0
_LOOK = 0.02


def slowly(model: nn.Module, microbatch: tuple[Tensor, Tensor], *, seconds: float) -> Tensor:
    """The loss, after a time that makes steps last: a fleet has to be caught while it runs."""
    time.sleep(seconds)
    return trainings.loss(model, microbatch)


SLOW = partial(slowly, seconds=0.02)


def two_jobs() -> list[Job]:
    return [
        trainings.job("parent", steps=30, schedule=None, max_norm=None, loss=SLOW),
        trainings.job("other", steps=100, loss=SLOW),
    ]


def three_jobs() -> list[Job]:
    steps = {"short": 4, "long": 50, "other": 10}
    return [trainings.job(name, loss=SLOW, steps=count) for name, count in steps.items()]


def long_jobs() -> list[Job]:
    return [trainings.job(f"long-{i}", loss=SLOW, steps=200, seed=i) for i in range(3)]


def twelve_jobs() -> list[Job]:
    slow = partial(slowly, seconds=0.01)
    return [trainings.job(f"job-{i}", loss=slow, steps=60 + 5 * i, seed=i, lr=1e-3 * (i + 1)) for i in range(12)]


# Jobs that gain if they share this device, also where other programs make them slow.
SLOW_LINK = SimulatedDevice(to_device_bytes_per_second=1e6, to_host_bytes_per_second=1e6)


def link_bound(name: str, *, lr: float = 1e-2, steps: int = 8, **options: Any) -> Job:
    """A job whose weights take most of a step on the slow link."""
    data = partial(trainings.batches, width=96)
    options = {"model": partial(trainings.layered, width=96), "data": data, "evaluate": None} | options
    return trainings.job(name, lr=lr, steps=steps, **options)


def compute_bound(name: str, *, steps: int = 8, **options: Any) -> Job:
    """A job whose loss takes most of a step."""
    return trainings.job(name, steps=steps, **{"loss": partial(slowly, seconds=0.05)} | options)


def shared_jobs() -> list[Job]:
    return [link_bound("link", steps=12, exact=False), compute_bound("compute", steps=12, exact=False)]


def adapter_jobs() -> list[Job]:
    model = partial(trainings.adapted, width=64)
    data = partial(trainings.batches, width=64)
    return [
        trainings.job(
            f"adapter-{i}", model=model, data=data, loss=SLOW, steps=30, evaluate=None, lr=1e-2 / 2**i, exact=False
        )
        for i in range(3)
    ]


TECHNIQUES = {"shared_jobs": "shared offload", "adapter_jobs": "common base"}


def run(folder: str, jobs: str) -> None:
    """What the process does: it begins, or goes on."""
    torch.set_num_threads(1)
    if (Path(folder) / "journal.jsonl").exists():
        Fleet(folder).resume()
    elif jobs in TECHNIQUES:
        budget = "512KiB" if jobs == "shared_jobs" else "96KiB"
        Fleet(folder, devices=[SLOW_LINK], budget=budget).run(
            globals()[jobs](), techniques=[TECHNIQUES[jobs]], interval=0.1
        )
    else:
        Fleet(folder, devices=2, budget="1MiB").run(globals()[jobs](), techniques=["plain"], interval=0.1)


@contextmanager
def driven(folder: Path, jobs: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs jobs of this module; it is killed at the end."""
    program = f"from support.fleet import drives; drives.run({str(folder)!r}, {jobs!r})"
    places = os.pathsep.join(each for each in sys.path if each)
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": places}) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    """Waits for something that a fleet in another process does."""

    def looked() -> bool:
        assert process.poll() is None, "the fleet's process has ended"
        return condition()

    wait_until(looked)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(_LOOK)


def children(process: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers(driver: int) -> list[int]:
    """The processes that train, of a process that runs a fleet."""
    return [worker for zygote in children(driver) for worker in children(zygote)]


def shoot(driver: int, what: str, chance: random.Random) -> bool:
    """Kills one worker, all workers, or the process that runs the fleet. Returns False if there was none."""
    aims = [driver] if what == "driver" else workers(driver)
    for aim in aims if what == "gang" else [chance.choice(aims)] if aims else []:
        try:
            os.kill(aim, signal.SIGKILL)
        except ProcessLookupError:
            return False
    return bool(aims)


def events(job: Path) -> set[str]:
    return {record["event"] for record in ProgressReader(job / "progress.jsonl").read()}
