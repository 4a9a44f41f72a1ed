"""Stages that keep only what arrived, and run their forward again just before their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import StateError
from hydra_ext.pipeline.kept import twice
from hydra_ext.pipeline.split.stand_ins import is_absent
from hydra_ext.pipeline.stage_program import Crossing, StagePass, StageProgram


class RecomputedStage:
    """A :class:`~hydra_ext.pipeline.stage_program.StageProgram` around another one.

    The second forward starts from the same values, random numbers, buffers and version of the weights as the first, so
    that it gives the same bits; what it changes in the modules' buffers is lost.
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
        self._buffers = _Buffers(modules)
        first = run(_copied(arriving))  # with a graph, since only that tells what needs gradients; it is dropped here
        self._leaving = first.leaving
        self.loss = first.loss
        self.metrics = first.metrics

    @property
    def leaving(self) -> Crossing | None:
        """Once: else it would be kept until the backward."""
        leaving, self._leaving = self._leaving, None
        return leaving

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        run, self._run = self._run, None
        if run is None:
            raise StateError("the backward of this microbatch has run")
        with _Autocast(self._autocast), self._buffers.as_before():
            again = run(self._arriving)
        self._arriving = None
        return again.backward(gradients)


class _Buffers:
    """As they are before the first forward: other microbatches write to them (the statistics of a batch norm) before
    it is run again, and its graph must not see that either.

    All are copied, since what a batch norm writes shows in no version counter.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        copies: dict[Tensor, Tensor] = {}
        self._before: list[tuple[nn.Module, str, Tensor]] = []
        for module in {inner: None for root in modules for inner in root.modules()}:
            for key, tensor in module._buffers.items():
                if tensor is not None and not is_absent(tensor):
                    if tensor not in copies:
                        copies[tensor] = tensor.detach().clone()
                    self._before.append((module, key, copies[tensor]))

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The modules have the copies. Once."""
        before, self._before = self._before, []
        current = [(module, key, module._buffers[key]) for module, key, _ in before]
        for module, key, value in before:
            module._buffers[key] = value
        try:
            yield
        finally:
            for module, key, tensor in current:
                module._buffers[key] = tensor


def _copied(arriving: Crossing | None) -> Crossing | None:
    """The receiver may write to what it gets, and these are needed once more."""
    if arriving is None:
        return None
    tensors = tuple(tensor.clone() for tensor in arriving.tensors)
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
