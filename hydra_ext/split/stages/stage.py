"""A stage of a plain module: a range of events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError, StateError
from hydra_ext.runtime.rounds.isolation import Surroundings
from hydra_ext.runtime.rounds.microbatch import split
from hydra_ext.split.attempt import undone_on_another_way
from hydra_ext.split.blocks import blocks_call, find_blocks
from hydra_ext.split.kinds import KnownRehearsals
from hydra_ext.split.metrics import tensors_inside, without_graph
from hydra_ext.split.rehearsal.record import Key, Rehearsal
from hydra_ext.split.rehearsal.rehearse import rehearse
from hydra_ext.split.signature import signature_of
from hydra_ext.split.stage_program import Crossing
from hydra_ext.split.stages.ownership import buffers_of, parameters_of
from hydra_ext.split.stages.randomness import EventRandomness
from hydra_ext.split.stages.run import OtherWay, StageDone, StageRun
from hydra_ext.split.stages.stand_ins import device_of, is_absent
from hydra_ext.split.stages.tensors import Arrival, StandIns
from hydra_ext.split.stages.values import StageValues
from hydra_ext.split.stages.watch import StandInWatch
from hydra_ext.state.arguments import named_tensors, own_copy
from hydra_ext.state.copies import sharing
from hydra_ext.state.layout import copied
from hydra_ext.state.randomness import RandomState
from hydra_ext.state.snapshot import Snapshot


class SplitStage:
    """The events [lo, hi) of a model that is called as a whole by ``fn``; a stage program.

    A microbatch of a new kind (:func:`~hydra_ext.split.signature.signature_of`) is rehearsed first: one more
    forward, which every rank makes by itself, with random parameters in the blocks that it does not hold. Then its
    forward is watched, which takes about twice the time. Should a rank's rehearsal differ from another's, because
    parameters decide which way the forward takes, then the structures of what crosses differ, and that is an error.

    The last :data:`~hydra_ext.split.kinds.KINDS_KEPT` kinds are remembered.

    ``fn`` is called once more for that, on a copy of the microbatch (twice where tensors stay on modules), and on all
    ranks but the last it ends early: what it does beside calling the model it does as often. Before the first step it
    is called 1 + 4 times more, to rehearse and, where cuts are to be chosen, to time. Modules, the memory that it
    writes to, and generators it draws from are afterwards as if it had not been; counters and iterators of its own are
    not. Likewise where the first stage finds that a microbatch takes another way than others of its kind.

    Raises:
        SplitError: from the forward: the model cannot be cut there for this kind of microbatch, or the forward did not
            take the way of the rehearsal.

    Attributes:
        own_begins: called in every forward before the stage's first event.
        shares_microbatch: another stage here gets the same one afterwards, as it was.
    """

    def __init__(
        self, model: nn.Module, rehearsal: Rehearsal, lo: int, hi: int, *, device: torch.device | None = None
    ) -> None:
        """
        Args:
            model: that ``fn`` calls; at least the parameters that :func:`parameters_of` names must be real.
            rehearsal: of the kind of microbatch by which the cuts were chosen.
            device: of the computation; that of the first real parameter where not given.

        Raises:
            SplitError: there can be no cut at ``lo`` or ``hi``.
        """
        count = len(rehearsal.events)
        if not 0 <= lo < hi <= count:
            raise SplitError(f"a stage of the events [{lo}, {hi}): the model has {count}")
        self._model = model
        self._lo, self._hi = lo, hi
        self._names = [event.name for event in rehearsal.events]
        self._blocks = find_blocks(model, rehearsal.blocks)
        self._device = device or device_of(model)
        self._stand_ins = StandIns(self._device)
        self._rehearsals = KnownRehearsals(rehearsal)
        self.own_begins: Callable[[], None] = _nothing
        self.shares_microbatch = False
        self._check(rehearsal)

    @property
    def events(self) -> tuple[str, ...]:
        """Names of the blocks that are called in it, in this order."""
        return tuple(self._names[self._lo : self._hi])

    @property
    def rewritten(self) -> frozenset[str]:
        """That of all rehearsals; see :class:`~hydra_ext.split.rehearsal.record.Rehearsal`."""
        known = [rehearsal for of_kind in self._rehearsals.values() for rehearsal in of_kind.values()]
        return frozenset().union(*(rehearsal.rewritten for rehearsal in known))

    def forward(
        self, fn: Callable[..., Any], microbatch: Any, arriving: Crossing | None, *, seed: int, divisor: int
    ) -> SplitPass:
        """See :class:`~hydra_ext.split.stage_program.StageProgram`; without grad mode there is no backward."""
        signature = signature_of(self._model, fn, microbatch)
        way: tuple[str, ...] = ()
        while True:
            rehearsal = self._find(signature, arriving, way)
            if rehearsal is None:
                rehearsal = rehearse(
                    self._model, fn, microbatch, seed=seed, blocks=list(self._blocks), device=self._device
                )
                self._check(rehearsal)
                self._rehearsals.add(rehearsal)
            self._rehearsals.use(rehearsal)
            try:
                with self._undone(rehearsal, microbatch):
                    return self._forward(rehearsal, fn, microbatch, arriving, seed, divisor)
            except OtherWay as other:
                if len(other.way) <= len(way):
                    raise SplitError(other.message) from None
                way = other.way

    def _find(self, signature: Hashable, arriving: Crossing | None, way: tuple[str, ...]) -> Rehearsal | None:
        """That of this kind of microbatch which began in this way.

        Values can decide about the way: a mask that hides nothing may be left out by the model. The first stage sees
        it as it goes, and the others are told by what arrives.
        """
        known = self._rehearsals.get(signature, {})
        if arriving is not None:
            return known.get(arriving.structure.partition("/")[0])
        return next((each for each in known.values() if each.way[: len(way)] == way), None)

    def _undone(self, rehearsal: Rehearsal, microbatch: Any) -> AbstractContextManager[None]:
        """Only the first stage finds out by going that it is another way."""
        if self._lo > 0:
            return nullcontext()
        return undone_on_another_way(self._model, rehearsal.lasting, microbatch)

    def _forward(
        self,
        rehearsal: Rehearsal,
        fn: Callable[..., Any],
        microbatch: Any,
        arriving: Crossing | None,
        seed: int,
        divisor: int,
    ) -> SplitPass:
        is_watched = self._rehearsals.is_watched(rehearsal)
        watch = None if is_watched else StandInWatch(self._stand_ins, self._absent(rehearsal))
        surroundings, grad_mode = Surroundings(self._device), torch.is_grad_enabled()
        torch.clear_autocast_cache()
        try:
            result = self._run(rehearsal, fn, microbatch, arriving, EventRandomness(self._device, seed), watch, divisor)
        finally:
            torch.clear_autocast_cache()
            surroundings.restore()
            torch.set_grad_enabled(grad_mode)  # the program may have been ended between its switching off and on
        self._rehearsals.note_watched(rehearsal)
        return result

    def _run(
        self,
        rehearsal: Rehearsal,
        fn: Callable[..., Any],
        microbatch: Any,
        arriving: Crossing | None,
        randomness: EventRandomness,
        watch: StandInWatch | None,
        divisor: int,
    ) -> SplitPass:
        arrival, arrived = self._arrive(rehearsal, arriving)
        values = StageValues(rehearsal, self._hi, arrived, self._stand_ins, watch)
        run = StageRun(rehearsal, self._lo, self._hi, values, randomness, self.own_begins)
        passed = SplitPass(rehearsal, self._blocks, randomness, arrival)
        passed.generators = RandomState(host=False, own=rehearsal.lasting.alive())
        if self.shares_microbatch:
            microbatch = _with_own_written(microbatch, rehearsal)
        given = None if self._is_last else Snapshot(microbatch)
        randomness.begin()
        output: Any = None
        try:
            with blocks_call(self._blocks, run.call_block), watch or nullcontext(), run:
                output = fn(microbatch)
            run.check_end()
        except StageDone:
            if given is not None:
                given.restore()  # another stage of this rank gets it, and its forward begins anew
            for module, training in zip(self._model.modules(), rehearsal.training, strict=False):
                module.training = training  # the program may have been ended between its eval() and train()
        except (SplitError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if run.own:
                raise
            raise SplitError(
                f"fn failed while the events before {self._lo} were skipped: {type(error).__name__}: {error}"
            ) from error
        for key, tensor in arrived.items():
            if rehearsal.values[key].requires_grad and torch.is_grad_enabled() and not tensor.requires_grad:
                raise SplitError(
                    f"{key} has lost its graph on the way through a skipped block (a reentrant checkpoint round it?): "
                    "use checkpoint(..., use_reentrant=False)"
                )
        if self._is_last:
            passed.end(output, divisor, values.watch)
        else:
            passed.leave(values.captured, self._hi)
        return passed

    @property
    def _is_last(self) -> bool:
        return self._hi == len(self._names)

    def _check(self, rehearsal: Rehearsal) -> None:
        names = [event.name for event in rehearsal.events]
        if names != self._names:
            raise SplitError(
                f"this kind of microbatch calls {len(names)} blocks, {names}; the cuts were chosen for "
                f"{len(self._names)}, {self._names}: make a pipeline of its own for it"
            )
        for boundary in (self._lo, self._hi):
            if rehearsal.boundaries[boundary].reasons:
                raise SplitError(
                    f"no cut can be made before event {boundary} ({names[boundary]}): "
                    + "; ".join(rehearsal.boundaries[boundary].reasons)
                    + f". Cuts are possible before the events {rehearsal.possible_cuts}, or give stages= explicitly"
                )

    def _absent(self, rehearsal: Rehearsal) -> list[Tensor]:
        """What the stage's own part may not read."""
        needed = parameters_of(rehearsal, self._lo, self._hi, self._model)
        needed |= buffers_of(rehearsal, self._lo, self._hi, self._model)
        absent = []
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name not in needed:
                absent.append(tensor)
            elif is_absent(tensor):
                raise SplitError(
                    f"{name} is needed for the events [{self._lo}, {self._hi}) and is not there: load it before"
                )
        return absent

    def _arrive(self, rehearsal: Rehearsal, arriving: Crossing | None) -> tuple[Arrival, dict[Key, Tensor]]:
        keys = rehearsal.boundaries[self._lo].values
        crossing = arriving or Crossing((), (), _structure(rehearsal, 0))
        expected = _structure(rehearsal, self._lo)
        if crossing.structure != expected or len(crossing.tensors) != len(keys):
            raise SplitError(
                f"what the stage before sent ({crossing.structure}, {len(crossing.tensors)} tensors) is not what this "
                f"stage's rehearsal says ({expected}, {len(keys)}): the ranks' forwards do not take the same way, or "
                "their microbatches differ"
            )
        for key, tensor in zip(keys, crossing.tensors, strict=True):
            if tensor.shape != rehearsal.values[key].shape or tensor.dtype != rehearsal.values[key].dtype:
                raise SplitError(
                    f"{key} arrived as {tensor.dtype} {tuple(tensor.shape)}; in the rehearsal it was "
                    f"{rehearsal.values[key].dtype} {tuple(rehearsal.values[key].shape)}"
                )
        arrival = Arrival(crossing.tensors, crossing.requires_grad)
        return arrival, dict(zip(keys, arrival.tensors, strict=True))


