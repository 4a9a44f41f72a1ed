"""Pipelines that end: late, without being closed, and with losses still under way."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hydra_ext.errors import RankFailed
from hydra_ext.pipeline import Pipeline, pipeline
from hydra_ext.pipeline.ranks.links import Inbox, Links
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.ranks.watch import Watch
from support.pipeline import pipelines
from support.pipeline.pipeline_failures import LIMIT_SECONDS, fail, leave_record

STEPS = 4


def _wait_for(folder: Path, *names: str, at_most: float = 30.0) -> bool:
    deadline = time.monotonic() + at_most
    while time.monotonic() < deadline:
        if all((folder / name).exists() for name in names):
            return True
        time.sleep(0.01)
    return False


def _train(pipe: Pipeline, steps: int = STEPS) -> list[Any]:
    data = [[pipelines.make_microbatch(step, index) for index in range(4)] for step in range(steps)]
    return [pipe.step(each, pipelines.loss_of) for each in data]


def losses_after_the_end(rank: int, folder: Path) -> tuple[list[bool], list[float]]:
    """Returns which losses were known when the pipeline had ended, and all losses.

    The last rank makes its last update while the others are already ending the pipeline.
    """

    class Late(torch.optim.SGD):
        updates = 0

        def step(self, closure: Any = None) -> Any:
            self.updates += 1
            if self.updates == STEPS:
                _wait_for(folder, "leaving-0", "leaving-1")
            return super().step(closure)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Late(parameters, lr=0.1) if rank == 2 else pipelines.sgd(parameters)

    with Pipeline(None, make, stages=pipelines.make_stages(3), schedule="1f1b", microbatches=4, seed=5) as pipe:
        outputs = _train(pipe)
        (folder / f"leaving-{rank}").touch()
    return [output.resolved for output in outputs], [output.loss.item() for output in outputs]


def close_late(rank: int, late: bool, folder: Path) -> list[torch.Tensor]:
    """Returns the weights after a training. With ``late``, the first rank closes its pipeline late.

    The others must wait for it. The time that a rank allows for last messages is 0 here, so none waits by the clock.
    """
    pipeline._LAST_MESSAGES = 0.0
    stages = pipelines.make_stages(3)
    pipe = Pipeline(None, pipelines.sgd, stages=stages, schedule="2bw", microbatches=4, seed=5)
    _train(pipe)
    if late and rank == 0:
        _wait_for(folder, "closed-1", "closed-2", at_most=1.0)
        (folder / "late").touch()
    pipe.close()
    if late:
        assert (folder / "late").exists(), "this rank has not waited for the first one"
    (folder / f"closed-{rank}").touch()
    return [parameter.detach().clone() for parameter in stages[rank].parameters()]


def close_alone(rank: int, how: str, folder: Path) -> None:
    """Records how two ranks end if the last one does not close the pipeline: it is killed, or Python exits there.

    If it is killed, the first rank knows of that before it closes.
    """

    def body(_: dict[str, Any]) -> None:
        pipe = Pipeline(
            None, pipelines.sgd, stages=pipelines.make_stages(3), schedule="1f1b", microbatches=4, seed=5, patience=4.0
        )
        _train(pipe)
        if rank == 2 and how == "kill":
            fail(how, folder)
        if rank == 2:
            (folder / "failed").write_text(repr(time.time()))
            atexit._run_exitfuncs()
        else:
            if rank == 0 and how == "kill":
                with pipe._watch.changed:
                    assert pipe._watch.changed.wait_for(lambda: pipe._watch.failure is not None, LIMIT_SECONDS)
            pipe.close()

    leave_record(rank, folder, body)
    os._exit(0)


def close_unused(rank: int) -> None:
    """Closes a pipeline before its first step."""
    Pipeline(nn.Linear(2, 2), pipelines.sgd).close()


def end_of_a_link(rank: int, expected: int) -> list[str]:
    """Returns what a link delivers if its receiver closes it before the sender puts two messages."""
    watch = Watch(rank, 2, "end of a link", patience=20.0, describe=lambda: "")
    end = Links(rank, torch.device("cpu"), watch).connect(0, 1, "test")
    taken = []
    if isinstance(end, Inbox):
        for _ in range(expected):
            end.expect()
        end.close(0.0)
    dist.barrier()
    if isinstance(end, Inbox):
        try:
            for _ in range(2):
                taken.append(str(end.take().tensors[0].item()))  # type: ignore[union-attr]
        except RankFailed as error:
            taken.append(str(error))
    elif end is not None:
        with suppress(RankFailed):  # the other rank may already have reported that the second one is missing
            for number in range(2):
                end.put(Message(0, number, 2, (torch.tensor(float(number)),)))
    dist.barrier()
    watch.end()
    return taken
