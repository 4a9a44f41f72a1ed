"""Undoes a round, or a whole step, that has run out of device memory or does not act as a loop.

A round whose backward has not begun has added to no gradient, so it alone is undone. Otherwise the whole step is: a
round's summands cannot be removed from floating-point sums, and copies of the sums before each round would slow every
step down. Gradients from before the step are copied, if there are any. Gradients of the step are dropped.

Notes of all modules before each microbatch would slow every step down, too. So a round may join earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.optim.rows import gradient_of
from hydra_ext.runtime import engine
from hydra_ext.runtime.rounds.undoing.buffers import ModelBuffers, NotedBuffer, differs, note, restore, written
from hydra_ext.runtime.rounds.undoing.holders import Holding, holdings
from hydra_ext.runtime.rounds.undoing.module_contents import Copies, ModuleContents, without
from hydra_ext.state.layout import copied
from hydra_ext.state.randomness import RandomState


class UndoOwner(engine.BackwardParticipant, Protocol):
    """The run whose steps are undone.

    Attributes:
        spills: Whether gradients may be on the disk.
    """

    layout: Layout
    optimizer: torch.optim.Optimizer | None
    spills: bool


class Training:
    """Which parameters are trained at one moment: a forward may change ``requires_grad``.

    Args:
        models: The run's own model first.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._own = set(models[0].modules()) if len(models) > 1 else None  # None: all modules
        self._noted = [
            (module, name, parameter, parameter.requires_grad)
            for model in models
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(prefix, recurse=False)
        ]

    def changed_elsewhere(self) -> list[str]:
        """Names of other models' parameters that are trained no more or anew."""
        own = self._own
        others = [] if own is None else [noted for noted in self._noted if noted[0] not in own]
        return [name for _, name, parameter, trained in others if parameter.requires_grad != trained]

    def restore(self, elsewhere: Collection[nn.Module]) -> None:
        for module, _, parameter, trained in self._noted:
            if parameter.requires_grad != trained and module not in elsewhere:
                parameter.requires_grad_(trained)


@dataclass(frozen=True)
class _Moment:
    """The state before a round. Each round restores torch's random states itself."""

    buffers: Sequence[NotedBuffer]
    contents: ModuleContents
    training: Training
    randomness: RandomState

    def restore(self, elsewhere: Collection[nn.Module]) -> None:
        """Restores the state, without that of the modules ``elsewhere``."""
        restore([noted for noted in self.buffers if noted.module not in elsewhere])
        self.randomness.restore()
        without(self.contents, elsewhere).restore()
        self.training.restore(elsewhere)


@dataclass(frozen=True)
class _NotedGradient:
    tensor: Tensor
    gradient: Tensor | None
    version: int = 0
    copy: Tensor | None = None


