"""Events of a rehearsal: what a block's call was given, returned, wrote to and left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.split.rehearsal.operations import VALUE_OPERATIONS, Operation
from hydra_ext.split.rehearsal.record import (
    PLAIN,
    Argument,
    Constant,
    InnerCall,
    Key,
    Leaf,
    Made,
    Structure,
    program_of,
)
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.rehearsal.usage import Running, Usage
from hydra_ext.split.stages.randomness import EventRandomness
from hydra_ext.split.stages.tensors import Arrival
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import storage_key


@dataclass
class EventDraft:
    """An :class:`~hydra_ext.split.rehearsal.record.Event` under construction."""

    index: int
    name: str
    step: int
    calls_before: int
    output: Any = None
    structure: Structure | None = None
    written: tuple[tuple[int, Key], ...] = ()
    inner: list[InnerCall] = field(default_factory=list)
    attributes: list[tuple[str, str, Key]] = field(default_factory=list)


class EventRecorder:
    """Records each call of a block, before and after its forward."""

    def __init__(self, recorder: Recorder, randomness: EventRandomness) -> None:
        self._recorder = recorder
        self._notes = recorder.notes
        self._values = recorder.values
        self._randomness = randomness
        self.events: list[EventDraft] = []

    @contextmanager
    def event(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[EventDraft]:
        """Records one event. The body runs the block's forward and sets ``output``, which is replaced at the end."""
        recorder = self._recorder
        arguments = [*tensors_in((args, kwargs))]
        event = EventDraft(len(self.events), name, recorder.cuts.next_step(), len(recorder.calls))
        self.events.append(event)
        recorder.usages.append(Usage())
        recorder.event_steps.append(event.step)
        recorder.running = running = Running(event.index, arguments)
        self._refuse_backward_hooks(event, block)
        numbers = _numbers(block)
        hook = torch.nn.modules.module.register_module_forward_hook(self._inner_hook(event, block))
        self._randomness.enter(event.index)
        try:
            yield event
        finally:
            hook.remove()
            self._randomness.leave(event.index)
        recorder.values.note_written_graphs()
        event.written = self._first_writes(running)
        self._note_attributes(event, block, numbers)
        event.output = self._note_output(event, running)
        for note in recorder.notes.contents():
            if note.values and note.event == event.index:
                note.event, note.tainted = None, True
        recorder.notes.purge()
        recorder.running = None

    def after(self, event: Running, operation: Operation, results: list[Tensor]) -> None:
        """Records an operation that has run in this event."""
        usage = self._recorder.usages[event.index]
        event.reads_values |= operation.name in VALUE_OPERATIONS
        given = {storage_key(tensor) for tensor in operation.tensors}
        for tensor in operation.reads:
            note = self._notes.get(tensor)
            if note is None or note.event == event.index:
                continue
            usage.roots |= note.roots
            if note.tainted or note.values or note.event is not None:
                self._read_in_event(event, tensor, note)
        for tensor in operation.writes:
            note = self._notes.get(tensor) or self._notes.put(tensor, Note(event=event.index, foreign=True))
            if note.event == event.index:
                continue
            self._recorder.note_write(note)
            usage.writes |= note.state
            if not note.tainted and not note.state:
                event.written.append(storage_key(tensor))
        for tensor in results:
            if self._notes.get(tensor) is None and storage_key(tensor) not in given:
                self._notes.put(tensor, Note(event=event.index, made=self._recorder.cuts.step))

    def _read_in_event(self, event: Running, tensor: Tensor, note: Note) -> None:
        if not self._recorder.is_known(tensor, note):
            return
        arguments = [
            t for t in event.arguments if storage_key(t) == storage_key(tensor) and self._values.key_of(t) is not None
        ]
        for read in arguments or [tensor]:
            self._values.use(read)

    def _first_writes(self, event: Running) -> tuple[tuple[int, Key], ...]:
        """The arguments whose memory depends on events only since this event wrote to it, and their new values."""
        found = self._values.make_written(Key("event", event.index, "argument"), event.arguments, set(event.written))
        known = {storage_key(event.arguments[position]) for position, _ in found}
        for memory in set(event.written) - known:
            note = self._notes.at(memory)
            if note is not None:
                note.event = event.index  # later reads of it cannot be followed
        return found

    def _refuse_backward_hooks(self, event: EventDraft, block: nn.Module) -> None:
        """Backward hooks are set up around the block's forward: a stage that skips the block would run them wrongly."""
        if block._backward_hooks or block._backward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
            self._recorder.refuse(
                f"block {event.name} has backward hooks, which would run wrongly where the block is skipped: register "
                "them on a module inside it, or cut earlier",
                after=event.step - 1,
            )

    def _inner_hook(self, event: EventDraft, block: nn.Module) -> Any:
        names = {module: name for name, module in block.named_modules() if name}

        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            if module not in names or not module._forward_hooks:
                return
            leaves, tree = tree_flatten(output)
            number = len(event.inner)
            if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
                return
            found = tuple(self._value(event, f"inner {number} {i}", leaf) for i, leaf in enumerate(leaves))
            hooks = tuple(map(program_of, module._forward_hooks.values()))
            event.inner.append(InnerCall(names[module], Structure(found, tree), hooks))

        return hook

    def _value(self, event: EventDraft, place: str, leaf: Any) -> Leaf:
        if not isinstance(leaf, Tensor):
            return Constant(leaf)
        known = self._values.key_of(leaf)
        if known is not None:
            return Made(known)
        return Made(self._values.make(Key("event", event.index, place), leaf))

    def _note_attributes(self, event: EventDraft, block: nn.Module, numbers: dict[tuple[str, str], float]) -> None:
        """Notes the tensors that the event set on modules: a stage that skips the event sets them itself.

        It could not do so for numbers, which look like constants. So a number that may depend on a tensor's elements
        rules out later cuts.
        """
        recorder = self._recorder
        for place, number in _numbers(block).items():
            if recorder.running is not None and recorder.running.reads_values and numbers.get(place) != number:
                recorder.refuse(
                    f"block {event.name} reads a value into Python and sets the number {'.'.join(place)}, which a "
                    "stage that skips the block would not have: keep it as a tensor, or cut before the block",
                    after=event.step,
                )
        for name, module in block.named_modules():
            for attribute, value in list(module.__dict__.items()):
                if isinstance(value, Tensor):
                    note = recorder.notes.get(value)
                    if note is not None and note.event == event.index:
                        leaf = self._value(event, f"attribute {name} {attribute}", value)
                        if isinstance(leaf, Made):
                            event.attributes.append((name, attribute, leaf.key))

    def _note_output(self, event: EventDraft, running: Running) -> Any:
        """Notes the output's leaves, and detaches them from the block's graph so that the graph can be freed."""
        recorder = self._recorder
        leaves, tree = tree_flatten(event.output)
        found: list[Leaf] = []
        kept: dict[int, Tensor] = {}
        for i, leaf in enumerate(leaves):
            position = next((j for j, given in enumerate(running.arguments) if given is leaf), None)
            if position is not None:
                found.append(Argument(position))
                continue
            if not isinstance(leaf, (Tensor, *PLAIN)):
                recorder.refuse(
                    f"block {event.name} returns a {type(leaf).__name__}, which cannot be rebuilt where the block "
                    "is skipped: return tensors in tuples, lists or dicts, or cut before it",
                    after=event.step,
                )
            found.append(self._value(event, f"output {i}", leaf))
            note = recorder.notes.get(leaf) if isinstance(leaf, Tensor) else None
            if note is not None and note.event == event.index:
                note.tainted = True
                last = found[-1]
                if leaf.grad_fn is not None and isinstance(last, Made):
                    if id(leaf) not in kept:
                        kept[id(leaf)] = Arrival([leaf], [True]).tensors[0]
                        recorder.values.note_same(kept[id(leaf)], last.key)
                    leaves[i] = kept[id(leaf)]
        event.structure = Structure(tuple(found), tree)
        return tree_unflatten(leaves, tree) if kept else event.output


def _numbers(block: nn.Module) -> dict[tuple[str, str], float]:
    return {
        (name, attribute): value
        for name, module in block.named_modules()
        for attribute, value in module.__dict__.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
