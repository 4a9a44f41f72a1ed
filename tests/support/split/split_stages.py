"""Stages of a plain model in one process: copies, run one after another, each without the other stages' parts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.split import (
    Rehearsal,
    SplitPass,
    SplitStage,
    buffer_owners,
    keep_own_part,
    rehearse,
    shared_parameters,
)
from hydra_ext.split.rehearsal.record import Key
from hydra_ext.split.stage_program import Crossing
from support.pipeline.pipeline_links import through_a_link
from support.summation import Summands, assert_sums_alike

Fn = Callable[[nn.Module, Any], Any]
SEED = 7


@dataclass
class Outcome:
    """The results of one or several microbatches.

    Attributes:
        losses: Loss of each microbatch.
        gradients: Gradients of all parameters that got one. Those of shared parameters are summed, the last stage's
            first.
        buffers: Buffers, each from the stage that owns it.
        metrics: Metrics of the last microbatch.
        summands: Summands of the gradients.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    metrics: Any = None
    summands: Summands = field(default_factory=Summands)


@dataclass
class Stages:
    """A model cut into stages.

    Attributes:
        kept: Names of the parameters of each stage.
        summands: Summands of the gradients of all stages.
    """

    fn: Fn
    rehearsal: Rehearsal
    borders: list[int]
    models: list[nn.Module] = field(default_factory=list)
    programs: list[SplitStage] = field(default_factory=list)
    kept: list[frozenset[str]] = field(default_factory=list)
    summands: Summands = field(default_factory=Summands)

    def forward(self, batch: Any, *, seed: int = SEED, divisor: int = 1, copies: bool = True) -> list[SplitPass]:
        """Runs all stages forward. With ``copies``, crossing values get other memory, as between processes."""
        passes: list[SplitPass] = []
        crossing: Crossing | None = None
        for model, program in zip(self.models, self.programs, strict=True):
            passes.append(program.forward(bound(self.fn, model), batch, crossing, seed=seed, divisor=divisor))
            crossing = sent(passes[-1].leaving) if copies else passes[-1].leaving
        return passes

    def backward(self, passes: Sequence[SplitPass]) -> None:
        gradients: tuple[Tensor | None, ...] = ()
        for model, run in zip(reversed(self.models), reversed(passes), strict=True):
            self.summands.watch(run._roots or [], dict(model.named_parameters()))
            gradients = run.backward(gradients)
            gradients = tuple(None if gradient is None else through_a_link(gradient) for gradient in gradients)

    def outcome(self, runs: Sequence[Sequence[SplitPass]]) -> Outcome:
        gradients: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for stage, model in reversed(list(enumerate(self.models))):
            for name, parameter in model.named_parameters():
                if name in self.kept[stage] and parameter.grad is not None:
                    known = gradients.get(name)
                    gradients[name] = parameter.grad if known is None else known + parameter.grad
            owners = buffer_owners(self.rehearsal, self.borders[1:-1], model)
            buffers |= {name: buffer for name, buffer in model.named_buffers() if owners[name] == stage}
        return Outcome([run[-1].loss for run in runs], gradients, buffers, runs[-1][-1].metrics, self.summands)


def bound(fn: Fn, model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: fn(model, batch)


def sent(crossing: Crossing | None) -> Crossing | None:
    """Copies crossing values to other memory, as between processes."""
    if crossing is None:
        return None
    return Crossing(tuple(map(through_a_link, crossing.tensors)), crossing.requires_grad, crossing.structure)


def rehearsed(model: nn.Module, fn: Fn, batch: Any, *, blocks: Sequence[str] | None = None) -> Rehearsal:
    return rehearse(model, bound(fn, model), batch, seed=SEED, blocks=blocks)


def cut(model: nn.Module, fn: Fn, rehearsal: Rehearsal, cuts: Sequence[int]) -> Stages:
    """Makes copies of the model, each with only the stage's own part."""
    stages = Stages(fn, rehearsal, [0, *cuts, len(rehearsal.events)])
    for lo, hi in zip(stages.borders[:-1], stages.borders[1:], strict=True):
        part = copy.deepcopy(model)
        stages.kept.append(keep_own_part(part, rehearsal, [(lo, hi)]))
        stages.models.append(part)
        stages.programs.append(SplitStage(part, rehearsal, lo, hi))
    return stages


def run(model: nn.Module, fn: Fn, batches: Sequence[Any], cuts: Sequence[int], rehearsal: Rehearsal) -> Outcome:
    """Runs each batch forward and backward, one after the other."""
    stages = cut(model, fn, rehearsal, cuts)
    runs = []
    for number, batch in enumerate(batches):
        runs.append(stages.forward(batch, seed=SEED + number))
        stages.backward(runs[-1])
    return stages.outcome(runs)


def run_plainly(model: nn.Module, fn: Fn, batches: Sequence[Any]) -> Outcome:
    """Runs the whole model in a loop over batches."""
    model = copy.deepcopy(model)
    summands = Summands()
    losses = []
    for batch in copy.deepcopy(list(batches)):
        output = fn(model, batch)
        loss = output[0] if isinstance(output, tuple) else output
        summands.watch([loss], dict(model.named_parameters()))
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(losses, gradients, dict(model.named_buffers()), summands=summands)


def even_cuts(rehearsal: Rehearsal, stages: int) -> list[int]:
    """Returns cuts with about equally many events in each stage."""
    possible = rehearsal.possible_cuts
    wanted = [round(i * len(rehearsal.events) / stages) for i in range(1, stages)]
    found = sorted({min(possible, key=lambda cut: (abs(cut - place), cut)) for place in wanted})
    if len(found) != stages - 1:
        raise ValueError(f"no {stages} stages: cuts are possible at {possible}")
    return found


def assert_same(
    found: Outcome,
    expected: Outcome,
    shared: frozenset[str] | set[str] = frozenset(),
    *,
    tolerance: float | None = None,
) -> None:
    """Asserts equality to the last bit, except for gradients of parameters that several stages hold.

    Those may differ as sums in another order can, or by ``tolerance`` times their largest element.
    """
    for one, other in zip(found.losses, expected.losses, strict=True):
        assert torch.equal(one, other), f"loss {one.item()!r}, expected {other.item()!r}"
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        other = expected.gradients[name]
        if name not in shared:
            assert torch.equal(gradient, other), name
        elif tolerance is None:
            assert_sums_alike(gradient, other, expected.summands.bound(name), name)
        else:
            scale = other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)
            assert ((gradient - other).abs().max() / scale).item() <= tolerance, name
    assert found.buffers.keys() == expected.buffers.keys()
    for name, buffer in found.buffers.items():
        assert torch.equal(buffer, expected.buffers[name]), name


def shared(model: nn.Module, rehearsal: Rehearsal, cuts: Sequence[int]) -> set[str]:
    """Returns the names of the parameters that several stages have."""
    return set(shared_parameters(rehearsal, cuts, model))


def without(rehearsal: Rehearsal, boundary: int, key: Key) -> Rehearsal:
    """Removes a value, as if the rehearsal had overlooked its use after the boundary."""
    boundaries = list(rehearsal.boundaries)
    values = tuple(other for other in boundaries[boundary].values if other != key)
    boundaries[boundary] = dataclasses.replace(boundaries[boundary], values=values)
    return dataclasses.replace(rehearsal, boundaries=tuple(boundaries))