class Gradients:
    """The gradients of tensors before a step, with copies so that they can be restored."""

    def __init__(self, owner: UndoOwner) -> None:
        self._core = owner.core
        # host_budget= may leave no memory for copies of the gradients that it counts, which are the parameters'.
        self._uncopied = {id(parameter) for parameter in owner.model.parameters()} if owner.spills else set()
        self._noted: dict[int, _NotedGradient] = {}
        self._at_home: list[tuple[int, int, Tensor]] = []  # block, index of the parameter, copy
        self._lost = False
        for block in owner.core.homes.on_device:
            self._note_home(block, [parameter for _, parameter in owner.layout.blocks[block].parameters])
        self.note(owner.model.parameters())
        groups = [] if owner.optimizer is None else owner.optimizer.param_groups
        self.note(parameter for group in groups for parameter in group["params"])

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Notes the gradients of those tensors that were not noted before."""
        for tensor in tensors:
            if id(tensor) in self._noted:
                continue
            gradient = tensor.grad
            noted = _NotedGradient(tensor, None) if gradient is None else self._copied(tensor, gradient)
            self._noted[id(tensor)] = noted

    def _copied(self, tensor: Tensor, gradient: Tensor) -> _NotedGradient:
        if id(tensor) in self._uncopied:
            self._lost = True
            return _NotedGradient(tensor, gradient, gradient._version)
        with torch.no_grad(), _C.Uncharged():
            if gradient.is_sparse:
                return _NotedGradient(tensor, _sparse_copy(gradient))
            return _NotedGradient(tensor, gradient, gradient._version, gradient.detach().clone())

    def _note_home(self, block: int, parameters: Sequence[Tensor]) -> None:
        """Notes the gradients of a block at home on the device, without moving the block.

        Access to the bytes of ``grad`` would bring the whole block to the host.
        """
        if all(parameter.grad is None for parameter in parameters):
            return
        with torch.no_grad(), _C.Uncharged():
            for index, gradient in enumerate(self._core.gradients.take_gathered(block)):
                parameter = parameters[index]
                if gradient is not None and parameter.grad is not None:
                    self._noted[id(parameter)] = _NotedGradient(parameter, parameter.grad, parameter.grad._version)
                    self._at_home.append((block, index, gradient.to("cpu")))

    @property
    def obstacle(self) -> str:
        """Why the gradients cannot be restored; empty if they can."""
        if self._lost:
            return "there were gradients before the step, and host_budget= leaves no room for a copy of them"
        if any(noted.tensor._post_accumulate_grad_hooks for noted in self._noted.values()):
            return "hooks run when gradients have been accumulated, and their effects would happen twice"
        return ""

    @torch.no_grad()
    def restore(self) -> None:
        for noted in self._noted.values():
            if gradient_of(noted.tensor) is not noted.gradient:
                noted.tensor.grad = noted.gradient
            if noted.gradient is not None and noted.copy is not None and noted.gradient._version != noted.version:
                noted.gradient.copy_(noted.copy)
        for block, index, copy in self._at_home:
            self._core.gradients.return_gathered(block, index, copy)


def _sparse_copy(gradient: Tensor) -> Tensor:
    """A copy that takes the gradient's place. Its values have gaps where the gradient's have: sums depend on that."""
    return torch.sparse_coo_tensor(
        gradient._indices().clone(),
        copied(gradient._values()),
        gradient.shape,
        check_invariants=False,
        is_coalesced=gradient.is_coalesced(),
    )


class Overwritten:
    """Parameters that the step has written to, with their numbers from before, so that they can be restored.

    Any model that is offloaded at present may be one that the user's function uses, or that another thread trains.
    """

    def __init__(self, owner: UndoOwner) -> None:
        self._own = owner.model
        others = [(other.model, other.core) for other in engine.participants() if other is not owner]
        self._logs = [
            (owner.model, owner.core.changes.log_overwritten(is_own=True)),
            *((model, core.changes.log_overwritten(is_own=False)) for model, core in others),
        ]
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}  # before the step's first write to each
        self._round: dict[int, tuple[Tensor, Tensor]] = {}
        tables = [
            *owner.tables,
            *(table for other in engine.participants() if other is not owner for table in other.tables),
        ]
        self._tables = [table.log_overwritten() for table in tables]
        self._seen = [0 for _ in tables]  # writes to each table that names() has told
        self._before_round = [0 for _ in tables]  # writes to each table when the round began

    def elsewhere(self) -> set[nn.Module]:
        """Modules of models that other threads have entered since the step began, and the step's threads have not."""
        theirs = [model for model, log in self._logs if log.is_elsewhere]
        return {module for model in theirs for module in model.modules()} - {*self._own.modules()} if theirs else set()

    def round_begins(self) -> None:
        self.names()
        self._earlier = self._round | self._earlier
        self._round = {}
        self._before_round = [len(log) for log in self._tables]

    def names(self) -> list[str]:
        """Those that were written to since the last call."""
        found = [each for _, log in self._logs for each in log.take()]
        self._round = {id(parameter): (parameter, before) for _, parameter, before in found} | self._round
        writes = [len(log) for log in self._tables]
        tables = [log.name for log, seen, now in zip(self._tables, self._seen, writes, strict=True) if now > seen]
        self._seen = writes
        return [*(name for name, _, _ in found), *tables]

    @torch.no_grad()
    def restore(self, *, whole: bool) -> None:
        """Restores those of the ``whole`` step, or of the round."""
        self.names()
        for parameter, before in [*self._round.values(), *(self._earlier.values() if whole else ())]:
            parameter.copy_(before)
        for _, log in self._logs:
            log.take()  # the writes above
        for table, before in zip(self._tables, self._before_round, strict=True):
            table.undo(0 if whole else before)
        self._seen = [len(table) for table in self._tables]
        self._round = {}
        if whole:
            self._earlier = {}


def models_of(owner: UndoOwner) -> list[nn.Module]:
    return [owner.model, *(other.model for other in engine.participants() if other.model is not owner.model)]


