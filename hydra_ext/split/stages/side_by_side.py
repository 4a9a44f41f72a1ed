"""Several stages of one module on one rank, each with its own state of the module's attributes and buffers.

Every stage runs the glue before its own part again, and sets stand-ins where skipped blocks would have set tensors. On
separate ranks the stages do not see each other's changes. Here each stage gets the state in which it left the module,
as if it were alone. Between passes the module shows the changes that each stage has made in its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError
from hydra_ext.split.stage_program import Crossing, StagePass, StageProgram
from hydra_ext.split.stages.stage import SplitStage
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.split.state.held import all_modules, entries, module_roots
from hydra_ext.state.module_state import ATTRIBUTE, BUFFER, CONTENT, Copies, ModuleState, Place


class SideBySide:
    """The states of one model, by stage.

    Args:
        stages: Stages on this rank.
        rewritten: As in :class:`~hydra_ext.split.rehearsal.record.Rehearsal`.
    """

    def __init__(self, model: nn.Module, stages: Sequence[int], rewritten: Collection[str]) -> None:
        self._roots = (model,)
        self._stages = sorted(stages)
        self._rewritten = frozenset(rewritten)
        self._apart: set[Place] = set()
        self._of: dict[int, ModuleState] = {}
        self._shown: ModuleState | None = None
        self._own_begins: ModuleState | None = None

    @contextmanager
    def acting(self, stage: int, *, forward: bool) -> Iterator[None]:
        """Inside, the module is as this stage left it. Afterwards it also shows the changes of the stage's own part."""
        current = self._with_changes_from_outside()
        self._of[stage].put(current)
        # State that no stage here owns is shown as the first stage sees it.
        all_is_own = not forward or stage == self._stages[0]
        begun = ModuleState.now(self._roots) if all_is_own else None
        self._own_begins = None
        try:
            yield
        finally:
            after = ModuleState.now(self._roots)
            begun = begun or self._own_begins or after
            self._of[stage] = after
            shown = ModuleState(self._roots, current.entries)
            for place in after.changed_since(begun):
                shown.take(place, after)
            shown.put(after)
            self._shown = ModuleState.now(self._roots)

    def comes_again(self, stage: int) -> bool:
        """Whether a later stage of this rank gets the same microbatch."""
        return stage != self._stages[-1]

    def own_begins(self) -> None:
        """Called when the acting stage reaches its first event."""
        with torch._C.DisableTorchFunction():  # these calls are no steps of the forward
            self._own_begins = ModuleState.now(self._roots)

    def check(self, program: SplitStage) -> None:
        """Called after a forward, which may have rehearsed another kind of microbatch.

        Raises:
            SplitError: That kind writes to tensors of which the stages have no copies of their own.
        """
        more = program.rewritten - self._rewritten
        if more:
            raise SplitError(
                f"this kind of microbatch writes to {', '.join(sorted(more))} between blocks, unlike the kind that the "
                f"cuts were chosen for, and each of the stages {self._stages} of this rank would write again: make the "
                "pipeline with a microbatch of this kind, or use as many ranks as stages"
            )

    def _with_changes_from_outside(self) -> ModuleState:
        """The module's current state. Changes made outside of the stages are taken into the state of each stage."""
        current = ModuleState.now(self._roots)
        if self._shown is None:
            self._apart = _places(self._roots[0], self._rewritten)
            self._of = {stage: current.copied(self._apart, apart=is_absent) for stage in self._stages}
            self._of[self._stages[0]] = current
            return current
        changed = current.changed_since(self._shown)
        if changed:
            self._apart = _places(self._roots[0], self._rewritten)
        for number, stage in enumerate(self._stages):
            state, copies = self._of[stage], Copies(is_absent)
            for place in changed:
                state.take(place, current)
                if number and place in self._apart and place in current.entries:
                    state.entries[place] = copies.of(current.entries[place])
        return current


class SideBySideStage:
    """A :class:`~hydra_ext.split.stage_program.StageProgram` that runs another program in the state of its stage."""

    def __init__(self, program: StageProgram, inner: SplitStage, stage: int, states: SideBySide) -> None:
        """
        Args:
            inner: The split stage: the program itself, or the one that it runs.
        """
        self._program = program
        self._inner = inner
        self._stage = stage
        self._states = states
        inner.own_begins = states.own_begins
        inner.shares_microbatch = states.comes_again(stage)

    def forward(
        self, fn: Callable[..., Any], microbatch: Any, arriving: Crossing | None, *, seed: int, divisor: int
    ) -> StagePass:
        with self._states.acting(self._stage, forward=True):
            made = self._program.forward(fn, microbatch, arriving, seed=seed, divisor=divisor)
        self._states.check(self._inner)
        return _SideBySidePass(made, self._stage, self._states)


class _SideBySidePass:
    def __init__(self, inner: StagePass, stage: int, states: SideBySide) -> None:
        self._inner = inner
        self._stage = stage
        self._states = states
        self.loss = inner.loss
        self.metrics = inner.metrics

    @property
    def leaving(self) -> Crossing | None:
        return self._inner.leaving

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        with self._states.acting(self._stage, forward=False):  # a checkpoint runs part of the forward again
            return self._inner.backward(gradients)


def _places(model: nn.Module, names: Collection[str]) -> set[Place]:
    """The places of the tensors of these names: buffers, attributes, or their members ("layer.kept[0]")."""
    if not names:
        return set()
    found: set[Place] = set()
    for name, module in model.named_modules():
        for buffer in module._buffers:
            if (f"{name}.{buffer}" if name else buffer) in names:
                found.add((id(module), BUFFER, buffer))
    for entry in entries(module_roots(all_modules(model))):
        if any(name.startswith(entry.path) and name[len(entry.path) :][:1] in ("", ".", "[") for name in names):
            found |= {(id(entry.holder), CONTENT, ""), (id(entry.holder), ATTRIBUTE, str(entry.key))}
    return found