class SplitPass:
    """One microbatch in one stage; see :class:`~hydra_ext.split.stage_program.StagePass`."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        blocks: dict[str, nn.Module],
        randomness: EventRandomness,
        arrival: Arrival,
    ) -> None:
        self._rehearsal = rehearsal
        self._blocks = blocks
        self._randomness = randomness
        self._gradients = arrival.gradients
        self._roots: list[Tensor] | None = []
        self.leaving: Crossing | None = None
        self.loss: Tensor | None = None
        self.metrics: Any = None
        self.generators = RandomState(host=False)

    def leave(self, captured: dict[Key, Tensor], boundary: int) -> None:
        """The stage has ended before the boundary's event."""
        border = self._rehearsal.boundaries[boundary]
        tensors = []
        for key in border.values:
            tensor = captured.get(key)
            value = self._rehearsal.values[key]
            if tensor is None:
                raise SplitError(f"{key} was not made by this stage, nor did it arrive")
            if tensor.requires_grad != value.requires_grad:
                raise SplitError(
                    f"{key} {'requires' if tensor.requires_grad else 'does not require'} a gradient, unlike in the "
                    "rehearsal (a reentrant checkpoint? use checkpoint(..., use_reentrant=False))"
                )
            tensors.append(tensor)
        self._roots = tensors
        self.leaving = Crossing(
            tuple(
                copied(tensor) if key in border.copied else tensor.detach()
                for key, tensor in zip(border.values, tensors, strict=True)
            ),
            tuple(tensor.requires_grad for tensor in tensors),
            _structure(self._rehearsal, boundary),
        )

    def end(self, output: Any, divisor: int, watch: StandInWatch) -> None:
        """``fn`` has returned."""
        loss, metrics = split(output)
        for name, tensor in (("the loss", loss), *(("a metric", tensor) for tensor in tensors_inside(metrics))):
            if watch.what(tensor):
                raise SplitError(f"{name} depends on {watch.what(tensor)}, which the rehearsal did not see")
        if torch.is_grad_enabled():
            if not loss.requires_grad or loss.numel() != 1:
                raise ValueError(
                    f"fn returned a loss of shape {tuple(loss.shape)}"
                    + ("" if loss.requires_grad else " that depends on no trainable parameter")
                    + ": return a scalar to run backward from"
                )
            self._roots = [loss / divisor if divisor != 1 else loss]
        self.loss = loss.detach()
        self.metrics = without_graph(metrics)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """See :class:`~hydra_ext.split.stage_program.StagePass`."""
        if self._roots is None:
            raise StateError("this microbatch's backward has run in this stage: it can run once")
        roots, self._roots = self._roots, None
        received: Sequence[Tensor | None] = gradients if self.leaving is not None else [None]
        wanted = [
            (root, gradient)
            for root, gradient in zip(roots, received, strict=True)
            if root.requires_grad and (gradient is not None or self.leaving is None)
        ]
        if wanted:
            with blocks_call(self._blocks, self._call_again):
                torch.autograd.backward([root for root, _ in wanted], [gradient for _, gradient in wanted])
        return tuple(self._gradients)

    def _call_again(
        self, name: str, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A checkpoint round a block, which has brought back the random state from before it: that tells the event."""
        number = self._event_seeded(torch.initial_seed())
        if number is None or self._rehearsal.events[number].name != name:
            return forward(*args, **kwargs)
        self._randomness.enter(number)
        try:
            return forward(*args, **kwargs)
        finally:
            self._randomness.leave(number)

    def _event_seeded(self, seed: int) -> int | None:
        before = (self._randomness.before(number) for number in range(len(self._rehearsal.events)))
        return next((number for number, other in enumerate(before) if other == seed), None)


def _nothing() -> None:
    pass


def _with_own_written(microbatch: Any, rehearsal: Rehearsal) -> Any:
    """The microbatch with copies of what a forward writes to: the next stage's begins anew, and would do so again.

    Raises:
        SplitError: a gradient of it is wanted, which a copy would not hand on.
    """
    names = {name for kind, name in rehearsal.lasting.named if kind == "input"}
    if not names:
        return microbatch
    places = {id(tensor): name for name, tensor in named_tensors(microbatch)}
    written = {id(tensor) for name, tensor in named_tensors(microbatch) if name in names}
    for group in sharing(tensor for _, tensor in named_tensors(microbatch)):
        wanted = [places[id(tensor)] for tensor in group if tensor.requires_grad]
        if wanted and any(id(tensor) in written for tensor in group):
            raise SplitError(
                f"the forward writes to memory of the microbatch's {', '.join(wanted)}, of which a gradient is wanted, "
                "and several stages of this rank get it: write to a clone() of it"
            )
    return own_copy(microbatch, only=written)


def _structure(rehearsal: Rehearsal, boundary: int) -> str:
    return f"{rehearsal.digest}/{boundary}"
