"""Ranks whose blocks are at home on the device, and leave it in the middle of a reduction."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import hydra_ext
from hydra_ext import Checks
from hydra_ext.runtime.averaging import Averaging
from support.replicas.replicated import Job, Recorder, Seen, take_any_step, values_of


class Quiet(Recorder):
    """Reads no state between steps, which would bring all blocks to the host."""

    def note_gradients(self) -> None:
        pass


def leave_after(moment: str) -> Any:
    """Brings a block from the device to the host when this method of Averaging has processed it."""
    plain = getattr(Averaging, moment)

    def call(self: Averaging, block: int, *shares: Any) -> Any:
        result = plain(self, block, *shares)
        self._core.moves.bring_home(block)
        return result

    return mock.patch.object(Averaging, moment, call)


def train_at_home(rank: int, job: Job, moment: str | None) -> Seen:
    model, optimizer = job.make(rank)
    recorder = Quiet(model, optimizer)
    with ExitStack() as stack:
        run = stack.enter_context(
            hydra_ext.offload(model, optimizer, budget=2**30, checks=Checks(poison_hosts=moment is None))
        )
        if moment is not None:
            stack.enter_context(leave_after(moment))
        for step in range(job.steps):
            take_any_step(run, job, rank, step, recorder)
        recorder.seen["report"] = run.report().as_dict()
        recorder.seen["settled"] = run.core.homes.statistics.settled
        recorder.seen["returned"] = run.core.homes.statistics.returned
    recorder.seen["parameters"] = [values_of(list(model.parameters()))]
    return recorder.end()
