"""A wrapper of autograd's engine: device parameters stay in place while backward runs.

torch asks ``Variable._execution_engine`` for every backward. The wrapper opens the window of each model whose
graph it is, maps host parameters among ``inputs=`` to device parameters, and closes the windows on every way out. It
chains to whatever engine was there, is installed with the first context and taken out with the last.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.autograd.variable import Variable

from hydra_ext import _C


class BackwardParticipant(Protocol):
    """What the wrapper needs of a model's context."""

    core: _C.PagedModel

    def backward_window(self) -> Any: ...
    def face_of(self, tensor: torch.Tensor) -> torch.Tensor | None: ...
    def to_host(self, gradient: torch.Tensor) -> torch.Tensor: ...


class EngineWrapper:
    """Stands in for the engine; everything but ``run_backward`` goes to the engine it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.participants: list[BackwardParticipant] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def run_backward(
        self,
        tensors: Any,
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: tuple[Any, ...] = (),
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        awaiting = self._reached_by(tensors)
        if not awaiting:
            return self._wrapped.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **kwargs)
        with ExitStack() as windows:
            for participant in awaiting:
                windows.enter_context(participant.backward_window())
            inputs, owners = _faces(inputs, awaiting)
            gradients = self._wrapped.run_backward(
                tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **kwargs
            )
            if not gradients or not owners:
                return gradients
            return tuple(
                owners[index].to_host(gradient) if index in owners and gradient is not None else gradient
                for index, gradient in enumerate(gradients)
            )

    def _reached_by(self, roots: Any) -> list[BackwardParticipant]:
        """Those whose graph this backward runs through: no other opens a window, or pays for what is allocated."""
        roots = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
        reached = _C.reached_models(
            [root for root in roots if isinstance(root, torch.Tensor)], [known.core for known in self.participants]
        )
        return [known for known in self.participants if any(known.core is core for core in reached)]


def _faces(
    inputs: tuple[Any, ...], awaiting: list[BackwardParticipant]
) -> tuple[tuple[Any, ...], dict[int, BackwardParticipant]]:
    """``inputs`` with device for host parameters, and whose parameter each changed one is."""
    mapped = list(inputs)
    owners: dict[int, BackwardParticipant] = {}
    for index, tensor in enumerate(mapped):
        if not isinstance(tensor, torch.Tensor):
            continue
        for participant in awaiting:
            face = participant.face_of(tensor)
            if face is not None:
                mapped[index] = face
                owners[index] = participant
                break
    return tuple(mapped), owners


_torch: Any = Variable  # whose engine is whatever answers like one
_lock = threading.Lock()
_installed: EngineWrapper | None = None


def join(participant: BackwardParticipant) -> None:
    """From now on backward runs through the wrapper."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = EngineWrapper(_torch._execution_engine)
            _torch._execution_engine = _installed
        _installed.participants.append(participant)


def leave(participant: BackwardParticipant) -> None:
    """Undoes :func:`join`. The last one to leave restores the engine, unless somebody wrapped ours meanwhile."""
    global _installed
    with _lock:
        if _installed is None:
            return
        _installed.participants = [known for known in _installed.participants if known is not participant]
        if not _installed.participants and _torch._execution_engine is _installed:
            _torch._execution_engine = _installed._wrapped
            _installed = None


def holds(parameter: torch.Tensor) -> bool:
    """Whether a context that is active moves this host parameter."""
    with _lock:
        participants = _installed.participants if _installed is not None else []
        return any(known.face_of(parameter) is not None for known in participants)


def installed() -> bool:
    """Whether any context is active, as far as the engine is concerned."""
    return isinstance(_torch._execution_engine, EngineWrapper)
