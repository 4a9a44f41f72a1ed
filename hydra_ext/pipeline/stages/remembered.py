"""What modules held when a microbatch's forward ended, for checkpoints of the model's own.

Such a checkpoint runs a part of the forward again in the backward, and reads buffers and attributes there. In a loop
they are as that forward left them. Here forwards of later microbatches may have changed them in between.
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

    A backward with a checkpoint in it starts from what its own forward left on the modules. What it writes where
    forwards write, too, is lost if later ones have been there, in this stage from then on always, and a warning names
    it once. Code that runs its forward again by other means than torch's is not noticed.

    Attributes:
        loses: whether what backwards write is lost.
        written: where forwards have written.
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
        """A backward has written there; told once of each."""
        new = sorted(names - self._told)
        self._told |= names
        self.loses = self.loses or bool(names)
        if new:
            logger.warning(
                "a checkpoint in the model writes to %s again in the backward, when later microbatches have been "
                "there: these writes are lost, and what is there counts forwards alone",
                ", ".join(new),
            )


class RememberingPass:
    """
    Attributes:
        inner: the pass itself.
    """

    def __init__(
        self, inner: StagePass, seen: ModuleState, modules: Sequence[nn.Module], stage: RememberingStage
    ) -> None:
        """
        Args:
            seen: what the modules hold now.
        """
        self.inner = inner
        self.loss = inner.loss
        self.metrics = inner.metrics
        self._modules = modules
        self._stage = stage
        self._seen: ModuleState | None = seen
        # What a batch norm writes shows in no version counter, so that all is copied.
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
    """Whether a checkpoint was found on this thread."""

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
    """Replaces the functions by which a forward is run again later."""
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
