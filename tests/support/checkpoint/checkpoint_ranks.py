"""The work of ranks in tests of checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hydra_ext
from hydra_ext.errors import HydraError
from support.checkpoint.checkpoints import STEPS, Job, Made, differences, offloaded
from support.checkpoint.faulty_files import FailingFiles

JOB = Job("images", "split", "cosine")


def said(work: Any) -> str:
    """Returns the error's name, and the rank that it names."""
    try:
        work()
    except HydraError as error:
        return f"{type(error).__name__} {getattr(error, 'rank', '')}".strip()
    return "done"


def resume(rank: int, folder: Path) -> list[str]:
    """Resumes a training in which each rank has its own statistics in buffers and its own random states."""
    made = JOB.make(rank)
    with offloaded(made):
        losses, expected = made.steps(STEPS), made.state()
    first = JOB.make(rank)
    with offloaded(first) as run:
        seen = first.steps(3)
        assert run.save(folder, schedule=first.schedule, extra=rank) == folder / "step-00000003"
    second = JOB.make(7 + rank)
    with offloaded(second) as run:
        second.steps(1)
        loaded = run.load(folder, schedule=second.schedule)
        assert loaded is not None
        assert (loaded.extra, run.steps) == (0, 3)
        seen += second.steps(STEPS - 3)
        found = second.state()
    return differences([*seen, found], [*losses, expected])


def own_buffers(rank: int, folder: Path) -> list[bool]:
    """Whether a buffer equals that of rank 0: in the run, and after a load by fewer ranks."""
    made = JOB.make(rank)
    with offloaded(made) as run:
        made.steps(1)
        run.save(folder, schedule=made.schedule)
        mean = made.model.body[1].running_mean.clone()
    other = JOB.make(5)
    with offloaded(other, process_group=False) as run:
        run.load(folder, schedule=other.schedule)
    return [bool((other.model.body[1].running_mean == mean).all())]


def failures(rank: int, folder: Path) -> list[str]:
    made = JOB.make(rank)
    heard = []
    with offloaded(made) as run:
        made.steps(1)
        heard.append(said(lambda: run.load(folder / "none", schedule=made.schedule)))
        run._checkpoint.files = FailingFiles(30, errno.EIO)
        heard.append(said(lambda: run.save(folder, schedule=made.schedule)))
        run._checkpoint.files = FailingFiles(10**9, errno.EIO)
        heard.append(said(lambda: run.save(folder, schedule=made.schedule, extra=None if rank == 0 else {1})))
        if rank == 1:
            next(made.model.head.parameters()).grad = made.model.head.weight.detach().clone()
            run._checkpoint.gradients_used = False
        heard.append(said(lambda: run.save(folder, schedule=made.schedule)))
        made.optimizer.zero_grad()
        heard.append(said(lambda: run.save(folder, schedule=made.schedule)))
        heard.append(said(lambda: run.load(folder, schedule=made.schedule if rank == 0 else None)))
        if rank == 1:
            run._checkpoint.files = FailingFiles(20, errno.EIO)
        heard.append(said(lambda: run.load(folder, schedule=made.schedule)))
        run._checkpoint.files = FailingFiles(10**9, errno.EIO)
        heard.append(said(lambda: run.load(folder, schedule=made.schedule)))
        made.steps(1)
    return heard


def apart(rank: int, folder: Path) -> str:
    """Gives each rank its own folder; only that of the first rank has a checkpoint."""
    made = JOB.make(rank)
    own = folder / str(rank)
    with offloaded(made) as run:
        made.steps(1)
        run.save(folder / "both", schedule=made.schedule)
        if rank == 0:
            shutil.copytree(folder / "both", own)
        else:
            own.mkdir()
        dist.barrier()
        try:
            run.load(own, schedule=made.schedule)
        except HydraError as error:
            return str(error)
    return "loaded"


def terminated(rank: int, folder: Path) -> list[Any]:
    """Terminates rank 1 only: first where its state cannot be captured, which both ranks hear."""
    made = JOB.make(rank)
    heard = None
    with offloaded(made) as run:
        run.save_on_sigterm(folder, schedule=made.schedule, extra=lambda: 1 // (1 - rank))
        made.steps(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            made.steps(1)
        except (HydraError, ZeroDivisionError) as error:
            heard = type(error).__name__
    return [heard, *_saved_by_a_signal(rank, folder)]


def _saved_by_a_signal(rank: int, folder: Path) -> list[Any]:
    made = JOB.make(rank)

    def train(run: hydra_ext.Run, made: Made) -> None:
        run.save_on_sigterm(folder, schedule=made.schedule, extra=lambda: rank)
        made.steps(2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        made.steps(3)

    code: Any = None
    try:
        with offloaded(made) as run:
            train(run, made)
    except SystemExit as error:
        code = error.code
    made = JOB.make(rank)
    with offloaded(made) as run:
        loaded = run.load(folder, schedule=made.schedule)
        return [code, loaded.step if loaded else None, loaded.extra if loaded else None]
