"""The rehearsal: one forward of one microbatch that finds out what each cut would carry.

Blocks whose parameters are absent (on the meta device, or held by another stage) get random ones for the length of
their call. So a rehearsal needs the memory of the largest block and of the glue, not of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.errors import SplitError
from hydra_ext.runtime.rounds.isolation import Surroundings
from hydra_ext.split.blocks import blocks_call, find_blocks
from hydra_ext.split.rehearsal.conclusions import concluded
from hydra_ext.split.rehearsal.events import EventDraft, EventRecorder
from hydra_ext.split.rehearsal.glue import GlueRecorder
from hydra_ext.split.rehearsal.glue_mode import GlueMode
from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.split.rehearsal.operations import Operation, call_name
from hydra_ext.split.rehearsal.record import Rehearsal
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.rehearsal.replaced import ReplacedBuffers
from hydra_ext.split.signature import signature_of
from hydra_ext.split.stages.placing import PLACING, placed_in_rehearsal
from hydra_ext.split.stages.randomness import EventRandomness
from hydra_ext.split.stages.stand_ins import device_of, present, with_stand_ins
from hydra_ext.split.state.carried import (
    attribute_tensors,
    kept_elsewhere,
    left_on_modules,
    refuse_carried,
    refuse_shared_generators,
)
from hydra_ext.split.state.plain_state import PlainReads, PlainState
from hydra_ext.split.state.restoring import unchanged
from hydra_ext.state.arguments import own_copy, tensors_in
from hydra_ext.state.randomness import host_randomness_kept


def rehearse(
    model: nn.Module,
    fn: Callable[[Any], Any],
    microbatch: Any,
    *,
    seed: int = 0,
    blocks: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> Rehearsal:
    """Runs ``fn(microbatch)`` on copies of the microbatch's tensors, and finds what each cut would carry.

    ``fn`` runs once. If that run leaves state on modules or elsewhere, ``fn`` runs again to find the readers of that
    state. Parameters, buffers, attributes of modules, random states and gradients are restored afterwards. Other
    changes that ``fn`` makes (a counter of its own) stay.

    Args:
        model: Model that ``fn`` calls. Parameters of the glue must be real; those of blocks may be absent.
        seed: Seed of the microbatch, as for a stage.
        blocks: Names of the modules to take as blocks; by default they are found.
        device: Where the forward computes; by default, the device of the first parameter or buffer that is not on the
            meta device.

    Raises:
        SplitError: The forward cannot be followed at all. Reasons that only rule out some cuts are in the result.
    """
    found = find_blocks(model, blocks)
    device = device or device_of(model)
    signature = signature_of(model, fn, microbatch)
    recorder, again = Recorder(), Recorder()
    surroundings = Surroundings(device)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that two events share would look like one event's
    try:
        with host_randomness_kept(), unchanged(model, microbatch), with_stand_ins(model, device):
            before = dict(attribute_tensors(model))
            randomness = EventRandomness(device, seed)
            state = PlainState(recorder, model, fn)
            drafts = _run(recorder, state, model, found, fn, microbatch, randomness, device)
            training = tuple(module.training for module in model.modules())
            left = left_on_modules(recorder, model, before)
            kept = kept_elsewhere(recorder, model)
            if left or kept or state.left or state.given:
                for root, (_, memory) in kept.items():
                    again.notes.put_at(memory, Note(roots=frozenset({root}), foreign=True))
                reads = PlainReads(again, state, model)
                try:
                    _run(again, reads, model, found, fn, microbatch, randomness, device)
                finally:
                    reads.reads.end()
                refuse_carried(recorder, again, left | {root: events for root, (events, _) in kept.items()}, left)
                state.refuse(reads.reads, again, [draft.name for draft in drafts])
    finally:
        torch.set_autocast_cache_enabled(cached)
        for each in (again, recorder):
            each.undo.restore()
            each.drawn.put_back()
        surroundings.restore()
    generators = refuse_shared_generators(recorder)
    return concluded(recorder, drafts, found, signature, recorder.writes.lasting(generators), training)


def _run(
    recorder: Recorder,
    state: PlainState | PlainReads,
    model: nn.Module,
    blocks: dict[str, nn.Module],
    fn: Callable[[Any], Any],
    microbatch: Any,
    randomness: EventRandomness,
    device: torch.device,
) -> list[EventDraft]:
    for name, parameter in model.named_parameters():
        recorder.note_root(parameter, ("parameter", name))
    for name, buffer in (*model.named_buffers(), *attribute_tensors(model)):
        recorder.note_root(buffer, ("buffer", name))
    microbatch = own_copy(microbatch, lambda tensor, name: recorder.note_root(tensor, ("input", name)))
    events, glue = EventRecorder(recorder, randomness), GlueRecorder(recorder)
    buffers = ReplacedBuffers(recorder, model)

    def call(
        name: str, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if recorder.running is not None:
            return forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            buffers.end_glue()
            state.begin_event(args, kwargs)
        with (
            events.event(name, block, args, kwargs) as event,
            present(block, device, recorder.stands_for),
            buffers.during_event() as replaced,
            calls.in_block(seen=True),
        ):
            event.output = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            buffers.after_event(replaced)
            buffers.begin_glue()
            output, event.output = event.output, None  # the draft must not keep tensors of the forward alive
            state.end_event(name, args, kwargs, output)
        return output

    randomness.begin()
    with blocks_call(blocks, call), _Operations(recorder, events, glue), _Calls(recorder, glue) as calls:
        result = fn(microbatch)
    if not events.events:
        raise SplitError("fn called no block of the model: it must call the model that was given, or parts of it")
    glue.finish(result)
    buffers.end_glue()
    buffers.refuse_carried()
    state.end_glue()
    return events.events


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder, events: EventRecorder, glue: GlueRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._events = events
        self._glue = glue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In a compiled function no call of glue is under way, so that calls made here would be recorded as glue.
        with torch._C.DisableTorchFunction():
            return self._watched(func, args, kwargs or {})

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            raise SplitError("fn runs a backward of its own, whose graph a cut would tear: give stages= explicitly")
        operation = Operation.of(func, args, kwargs)
        self._recorder.before(operation)
        result = func(*args, **kwargs)
        running = self._recorder.running
        if self._recorder.placing:
            return result
        if running is not None:
            self._events.after(running, operation, [*tensors_in(result)])
        else:
            self._glue.after(operation, [*tensors_in(result)])
        return result


class _Calls(GlueMode):
    def __init__(self, recorder: Recorder, glue: GlueRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._glue = glue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PLACING:
            return placed_in_rehearsal(self._recorder, func, args)
        self._recorder.drawn.note(args, kwargs or {}, len(self._recorder.usages) - 1)
        name = call_name(func)
        if name is None or self._recorder.running is not None:
            return func(*args, **(kwargs or {}))
        return self._glue.call(name, func, args, kwargs or {})
