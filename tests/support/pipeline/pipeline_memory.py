"""Device bytes of a pipeline's rank on a simulated device, measured and by the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.links import Outbox
from hydra_ext.pipeline.stages.recompute import RecomputedStage
from hydra_ext.pipeline.stages.tier import Tier
from hydra_ext.schedule import make
from hydra_ext.split.stage_program import StagePass, StageProgram

ROWS, WIDTH, LAYERS = 64, 128, 3
INPUT_BYTES = ROWS * WIDTH * 4  # arrive at a stage for one microbatch
ACTIVATION_BYTES = LAYERS * ROWS * WIDTH * 4  # each layer keeps its result, the next product's input
WEIGHT_BYTES = LAYERS * WIDTH * WIDTH * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.product(x))


class Measured:
    """A stage program that records the device's bytes after each forward, when no transfer is under way."""

    def __init__(self, program: StageProgram, tier: Tier, outboxes: list[Outbox]) -> None:
        self._program = program
        self._tier = tier
        self._outboxes = outboxes
        self.held: list[int] = []

    def forward(self, *args: Any, **kwargs: Any) -> StagePass:
        done = self._program.forward(*args, **kwargs)
        for outbox in self._outboxes:
            outbox.flush()
        self.held.append(self._tier.run.activation_bytes())
        return done


def hold(rank: int, stages: int, schedule: str, ahead: int, microbatches: int, recompute: bool) -> dict[str, int]:
    """Returns the bytes of one rank, whose device has room for everything."""
    torch.manual_seed(0)
    modules = [nn.Sequential(*(Layer() for _ in range(LAYERS))) for _ in range(stages)]
    pipe = Pipeline(
        None,
        lambda parameters: hydra_ext.optim.SGD(parameters, lr=0.01),
        stages=modules,
        schedule=make(schedule, stages=stages, microbatches=microbatches, ahead=ahead),
        microbatches=microbatches,
        recompute=recompute,
        budget="64MiB",
        checks=Checks(poison_hosts=True),
    )
    engine = pipe._engine
    assert engine is not None
    assert engine.assembly.tier is not None
    (stage,) = engine.assembly.stages
    outboxes = [outbox for outbox in (stage.links.outbox, stage.links.gradient_outbox) if outbox is not None]
    if isinstance(stage.program, RecomputedStage):
        inner = stage.program._program = Measured(stage.program._program, engine.assembly.tier, outboxes)
    else:
        inner = stage.program = Measured(stage.program, engine.assembly.tier, outboxes)
    data = [torch.randn(ROWS, WIDTH) for _ in range(microbatches)]
    for _ in range(5):
        pipe.step(data, lambda output, microbatch: output.square().mean())
    pipe.drain()
    device = pipe.report().device
    assert device is not None
    pipe.close()
    return {
        "weights": device.peak_weights_bytes,
        "activations": max(inner.held),
        "windows": device.windows,
        "faults": device.faults,
        "evictions": device.evictions,
        "loads": device.loads,
    }
