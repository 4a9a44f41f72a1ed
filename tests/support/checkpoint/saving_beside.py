"""Savers beside a reader: one works between two operations of the reader, one in a separate process."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hydra_ext
from hydra_ext.checkpoint.folder import Folder
from hydra_ext.checkpoint.format.files import Files
from support import forks
from support.checkpoint import damaged
from support.checkpoint.faulty_files import CountingFiles
from support.pipeline.pipeline_save_failures import own, pipeline, step

LIMIT_SECONDS = 300
NEVER = 10**9


class InterruptedFiles(CountingFiles):
    """Lets another saver work before the n-th operation, from 1, or before each one if ``n`` is None."""

    def __init__(self, n: int | None, work: Callable[[], object]) -> None:
        super().__init__()
        self._n = n
        self._work = work

    @property
    def interrupted(self) -> bool:
        return self._n is None or len(self.done) >= self._n

    def before(self, name: str) -> int | None:
        if self._n is None or len(self.done) == self._n:
            self._work()
        return None


# ---- pipelines ------------------------------------------------------------------------------------------------------
def rotate(folder: Path, spares: Path) -> None:
    """Changes a folder as a save with ``keep=1`` does, with the checkpoints in ``spares`` in turn."""
    there = sorted(each.name for each in folder.iterdir())
    number = int(there[-1].removeprefix("step-")) + 1 if there else 1
    sources = sorted(spares.glob("*/step-*"))
    made = folder / f"step-{number:08}"
    copied = Path(shutil.copytree(sources[number % len(sources)], spares / "copy"))
    damaged.top(serial=number, older=there)(copied)
    copied.rename(made)
    files = CountingFiles()
    descriptor = files.open_folder(folder)
    for name in there:
        Folder(folder, files, descriptor).discard(name)
    files.close(descriptor)


def rotated_loads(rank: int, folder: Path, stride: int) -> list[list[Any]]:
    """Loads repeatedly, with a save before every ``stride``-th operation on files.

    Returns:
        The rank, the operation, and the loaded checkpoint, or False for an incomplete one.
    """
    heard, states = [], {}
    checkpoints, spares = folder / "ckpt", folder / "spares"
    with pipeline() as pipe:
        for number, name in enumerate("ab"):
            step(pipe, number)
            pipe.save(spares / name, extra=name)
            states[name] = own(pipe)
        if rank == 0:
            checkpoints.mkdir()
            rotate(checkpoints, spares)
        for strict, interrupted in itertools.product((True, False), (0, 1)):
            for n in itertools.count(1, stride):
                work = partial(rotate, checkpoints, spares)
                pipe._checkpoint.files = files = InterruptedFiles(n if rank == interrupted else NEVER, work)
                pipe._checkpoint.together.do("to be here", lambda: None)
                loaded = pipe.load(checkpoints, strict=strict)
                whole = loaded is not None and all(map(torch.equal, own(pipe), states[loaded.extra]))
                heard.append([interrupted, n, loaded is not None and whole and loaded.path.name])
                if not any(pipe._checkpoint.together.do("to go on", lambda files=files: files.interrupted)):
                    break
    return heard


# ---- another process ------------------------------------------------------------------------------------------------
def numbered(number: int) -> nn.Module:
    """Makes a model whose numbers identify its save."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def _save_until_told(folder: Path, told: Connection) -> None:
    """Saves until told to stop. Steps stay 0, so two names are used in turn."""
    model = numbered(0)
    with hydra_ext.offload(model, budget=2**20) as run:
        run._checkpoint.files = _Unsynced()
        number = 0
        while number < 2 or not told.poll():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(number)
            run.save(folder, extra=number, keep=1)
            if number == 1:
                told.send("begun")
            number += 1
    told.send(number)


class _Unsynced(Files):
    """Files without syncs, so that saves are frequent."""

    def sync(self, file: int) -> None:
        pass


@contextmanager
def saver(folder: Path) -> Iterator[None]:
    """Starts a process that saves :func:`numbered` models into a folder, one after the other, and keeps one."""
    context = forks.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_save_until_told, args=(folder, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(LIMIT_SECONDS), "the saver has not begun"
        assert ours.recv() == "begun"
        yield
        ours.send("end")
        assert ours.poll(LIMIT_SECONDS), "the saver has not ended"
    finally:
        process.kill()
        process.join()
