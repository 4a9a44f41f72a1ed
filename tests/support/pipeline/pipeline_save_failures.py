"""Pipelines of two ranks whose saves and loads fail, and the errors on each rank."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import CheckpointError, HydraError
from hydra_ext.pipeline import Pipeline
from support.checkpoint.checkpoint_ranks import said
from support.checkpoint.faulty_files import CountingFiles, FailingFiles
from support.pipeline import pipelines
from support.pipeline.pipeline_failures import leave_record


def pipeline(schedule: str = "2bw", make: Any = pipelines.adamw, **options: Any) -> Pipeline:
    stages = pipelines.make_stages(2)
    return Pipeline(None, make, stages=stages, schedule=schedule, microbatches=2, seed=5, patience=4.0, **options)


def step(pipe: Pipeline, number: int) -> list[float]:
    data = [pipelines.make_microbatch(number, index) for index in range(2)]
    return [loss.item() for loss in pipe.step(data, pipelines.loss_of).losses]


def own(pipe: Pipeline) -> list[Tensor]:
    states = [state for each in pipe.optimizers for state in each.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in (*pipe.state_dict().values(), *moments)]


# ---- saves ----------------------------------------------------------------------------------------------------------
def failing_saves(rank: int, folder: Path, stride: int) -> dict[str, Any]:
    """Lets every ``stride``-th operation on files fail, one in each save, on rank 0 and then on rank 1.

    Returns:
        The errors in order, and the losses of the step after all failures.
    """
    heard = []
    with pipeline() as pipe:
        step(pipe, 0)
        pipe.save(folder)
        step(pipe, 1)
        count = FailingFiles(10**9, errno.EIO)
        pipe._checkpoint.files = count
        pipe.save(folder)
        for failing, operations in enumerate(pipe._checkpoint.together.do("to count", lambda: len(count.done))):
            for n in range(1, operations + 1, stride):
                pipe._checkpoint.files = FailingFiles(n, errno.ENOSPC) if rank == failing else CountingFiles()
                heard.append([failing, n, said(lambda: pipe.save(folder))])
        pipe._checkpoint.files = Files()
        losses = step(pipe, 2)
        pipe.save(folder)
    return {"heard": heard, "losses": losses}


class KillingFiles(Files):
    """Kills the process at the sync of its n-th file."""

    def __init__(self, n: int) -> None:
        self._left = n

    def sync(self, file: int) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync(file)


def killed_in_a_save(rank: int, victim: int, n: int, folder: Path) -> None:
    def body(_: dict[str, Any]) -> None:
        with pipeline() as pipe:
            step(pipe, 0)
            pipe.save(folder / "ckpt")
            step(pipe, 1)
            if rank == victim:
                pipe._checkpoint.files = KillingFiles(n)
            pipe.save(folder / "ckpt")

    leave_record(rank, folder, body)
    os._exit(0)


# ---- loads ----------------------------------------------------------------------------------------------------------
def fault(work: Callable[[], Any]) -> list[str | None]:
    try:
        work()
    except CheckpointError as error:
        return [type(error).__name__, error.file.name, error.tensor]
    return ["done", None, None]


def flip(checkpoint: Path, file: str, place: int) -> None:
    with (checkpoint / file).open("r+b") as opened:
        opened.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def damaged_loads(rank: int, folder: Path, places: list[tuple[str, int]]) -> dict[str, Any]:
    """Loads while one bit of the newest checkpoint is flipped, for each place in turn.

    Returns:
        The error of each load, whether it left the training unchanged, and the losses of the next steps, without and
        with these loads.
    """
    heard, unchanged, losses = [], [], []
    with pipeline() as pipe:
        for number in range(2):
            step(pipe, number)
            pipe.save(folder)
    for tries in (False, True):
        with pipeline() as pipe:
            step(pipe, 5)
            before = own(pipe)
            for file, place in places if tries else ():
                _flip_together(rank, pipe, folder / "step-00000002", file, place)
                heard.append(fault(lambda: pipe.load(folder)))
                unchanged.append(all(map(torch.equal, own(pipe), before)))
                _flip_together(rank, pipe, folder / "step-00000002", file, place)
            losses.append([step(pipe, 6), step(pipe, 7)])
            if tries:
                assert pipe.load(folder) is not None
    return {"heard": heard, "unchanged": unchanged, "losses": losses}


def saves_once(rank: int, folder: Path) -> None:
    with pipeline() as pipe:
        step(pipe, 0)
        pipe.save(folder)


def refused_loads(rank: int, folder: Path, forged: list[Path]) -> list[list[Any]]:
    """Returns the error of each load, and whether it left the training unchanged. Loads the true one at the end."""
    heard: list[list[Any]] = []
    with pipeline() as pipe:
        step(pipe, 5)
        before = own(pipe)
        for each in forged:
            found = fault(lambda each=each: pipe.load(each))
            heard.append([*found, all(map(torch.equal, own(pipe), before))])
        assert pipe.load(folder) is not None
    return heard


def _flip_together(rank: int, pipe: Pipeline, checkpoint: Path, file: str, place: int) -> None:
    pipe._checkpoint.together.do("to be here", lambda: None)
    if rank == 0:
        flip(checkpoint, file, place)
    pipe._checkpoint.together.do("to flip a bit", lambda: None)


# ---- refusals -------------------------------------------------------------------------------------------------------
def refusals(rank: int, folder: Path) -> list[str]:
    heard: list[str] = []

    def hear(work: Callable[[], Any]) -> None:
        try:
            work()
        except HydraError as error:
            heard.append(f"{type(error).__name__}: {error}")
        else:
            heard.append("done")

    model = nn.Sequential(*pipelines.make_stages(2))
    whole = Pipeline(model, pipelines.adamw)
    hear(lambda: whole.save(folder))
    hear(lambda: whole.load(folder))
    whole.close()
    with pipeline() as pipe:
        schedule = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizers[0], 0.5 + 0.1 * rank)
        hear(lambda: pipe.load(folder / "none"))
        step(pipe, 0)
        hear(lambda: pipe.save(folder, keep=0))
        hear(lambda: pipe.save(folder, extra=None if rank == 0 else {1}))
        hear(lambda: pipe.save(folder / str(rank)))
        hear(lambda: pipe.save(folder, schedule=schedule))
        parameter = next(iter(pipe.optimizers[0].param_groups[0]["params"]))
        parameter.grad = torch.full_like(parameter, float(rank))
        hear(lambda: pipe.save(folder))
        parameter.grad = None
        pipe.save(folder / "2bw")
    for make, kind in ((pipelines.adamw, "1f1b"), (pipelines.sgd, "2bw")):
        with pipeline(kind, make) as pipe:
            hear(lambda: pipe.load(folder / "2bw"))
            step(pipe, 0)
            pipe.save(folder / kind)
    with pipeline("2bw") as pipe:
        hear(lambda: pipe.load(folder / "1f1b"))
        hear(lambda: pipe.load(folder / "2bw", schedule=torch.optim.lr_scheduler.ExponentialLR(pipe.optimizers[0], 1)))

    def save_inside(output: Tensor, microbatch: Any) -> Tensor:
        pipe.save(folder)
        return pipelines.loss_of(output, microbatch)

    pipe = pipeline("2bw")
    hear(lambda: [pipe.step([pipelines.make_microbatch(0, 0)] * 2, save_inside).loss.item() for _ in range(2)])
    return heard
