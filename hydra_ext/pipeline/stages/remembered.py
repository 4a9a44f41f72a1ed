"""Keeps the state that modules have at the end of a microbatch's forward, for checkpoints inside the model.

Such a checkpoint runs a part of the forward again in the backward, and reads buffers and attributes there. In a plain
training loop they are as that forward left them. In a pipeline forwards of later microbatches may have changed them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from hydra_ext.split.stage_program import Crossing, StagePass, StageProgram
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.state.module_state import ATTRIBUTE, ModuleState, Place

logger = logging.getLogger(__name__)


class RememberingStage:
    """A :class:`~hydra_ext.split.stage_program.StageProgram` around another one.

    A backward with a checkpoint in it starts from the state in which its own forward left the modules. If a later
    forward has changed that state, the backward's writes to buffers, to contents of containers, and to attributes that
    forwards write are lost. From the first such write on they are always lost in this stage. A warning names each place
    once. Code that runs its forward again without torch's functions is not noticed.

    Attributes:
        loses: Whether the writes of backwards are lost from now on.
        written: Places where forwards have written.
    """

    def __init__(self, program: StageProgram, modules: Sequence[nn.Module]) -> None:
        self._program = program
        self._modules = modules
        self._told: set[str] = set()
        self._checkpoints = False
        self.loses = False
        self.written: set[Place] = set()

    def forward(
        self, fn: Callable[..., Any], microbatch: Any, arriving: Crossing | None, *, seed: int, divisor: int
    ) -> StagePass:
        begun = ModuleState.now(self._modules) if self._checkpoints else None
        with _checkpoints_noted() as noted:
            made = self._program.forward(fn, microbatch, arriving, seed=seed, divisor=divisor)
        if not noted.found or not torch.is_grad_enabled():
            return made
        self._checkpoints = True
        seen = ModuleState.now(self._modules)
        if begun is not None:
            self.written.update(seen.changed_since(begun))
        return RememberingPass(made, seen, self._modules, self)

    def lose(self, names: set[str]) -> None:
        """Notes that a backward's writes to these places are lost, and warns once of each."""
        new = sorted(names - self._told)
        self._told |= names
        self.loses = self.loses or bool(names)
        if new:
            logger.warning(
                "a checkpoint in the model writes to %s again in the backward, after forwards of later microbatches "
                "have written there: the backward's writes are lost, and the values count forwards alone",
                ", ".join(new),
            )


class RememberingPass:
    """A pass around another one, which runs its backward on the modules' state at the end of its forward.

    Attributes:
        inner: The other pass.
    """

    def __init__(
        self, inner: StagePass, seen: ModuleState, modules: Sequence[nn.Module], stage: RememberingStage
    ) -> None:
        """
        Args:
            seen: The modules' state now.
        """
        self.inner = inner
        self.loss = inner.loss
        self.metrics = inner.metrics
        self._modules = modules
        self._stage = stage
        self._seen: ModuleState | None = seen
        # All tensors are copied: a batch norm writes to its statistics without counting a version.
        self._kept: ModuleState | None = seen.copied(apart=is_absent)

    @property
    def leaving(self) -> Crossing | None:
        return self.inner.leaving

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        seen, kept, self._seen, self._kept = self._seen, self._kept, None, None
        current = ModuleState.now(self._modules)
        if seen is None or kept is None or not (self._stage.loses or current.changed_since(seen)):
            return self.inner.backward(gradients)
        kept.put(current)
        begun = ModuleState.now(self._modules)
        try:
            return self.inner.backward(gradients)
        finally:
            ended = ModuleState.now(self._modules)
            lost = set[str]()
            for place in ended.changed_since(begun):
                if place[1] == ATTRIBUTE and place not in self._stage.written:
                    current.take(place, ended)
                else:
                    lost.add(_name(place, ended, begun))
            self._stage.lose(lost)
            current.put(ended)


def _name(place: Place, *states: ModuleState) -> str:
    owner = next(state.entries[place].owner for state in states if place in state.entries)
    return f"{type(owner).__name__}.{place[2]}" if place[2] else f"a {type(owner).__name__}"


# ---- replaced functions ---------------------------------------------------------------------------------------------
class _Noted(threading.local):
    """Whether this thread has met a checkpoint."""

    found = False


_noted = _Noted()
_lock = threading.Lock()
_users = 0
_plain_enter: Any = saved_tensors_hooks.__enter__
_plain_forward: Any = CheckpointFunction.forward


def _enter(hooks: saved_tensors_hooks) -> Any:
    _noted.found = True
    return _plain_enter(hooks)


def _forward(*args: Any) -> Any:
    _noted.found = True
    return _plain_forward(*args)


@contextmanager
def _checkpoints_noted() -> Iterator[_Noted]:
    """Replaces the functions through which torch's checkpoints run, to notice their use on this thread."""
    global _users, _plain_enter, _plain_forward
    _noted.found = False
    with _lock:
        if not _users:
            _plain_enter, _plain_forward = saved_tensors_hooks.__enter__, CheckpointFunction.forward
            saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]
            CheckpointFunction.forward = staticmethod(_forward)  # type: ignore[method-assign]
        _users += 1
    try:
        yield _noted
    finally:
        with _lock:
            _users -= 1
            if not _users:
                saved_tensors_hooks.__enter__ = _plain_enter  # type: ignore[method-assign]
                CheckpointFunction.forward = staticmethod(_plain_forward)  # type: ignore[method-assign]
