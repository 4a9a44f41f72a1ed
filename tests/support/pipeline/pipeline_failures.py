"""A rank of a pipeline that fails, and the reactions of the others."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hydra_ext.errors import RankFailed
from hydra_ext.pipeline import Pipeline
from support import forks, ranks
from support.pipeline import pipelines

LIMIT_SECONDS = 30.0  # from the failure to the end of every rank


@dataclass(frozen=True)
class Failing:
    """A failure and its place.

    Attributes:
        how: "kill", "raise", "stop", "interrupt" or "leave".
        backward: Whether it fails in the backward rather than in the forward.
        replicas: Number of replicas; the last one has the stage that fails.
    """

    how: str
    stage: int
    step: int
    microbatch: int
    backward: bool = False
    schedule: str = "2bw"
    stages: int = 3
    patience: float = 20.0
    replicas: int = 1


class Trap(nn.Module):
    """Counts calls, and fails at one of them."""

    def __init__(self, module: nn.Module, failing: Failing, microbatches: int, folder: Path) -> None:
        super().__init__()
        self.module = module
        self._failing = failing
        self._folder = folder
        self._at = failing.step * microbatches + failing.microbatch
        self._calls = 0

    def forward(self, x: Any) -> Any:
        here = self._calls == self._at
        self._calls += 1
        if here and not self._failing.backward:
            fail(self._failing.how, self._folder)
        y = self.module(x)
        if here:
            y.register_hook(lambda _: fail(self._failing.how, self._folder))
        return y


def fail(how: str, folder: Path) -> None:
    """Fails, and leaves a record of the time."""
    (folder / "failed").write_text(repr(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "leave":
        os._exit(0)
    raise ValueError("the data are wrong")


def train(rank: int, failing: Failing, folder: Path) -> None:
    """Trains, and writes the rank's final error and its time."""
    stages = pipelines.make_stages(failing.stages)
    if rank % failing.replicas == failing.replicas - 1:
        stages[failing.stage] = Trap(stages[failing.stage], failing, 4, folder)

    def body(record: dict[str, Any]) -> None:
        pipe = Pipeline(
            None,
            pipelines.adamw,
            stages=stages,
            schedule=failing.schedule,
            microbatches=4,
            seed=5,
            patience=failing.patience,
            replicas=failing.replicas,
        )
        with pipe:
            for step in range(6):
                data = [pipelines.make_microbatch(step, index) for index in range(4)]
                record["loss"] = pipe.step(data, pipelines.loss_of).loss.item()

    leave_record(rank, folder, body)
    os._exit(0)


def left_behind() -> dict[str, Any]:
    """Returns threads and process groups of pipelines in this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hydra_ext")]
    return {"threads": threads, "groups": len(dist.distributed_c10d._world.pg_map) - 1}


def train_after_failures(rank: int) -> tuple[list[dict[str, Any]], list[str], list[float]]:
    """Runs two pipelines that fail on the last rank, and one that does not.

    Returns:
        Threads and groups that each has left, the errors of the first two, and the losses of the third.
    """
    left, errors = [], []
    for failing in (True, True, False):
        calls = []

        def fn(value: Any, microbatch: Any, failing: bool = failing, calls: list[Any] = calls) -> Any:
            calls.append(microbatch)
            if failing and len(calls) == 6:
                raise ValueError("the data are wrong")
            return pipelines.loss_of(value, microbatch)

        losses = []
        stages = pipelines.make_stages(2)
        try:
            with Pipeline(None, pipelines.sgd, stages=stages, schedule="1f1b", microbatches=4, seed=5) as pipe:
                for step in range(3):
                    data = [pipelines.make_microbatch(step, index) for index in range(4)]
                    losses.append(pipe.step(data, fn, max_norm=1.0).loss.item())
        except (RankFailed, ValueError) as error:
            errors.append(str(error))
        left.append(left_behind())
        dist.barrier()
    return left, errors, losses


def leave_record(rank: int, folder: Path, body: Callable[[dict[str, Any]], None]) -> None:
    """Writes a record of a rank's final error and its time."""
    record: dict[str, Any] = {"error": "", "kind": ""}
    try:
        body(record)
    except BaseException as error:  # noqa: BLE001 - what it is, is the test's subject
        record["error"], record["kind"] = str(error), type(error).__name__
    record["at"] = time.time()
    record["left"] = left_behind()
    (folder / f"{rank}.ended").write_text(json.dumps(record))


def run_to_the_end(
    body: Callable[..., None],
    *arguments: Any,
    folder: Path,
    size: int,
    without: Collection[int] = (),
    backend: str = "gloo",
) -> dict[int, dict[str, Any]]:
    """Runs ``body(rank, *arguments)`` in each rank, and returns the records. Does not wait for ranks in ``without``."""
    processes = [
        forks.context().Process(target=ranks._run, args=(body, arguments, rank, size, folder, backend), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 300.0  # ranks that hang fail; the start takes long on a busy machine
    others = [process for rank, process in enumerate(processes) if rank not in without]
    for process in others:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [process.pid for process in others if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hanging
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.ended")}


def seconds_after_the_failure(ended: dict[int, dict[str, Any]], folder: Path, survivors: Collection[int]) -> float:
    """Returns the seconds until the last survivor has ended."""
    return max(ended[rank]["at"] for rank in survivors) - float((folder / "failed").read_text())
