"""A stage of a plain module: a range of events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError, StateError
from hydra_ext.outputs import split
from hydra_ext.runtime.rounds.isolation import Surroundings
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
    """A stage program: the events [lo, hi) of a model that ``fn`` calls as a whole.

    A microbatch of a new kind (:func:`~hydra_ext.split.signature.signature_of`) is rehearsed first. Every rank makes
    this additional forward by itself, with random parameters in the blocks that it does not hold. Then the stage's
    forward is watched, which takes about twice the time. If parameters decide which path the forward takes, ranks'
    rehearsals may differ. Then the structures of the values that cross differ, which is an error.

    The last :data:`~hydra_ext.split.kinds.KINDS_KEPT` kinds are kept.

    A rehearsal calls ``fn`` on a copy of the microbatch: once, or twice if the first call leaves state behind. Before
    the first step ``fn`` is rehearsed in the same way and, if cuts are to be chosen, called four more times to time
    blocks. On all ranks but the last, the forward of a step ends ``fn`` early. So side effects of ``fn`` beside the
    model happen as often as it is called.

    After such an additional call, modules, memory that it wrote to, and generators that it drew from are restored.
    Counters and iterators of ``fn`` itself are not. The same holds if the first stage undoes a run because a microbatch
    takes another path than others of its kind.

    Raises:
        SplitError: In the forward: the model cannot be cut there for this kind of microbatch, or the forward did not
            take the path of the rehearsal.

    Attributes:
        own_begins: Called in every forward before the stage's first event.
        shares_microbatch: Whether another stage of this rank gets the same microbatch afterwards, unchanged.
    """

    def __init__(
        self, model: nn.Module, rehearsal: Rehearsal, lo: int, hi: int, *, device: torch.device | None = None
    ) -> None:
        """
        Args:
            model: Model that ``fn`` calls. At least the parameters that :func:`parameters_of` names must be real.
            rehearsal: Rehearsal of the kind of microbatch by which the cuts were chosen.
            device: Where the stage computes; by default, the device of the first parameter or buffer that is not on
                the meta device.

        Raises:
            SplitError: No cut can be made at ``lo`` or ``hi``.
        """
        count = len(rehearsal.events)
        if not 0 <= lo < hi <= count:
            raise SplitError(f"a stage cannot have the events [{lo}, {hi}): the model has {count} events")
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
        """Names of the blocks that the stage calls, in order."""
        return tuple(self._names[self._lo : self._hi])

    @property
    def rewritten(self) -> frozenset[str]:
        """Names of the tensors that glue writes to, over all :class:`~hydra_ext.split.rehearsal.record.Rehearsal`."""
        known = [rehearsal for of_kind in self._rehearsals.values() for rehearsal in of_kind.values()]
        return frozenset().union(*(rehearsal.rewritten for rehearsal in known))

    def forward(
        self, fn: Callable[..., Any], microbatch: Any, arriving: Crossing | None, *, seed: int, divisor: int
    ) -> SplitPass:
        """See :class:`~hydra_ext.split.stage_program.StageProgram`. Without grad mode the pass has no backward."""
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
        """The rehearsal of this kind of microbatch whose path begins with ``way``; None if there is none.

        Values can decide the path: a model may drop a mask that hides nothing. The first stage finds that out as it
        runs. Later stages learn it from the structure of the values that arrive.
        """
        known = self._rehearsals.get(signature, {})
        if arriving is not None:
            return known.get(arriving.structure.partition("/")[0])
        return next((each for each in known.values() if each.way[: len(way)] == way), None)

    def _undone(self, rehearsal: Rehearsal, microbatch: Any) -> AbstractContextManager[None]:
        """Undoes the run if it takes another path. Only the first stage finds that out by running."""
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
            torch.set_grad_enabled(grad_mode)  # the program may have ended between switching it off and on
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
                given.restore()  # another stage of this rank may get it, and begins a forward of its own
            for module, training in zip(self._model.modules(), rehearsal.training, strict=False):
                module.training = training  # the program may have ended between its eval() and train()
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
                    f"{key} has lost its graph on the way through a skipped block (a reentrant checkpoint around it?): "
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
                f"{len(self._names)}, {self._names}: make another pipeline for it"
            )
        for boundary in (self._lo, self._hi):
            if rehearsal.boundaries[boundary].reasons:
                raise SplitError(
                    f"no cut can be made before event {boundary} ({names[boundary]}): "
                    + "; ".join(rehearsal.boundaries[boundary].reasons)
                    + f". Cuts are possible before the events {rehearsal.possible_cuts}, or give stages= explicitly"
                )

    def _absent(self, rehearsal: Rehearsal) -> list[Tensor]:
        """The parameters and buffers that the stage's own part may not read.

        Raises:
            SplitError: One that it needs is absent.
        """
        needed = parameters_of(rehearsal, self._lo, self._hi, self._model)
        needed |= buffers_of(rehearsal, self._lo, self._hi, self._model)
        absent = []
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name not in needed:
                absent.append(tensor)
            elif is_absent(tensor):
                raise SplitError(
                    f"{name} is needed for the events [{self._lo}, {self._hi}) and is absent: load it first"
                )
        return absent

    def _arrive(self, rehearsal: Rehearsal, arriving: Crossing | None) -> tuple[Arrival, dict[Key, Tensor]]:
        keys = rehearsal.boundaries[self._lo].values
        crossing = arriving or Crossing((), (), _structure(rehearsal, 0))
        expected = _structure(rehearsal, self._lo)
        if crossing.structure != expected or len(crossing.tensors) != len(keys):
            raise SplitError(
                f"the stage before sent {len(crossing.tensors)} tensors of structure {crossing.structure}; this "
                f"stage's rehearsal has {len(keys)} of structure {expected}: the ranks' forwards do not take the same "
                "path, or their microbatches differ"
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
        """Takes the values for the next stage. The stage has ended before the event of the boundary."""
        border = self._rehearsal.boundaries[boundary]
        tensors = []
        for key in border.values:
            tensor = captured.get(key)
            value = self._rehearsal.values[key]
            if tensor is None:
                raise SplitError(f"the next stage needs {key}, which this stage neither made nor received")
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
        """Takes the result of ``fn``, in the last stage."""
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
            raise StateError("this microbatch's backward has already run in this stage: it can run only once")
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
        """Runs a block again for a checkpoint around it, with the random numbers of its event.

        The checkpoint has restored the random state from before the block, and that seed tells which event it is.
        """
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
    """The microbatch with copies of the tensors that a forward writes to.

    The next stage of this rank starts its own forward on the same microbatch, and would write to them again.

    Raises:
        SplitError: One of them requires a gradient, which a copy would not pass on.
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
                f"the forward writes to memory of the microbatch's {', '.join(wanted)}, which requires a gradient, and "
                "several stages of this rank get it: write to a clone() of it"
            )
    return own_copy(microbatch, only=written)


def _structure(rehearsal: Rehearsal, boundary: int) -> str:
    return f"{rehearsal.digest}/{boundary}"