class Undo:
    """Notes the state before rounds and steps of one run, and restores it."""

    def __init__(self) -> None:
        self._buffers = ModelBuffers()
        self._copies = Copies()
        self._round: _Moment | None = None
        self._step: _Moment | None = None
        self._gradients: Gradients | None = None
        self._overwritten: Overwritten | None = None
        self._after_forward: Sequence[NotedBuffer] = ()
        self._contents = ModuleContents()
        self._joins = self._wrote_early = False
        self._backwards = self._backwards_before = 0  # the owner's count when the round, and the step, began

    def step_begins(self, owner: UndoOwner, *, joins: bool) -> None:
        """A step begins. ``joins``: its rounds may be undone together with earlier ones."""
        self._step, self._joins = None, joins
        self._gradients = Gradients(owner)
        self._overwritten = Overwritten(owner)
        self._backwards_before = owner.backwards

    def round_begins(self, owner: UndoOwner, *, one_at_a_time: bool) -> None:
        """Notes the state, unless the round joins the step's earlier ones. Those that run together do not."""
        if self._overwritten is not None:
            self._overwritten.round_begins()
        can_join = self._joins and one_at_a_time and self._step is not None and self._step.contents.can_be_restored
        if can_join and not self.step_cannot_be_undone() and self.join_rounds(owner):
            return
        models = models_of(owner)
        self._contents = ModuleContents.of(models, self._copies)
        buffers = self._buffers.note(models)
        self._round = _Moment(buffers, self._contents, Training(models), RandomState())
        self._wrote_early = False
        self._step = self._step or self._round
        self._backwards = owner.backwards

    def forward_ended(self, owner: UndoOwner) -> list[Holding]:
        """Notes the state after the round's forward. Returns the state that it has written to in place."""
        if self._round is None:
            return []
        models, contents = models_of(owner), self._round.contents
        self._after_forward = self._buffers.note(models)
        self._contents = contents.again()
        changed = written(self._round.buffers, self._after_forward)
        return holdings(models, [*((noted.module, noted.buffer) for noted in changed), *contents.written()])

    def _elsewhere(self) -> Collection[nn.Module]:
        return () if self._overwritten is None else self._overwritten.elsewhere()

    def overwritten(self) -> list[str]:
        """The parameters that were written to since the round began, or the last call.

        Those of other models also count if they are trained no more or anew; a round keeps its own model's apart.
        """
        changed = [] if self._round is None else self._round.training.changed_elsewhere()
        return changed if self._overwritten is None else self._overwritten.names() + changed

    def backward_has_written(self) -> bool:
        """Whether the round's backward has written to buffers or other state of modules.

        Hooks can do so, and user checkpoints, which run the forward again.
        """
        return self._wrote_early or any(map(differs, self._after_forward)) or bool(self._contents.written())

    @contextmanager
    def last_piece(self, *, buffers: bool) -> Iterator[None]:
        """A context for a backward before all forwards have ended, in which its writes are detected.

        Args:
            buffers: Whether to check buffers, as it is unknown whether backward writes to them.
        """
        noted = note({buffer.module for buffer in self._round.buffers}) if self._round is not None and buffers else ()
        contents = self._contents.again()
        yield
        self._wrote_early = self._wrote_early or any(map(differs, noted)) or bool(contents.written())

    def generators(self) -> Sequence[Any]:
        """The generators of random numbers that modules hold."""
        return self._round.contents.generators if self._round is not None else ()

    def note_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Notes the gradients of these tensors, to which a backward is about to add."""
        if self._gradients is not None:
            self._gradients.note(tensors)

    def ended(self) -> None:
        """Drops the notes: nothing can be undone from now on."""
        self._round = self._step = self._gradients = self._overwritten = None
        self._after_forward, self._contents = (), ModuleContents()

    def moved_gradients(self, owner: UndoOwner) -> bool:
        """Whether a backward has begun since the round did."""
        return owner.backwards != self._backwards

    def join_rounds(self, owner: UndoOwner) -> bool:
        """Makes the round undoable only together with the step's earlier rounds. Returns whether there are any."""
        self._backwards = self._backwards_before
        return self.moved_gradients(owner)

    def step_cannot_be_undone(self) -> bool:
        """Whether the step cannot be undone because of its gradients."""
        return self._gradients is not None and bool(self._gradients.obstacle)

    def obstacle(self, *, whole: bool) -> str:
        """Why the round, or the ``whole`` step, cannot be undone; empty if it can."""
        moment = self._step if whole else self._round
        if moment is None or (whole and self._gradients is None):
            return "nothing of it was noted"
        gradients = self._gradients.obstacle if whole and self._gradients is not None else ""
        return gradients or without(moment.contents, self._elsewhere()).obstacle()

    def undo(self, *, whole: bool) -> None:
        """Undoes the ``whole`` step, or only the round, which must not have added to any gradient."""
        moment = self._step if whole else self._round
        self._wrote_early = False
        if moment is not None:
            moment.restore(self._elsewhere())
        if self._overwritten is not None:
            self._overwritten.restore(whole=whole)
        if whole and self._gradients is not None:
            self._gradients.restore()
