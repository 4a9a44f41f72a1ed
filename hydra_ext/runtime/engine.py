"""A wrapper of autograd's engine: device parameters stay in place while backward runs.

torch calls ``Variable._execution_engine`` for every backward. The wrapper opens the window of each model whose graph
the backward reaches, and closes it on every way out. Host parameters among ``inputs=`` become device parameters. The
wrapper forwards to the engine that was installed before. The first context installs it, and the last one removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from hydra_ext import _C
from hydra_ext.optim.rows import dense_of
from hydra_ext.runtime.compiled import why_absent
from hydra_ext.runtime.replicas import Replicas

if TYPE_CHECKING:
    from hydra_ext.runtime.reporting.figures import StepMeter
    from hydra_ext.tables.lookup import TableRows

Seat = tuple[int, int] | None


class BackwardParticipant(Protocol):
    """The interface of a model's context that the wrapper uses.

    Attributes:
        backwards: Number of backwards that have begun and may accumulate gradients.
        tables: Weights of which rows move.
    """

    core: _C.PagedModel
    model: nn.Module
    replicas: Replicas | None
    meter: StepMeter
    backwards: int
    tables: Sequence[TableRows]

    def backward_ended(self, *, accumulated: bool, failed: bool = False) -> None: ...
    def face_of(self, tensor: torch.Tensor) -> torch.Tensor | None: ...
    def to_host(self, gradient: torch.Tensor) -> torch.Tensor: ...


class EngineWrapper:
    """Stands in for the engine; every attribute but ``run_backward`` is forwarded to the engine it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.participants: list[BackwardParticipant] = []
        self._seats: dict[int, Seat] = {}  # by the identity of a participant

    def join(self, participant: BackwardParticipant) -> None:
        self.participants.append(participant)
        self._seats[id(participant)] = _C.seat()

    def leave(self, participant: BackwardParticipant) -> None:
        self.participants = [known for known in self.participants if known is not participant]
        self._seats.pop(id(participant), None)

    def at(self, seat: Seat) -> list[BackwardParticipant]:
        """The contexts that were entered by threads with this seat on a shared device; None for those without."""
        return [known for known in self.participants if self._seats[id(known)] == seat]

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
        awaiting = self.reached_by(tensors)
        if not awaiting:
            return self._wrapped.run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs, *args, **kwargs)
        accumulated = kwargs.get("accumulate_grad", True)
        for participant in awaiting if accumulated else ():
            begin_backward(participant)
        try:
            with windows_of(awaiting):  # implemented in C: no interrupt arrives between entering and leaving
                wanted = _Wanted(_roots(tensors), inputs, awaiting)
                gradients = self._wrapped.run_backward(
                    tensors, grad_tensors, keep_graph, create_graph, wanted.inputs, *args, **kwargs
                )
                gradients = wanted.gradients(gradients) if gradients else gradients
        except BaseException as error:
            for participant in awaiting:
                for table in participant.tables:
                    table.backward_failed()
                participant.backward_ended(accumulated=False, failed=True)
            absent = why_absent(error) if isinstance(error, RuntimeError) else None
            if absent is None:
                raise
            raise absent from None
        for participant in awaiting:
            participant.backward_ended(accumulated=accumulated)
        return gradients

    def reached_by(self, roots: Any) -> list[BackwardParticipant]:
        """The contexts whose graphs this backward runs through.

        Only they open windows and are charged for allocations.
        """
        roots = _roots(roots)
        seat = _C.seat()  # None also in threads of autograd's: there the graph alone decides
        known_here = list(self.participants) if seat is None else self.at(seat)
        if not all(isinstance(root, torch.Tensor) for root in roots):
            return known_here  # the graphs behind gradient edges are not searched
        reached = _C.reached_models(roots, [known.core for known in known_here])
        return [known for known in known_here if any(known.core is core for core in reached)]


def _roots(roots: Any) -> list[Any]:
    return [roots] if isinstance(roots, (torch.Tensor, GradientEdge)) else list(roots)


