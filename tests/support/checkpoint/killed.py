"""A training in a separate process, which kills itself at a given moment, and its outcome."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydra_ext
from hydra_ext import Checks
from hydra_ext.checkpoint.format.tensors import bytes_of
from hydra_ext.runtime.reporting.report import Report
from support import forks
from support.checkpoint.checkpoints import Job, Made
from support.checkpoint.faulty_files import CountingFiles

JOB = Job("gpt2", "split", "cycle", torch.bfloat16)
STEPS = 6
EVERY = 2  # steps a save
LEAVES_NAMES = 9
LIMIT_SECONDS = 120.0
TIERS: dict[str, dict[str, int]] = {  # the homes of blocks: budgets of the device and of the host
    "device": {"budget": 2**22},
    "host": {"budget": 900_000},
    "state on disk": {"budget": 900_000, "host_budget": 1_600_000},
    "all on disk": {"budget": 900_000, "host_budget": 1_130_000},
}


class Moments:
    """Counts moments, and ends the process at one of them.

    Attributes:
        count: The number of moments so far.
    """

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self._last = last

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self.count == self._last:
            if _shares_names():
                os._exit(LEAVES_NAMES)
            os.kill(os.getpid(), signal.SIGKILL)


def _shares_names() -> bool:
    """Whether this process uses named shared memory, which would stay after its end."""
    opened = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
    return "/dev/shm/" in "".join(opened) + Path("/proc/self/maps").read_text()


class MomentousFiles(CountingFiles):
    """Makes a moment of each operation, and of each piece of a write."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self._moments = moments

    def before(self, name: str) -> int | None:
        self._moments()
        return 20_000


def digest(value: Any) -> str:
    summed = hashlib.sha256()
    _feed(summed, value)
    return summed.hexdigest()


def _feed(summed: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        summed.update(f"{value.dtype}{value.shape}".encode())
        summed.update(bytes_of(value))
    elif isinstance(value, dict):
        for key in value:
            summed.update(repr(key).encode())
            _feed(summed, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _feed(summed, each)
    else:
        summed.update(repr(value).encode())


def train(folder: Path, tier: str, last: int | None) -> tuple[str, int, set[str]]:
    """Trains from the newest checkpoint to the end.

    Returns:
        The digest of all state, the number of moments, and the tiers of blocks after steps.
    """
    torch.set_num_threads(1)
    moments = Moments(last)
    made: Made = JOB.make(0)
    with _offloaded(made, tier, folder) as run:
        run._checkpoint.files = MomentousFiles(moments)
        run.load(folder, schedule=made.schedule)
        for module in made.model.modules():
            module.register_forward_hook(moments)
        for parameter in made.model.parameters():
            parameter.register_hook(moments)
        made.optimizer.register_step_pre_hook(moments)
        made.optimizer.register_step_post_hook(moments)
        tiers = set()
        while run.steps < STEPS:
            made.step()
            moments()
            tiers.add(_tier_of(run.report()))
            if run.steps % EVERY == 0:
                run.save(folder, schedule=made.schedule)
        return digest(made.state()), moments.count, tiers


def _offloaded(made: Made, tier: str, folder: Path) -> hydra_ext.offload:
    options: dict[str, Any] = dict(TIERS[tier])
    if "host_budget" in options:
        options["spill_dir"] = spill_dir(folder)
    return hydra_ext.offload(made.model, made.optimizer, checks=Checks(poison_hosts=True), **options)


def spill_dir(folder: Path) -> Path:
    """Returns the spill folder of runs with these checkpoints."""
    return folder.parent / "spill"


def _tier_of(report: Report) -> str:
    """Returns the tier of the blocks."""
    if report.disk_weight_bytes:
        return "all on disk"
    if report.disk_written_bytes:
        return "state on disk"
    return "device" if report.homes else "host"


def plain() -> str:
    made = JOB.make(0)
    made.steps(STEPS)
    return digest(made.state())


def in_a_process(folder: Path, tier: str, last: int | None) -> tuple[int, str]:
    """Runs :func:`train` in a process. Returns the exit code, and the digest if it finished."""
    result = folder.parent / f"{folder.name}.digest"
    result.unlink(missing_ok=True)
    process = forks.context().Process(target=_run, args=(folder, tier, last, result))
    process.start()
    process.join(LIMIT_SECONDS)
    alive = process.is_alive()
    process.kill()
    process.join()
    assert not alive, f"not done after {LIMIT_SECONDS} s"
    return process.exitcode or 0, result.read_text() if result.exists() else ""


def _run(folder: Path, tier: str, last: int | None, result: Path) -> None:
    result.write_text(train(folder, tier, last)[0])
