"""Savers beside a reader: one that works between two operations of the reader's, and one in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import hydra_ext
from hydra_ext.checkpoint.files import Files
from support.faulty_files import CountingFiles

LIMIT_SECONDS = 60


class InterruptedFiles(CountingFiles):
    """Somebody works before the n-th operation, from 1; before each one if ``n`` is None."""

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


def numbered(number: int) -> nn.Module:
    """A model whose numbers say which save they are of."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def _save_until_told(folder: Path, told: Connection) -> None:
    """Steps stay 0: two names are used by turns."""
    model = numbered(0)
    with hydra_ext.offload(model, budget=2**20) as run:
        run._files = _Unsynced()
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
    """Saves often."""

    def sync(self, file: int) -> None:
        pass


@contextmanager
def saver(folder: Path) -> Iterator[None]:
    """A process that saves :func:`numbered` models into a folder, one after the other, and keeps one."""
    context = multiprocessing.get_context("forkserver")
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