class _Wanted:
    """``inputs=`` with device parameters in place of host parameters.

    A host parameter that the loss also uses outside the model is requested in addition.
    """

    def __init__(self, roots: list[Any], inputs: tuple[Any, ...], awaiting: list[BackwardParticipant]) -> None:
        self._asked = len(inputs)
        self._owners: dict[int, BackwardParticipant] = {}
        mapped = list(inputs)
        for index, tensor in enumerate(inputs):
            for participant in awaiting if isinstance(tensor, torch.Tensor) else ():
                face = participant.face_of(tensor)
                if face is not None:
                    mapped[index] = face
                    self._owners[index] = participant
                    break
        self._also: list[int] = []  # indices of inputs whose host parameter is requested in addition
        if self._owners:
            for index, by_itself, by_face in self._reached(roots, inputs, mapped):
                if by_itself and by_face:
                    self._also.append(index)
                elif by_itself:
                    mapped[index] = inputs[index]
                    del self._owners[index]
        self.inputs = (*mapped, *(inputs[index] for index in self._also))

    def _reached(self, roots: list[Any], inputs: tuple[Any, ...], mapped: list[Any]) -> list[tuple[int, bool, bool]]:
        owned = list(self._owners)
        leaves = [inputs[index] for index in owned] + [mapped[index] for index in owned]
        if all(isinstance(root, torch.Tensor) for root in roots):
            reached = _C.reached_leaves(roots, leaves)
        else:
            behind = _leaves_behind([root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots])
            reached = [id(leaf) in behind for leaf in leaves]
        return list(zip(owned, reached[: len(owned)], reached[len(owned) :], strict=True))

    def gradients(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients of the caller's inputs, each on its input's device; a host parameter's two parts are summed.

        Those of tables that are stepped by rows are dense.
        """
        asked = [
            dense_of(tensor, part) if isinstance(tensor, torch.Tensor) and part is not None else part
            for tensor, part in zip(self.inputs, gradients[: self._asked], strict=False)
        ]
        for index, owner in self._owners.items():
            if asked[index] is not None:
                asked[index] = owner.to_host(asked[index])
        for index, part in zip(self._also, gradients[self._asked :], strict=True):
            if part is not None:
                asked[index] = part if asked[index] is None else asked[index] + part
        return tuple(asked)


def _leaves_behind(nodes: list[Any]) -> set[int]:
    seen: set[Any] = set()
    leaves: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes.extend(following for following, _ in node.next_functions)
    return leaves


_torch: Any = Variable  # untyped, for its engine is replaced by the wrapper
_lock = threading.Lock()
_installed: EngineWrapper | None = None


def join(participant: BackwardParticipant) -> None:
    """Registers a context: from now on backward runs through the wrapper."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = EngineWrapper(_torch._execution_engine)
            _torch._execution_engine = _installed
        _installed.join(participant)


def leave(participant: BackwardParticipant) -> None:
    """Undoes :func:`join`. The last context to leave restores the engine, unless the wrapper was wrapped meanwhile."""
    global _installed
    with _lock:
        if _installed is None:
            return
        _installed.leave(participant)
        if not _installed.participants and _torch._execution_engine is _installed:
            _torch._execution_engine = _installed._wrapped
            _installed = None


def participants() -> list[BackwardParticipant]:
    """The active contexts, without those of other runs on a shared device."""
    seat = _C.seat()
    with _lock:
        return [] if _installed is None else _installed.at(seat)


def everywhere() -> list[BackwardParticipant]:
    """The active contexts of all runs."""
    with _lock:
        return [] if _installed is None else list(_installed.participants)


def reached_by(roots: Sequence[torch.Tensor]) -> list[BackwardParticipant]:
    """The contexts whose graphs a backward from these roots runs through."""
    with _lock:
        installed = _installed
    return [] if installed is None else installed.reached_by(roots)


def windows_of(participants: Sequence[BackwardParticipant]) -> _C.Windows:
    """The backward windows of these models."""
    return _C.Windows([participant.core for participant in participants], _C.PassKind.BACKWARD)


def begin_backward(participant: BackwardParticipant) -> None:
    """Counts a backward that may accumulate gradients, before its window opens."""
    participant.backwards += 1
    if not participant.core.gate.in_backward:
        for table in participant.tables:
            table.backward_begins()


def holds(parameter: torch.Tensor) -> bool:
    """Whether an active context moves this host parameter, or rows of it."""
    with _lock:
        participants = _installed.participants if _installed is not None else []
        return any(
            known.face_of(parameter) is not None or any(table.host is parameter for table in known.tables)
            for known in participants
        )


def installed() -> bool:
    """Whether the wrapper is torch's engine now."""
    return isinstance(_torch._execution_engine, EngineWrapper)
