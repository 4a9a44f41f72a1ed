"""Stages that keep only the values that arrived, and run their forward again just before their backward."""

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

    The second forward starts from the same state as the first, so that it gives the same bits. The state is: values,
    random numbers, buffers, attributes of modules with the objects reached from them, and the version of the weights.
    Changes that the second forward makes to this state are lost. Random sources of the user are part of the state if a
    module holds them. A torch.Generator that only ``fn`` holds is part of it in stages of a plain module.
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
        # Other microbatches write to modules (the statistics of a batch norm) before this one is run again, and its
        # graph must not see that. All are copied, since a batch norm writes without counting a version.
        self._before: ModuleState | None = ModuleState.now(modules).copied(apart=is_absent)
        self._modules = modules
        first = run(_copied(arriving))  # with a graph, which tells the values that need gradients; it is dropped here
        self._leaving = first.leaving
        inner = first.inner if isinstance(first, RememberingPass) else first
        self._generators = inner.generators.in_place() if isinstance(inner, SplitPass) else nullcontext()
        self.loss = first.loss
        self.metrics = first.metrics

    @property
    def leaving(self) -> Crossing | None:
        """The values for the next stage. Can be read once, so that they are not kept until the backward."""
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
    """Copies for the first forward, which may write to its values; the second one needs the originals."""
    if arriving is None:
        return None
    tensors = tuple(copied(tensor) for tensor in arriving.tensors)
    return Crossing(tensors, arriving.requires_grad, arriving.structure)


def _autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


class _Autocast:
    """Autocast as in the first forward: the backward may run in a later step, outside the caller's context."""

    def __init__(self, states: list[tuple[str, bool, torch.dtype]]) -> None:
        self._contexts = [torch.autocast(kind, dtype=dtype, enabled=on) for kind, on, dtype in states]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)
