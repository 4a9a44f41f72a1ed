"""Ranks of a pipeline of which one fails, and what the others make of it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hydra_ext.pipeline import Pipeline
from support import pipelines


@dataclass(frozen=True)
class Failing:
    """What goes wrong where.

    Attributes:
        how: "kill", "raise", "stop", "interrupt" or "leave".
        backward: in the backward, else in the forward.
    """

    how: str
    stage: int
    step: int
    microbatch: int
    backward: bool = False
    schedule: str = "2bw"
    stages: int = 3
    patience: float = 20.0


class Trap(nn.Module):
    """Counts calls, and fails at one of them."""

    def __init__(self, module: nn.Module, failing: Failing, microbatches: int) -> None:
        super().__init__()
        self.module = module
        self._failing = failing
        self._at = failing.step * microbatches + failing.microbatch
        self._calls = 0

    def forward(self, x: Any) -> Any:
        here = self._calls == self._at
        self._calls += 1
        if here and not self._failing.backward:
            fail(self._failing)
        y = self.module(x)
        if here:
            y.register_hook(lambda _: fail(self._failing))
        return y


def fail(failing: Failing) -> None:
    if failing.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if failing.how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if failing.how == "interrupt":
        raise KeyboardInterrupt
    if failing.how == "leave":
        os._exit(0)
    raise ValueError("the data are wrong")


def train(rank: int, failing: Failing, folder: Path) -> None:
    """Writes the error it ended with, and when."""
    stages = pipelines.make_stages(failing.stages)
    stages[failing.stage] = Trap(stages[failing.stage], failing, 4)
    record: dict[str, Any] = {"error": "", "kind": ""}
    try:
        pipe = Pipeline(
            None,
            pipelines.adamw,
            stages=stages,
            schedule=failing.schedule,
            microbatches=4,
            seed=5,
            patience=failing.patience,
        )
        with pipe:
            for step in range(6):
                data = [pipelines.make_microbatch(step, index) for index in range(4)]
                record["loss"] = pipe.step(data, pipelines.loss_of).loss.item()
    except BaseException as error:  # noqa: BLE001 - what it is, is the test's subject
        record["error"], record["kind"] = str(error), type(error).__name__
    record["at"] = time.time()
    (folder / f"{rank}.ended").write_text(json.dumps(record))
    os._exit(0)
