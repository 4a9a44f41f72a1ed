"""Stages that keep only what arrived, and run their forward again just before their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import StateError
from hydra_ext.pipeline.stages.kept import twice
from hydra_ext.pipeline.stages.remembered import RememberingPass
from hydra_ext.split.stage_program import Crossing, StagePass, StageProgram
from hydra_ext.split.stages.stage import SplitPass
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.state.layout import copied
from hydra_ext.state.module_state import ModuleState


class RecomputedStage:
    """A :class:`~hydra_ext.split.stage_program.StageProgram` around another one.

    The second forward starts from the same values, random numbers, buffers, attributes of modules with all that is
    reached from them, and version of the weights as the first, so that it gives the same bits; what it changes there is
    lost. Sources of random numbers of the user's own are known where a module holds them; torch.Generators that only
    ``fn`` holds, in stages of a plain module.
    """

    def __init__(self, program: StageProgram, modules: Sequence[nn.Module]) -> None:
        self._program = program
        self._modules = modules

    def forward(
        self, fn: Callable[..., Any], microbatch: Any, arriving: Crossing | None, *, seed: int, divisor: int
    ) -> StagePass:
        if not torch.is_grad_enabled():
            return self._program.forward(fn, microbatch, arriving, seed=seed, divisor=divisor)
        given = twice(microbatch)

        def run(values: Crossing | None) -> StagePass:
            return self._program.forward(fn, next(given), values, seed=seed, divisor=divisor)

        return _RecomputedPass(run, arriving, self._modules)


class _RecomputedPass:
    def __init__(
        self, run: Callable[[Crossing | None], StagePass], arriving: Crossing | None, modules: Sequence[nn.Module]
    ) -> None:
        self._run: Callable[[Crossing | None], StagePass] | None = run
        self._arriving = arriving
        self._autocast = _autocast_states()
        # Other microbatches write there (the statistics of a batch norm) before this one is run again, and its graph
        # must not see that either. All are copied, since what a batch norm writes shows in no version counter.
        self._before: ModuleState | None = ModuleState.now(modules).copied(apart=is_absent)
        self._modules = modules
        first = run(_copied(arriving))  # with a graph, since only that tells what needs gradients; it is dropped here
        self._leaving = first.leaving
        inner = first.inner if isinstance(first, RememberingPass) else first
        self._generators = inner.generators.in_place() if isinstance(inner, SplitPass) else nullcontext()
        self.loss = first.loss
        self.metrics = first.metrics

    @property
    def leaving(self) -> Crossing | None:
        """Once: else it would be kept until the backward."""
        leaving, self._leaving = self._leaving, None
        return leaving

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        run, self._run = self._run, None
        before, self._before = self._before, None
        if run is None or before is None:
            raise StateError("the backward of this microbatch has run")
        current = ModuleState.now(self._modules)
        before.put(current)
        try:
            with _Autocast(self._autocast), self._generators:
                again = run(self._arriving)
        finally:
            current.put()
        self._arriving = None
        return again.backward(gradients)


def _copied(arriving: Crossing | None) -> Crossing | None:
    """The receiver may write to what it gets, and these are needed once more."""
    if arriving is None:
        return None
    tensors = tuple(copied(tensor) for tensor in arriving.tensors)
    return Crossing(tensors, arriving.requires_grad, arriving.structure)


def _autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


class _Autocast:
    """Autocast as it was where the first forward ran: a backward may run in another step, outside the caller's."""

    def __init__(self, states: list[tuple[str, bool, torch.dtype]]) -> None:
        self._contexts = [torch.autocast(kind, dtype=dtype, enabled=on) for kind, on, dtype in states]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)
