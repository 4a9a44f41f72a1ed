"""State that one microbatch leaves on the modules or elsewhere, and that the next may read.

A stage skips the events before its own, and ends its forward before the rest of the model has run. So state that is
carried from one microbatch to the next is right only if the same stage leaves it and reads it.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from hydra_ext.split.rehearsal.notes import Root
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.rehearsal.usage import MADE_ONCE
from hydra_ext.split.state.held import all_modules, entries, module_roots
from hydra_ext.state.memory import MemoryOf, storage_key


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that modules hold, also in containers and objects, except parameters and buffers."""
    for entry in entries(module_roots(all_modules(model))):
        if isinstance(entry.value, Tensor):
            yield entry.path, entry.value


def left_on_modules(recorder: Recorder, model: nn.Module, before: dict[str, Tensor]) -> dict[Root, set[int]]:
    """The tensors that the forward has set on modules since the first event, each with the event that made it."""
    left: dict[Root, set[int]] = {}
    for name, tensor in attribute_tensors(model):
        note = recorder.notes.get(tensor)
        if before.get(name) is tensor or note is None:
            continue
        key = recorder.values.key_of(tensor)
        step = recorder.values.known[key].made if key is not None else note.made
        if step >= recorder.event_steps[0]:
            left["buffer", name] = {_event_at(recorder, step)}
    return left


def kept_elsewhere(recorder: Recorder, model: nn.Module) -> dict[Root, tuple[set[int], MemoryOf]]:
    """The memory outside the model that the forward has made or written to since the first event, and that is alive.

    Returns:
        For each one, the events that made it or wrote to it, and the memory.
    """
    if not _alive(recorder, model):
        return {}
    gc.collect()  # memory that only garbage holds does not count
    return {
        ("kept", f"a tensor that is kept outside the model ({number})"): (events, memory)
        for number, (events, memory) in enumerate(_alive(recorder, model))
    }


def _alive(recorder: Recorder, model: nn.Module) -> list[tuple[set[int], MemoryOf]]:
    held = (*model.parameters(), *model.buffers(), *(tensor for _, tensor in attribute_tensors(model)))
    known = {storage_key(tensor) for tensor in held}
    found = []
    for memory, note in recorder.notes.alive():
        steps = [*note.writes, *([] if note.foreign else [note.made])]
        events = {_event_at(recorder, step) for step in steps if step >= recorder.event_steps[0]}
        if events and memory.key not in known:
            found.append((events, memory))
    return found


def _event_at(recorder: Recorder, step: int) -> int:
    return bisect_right(recorder.event_steps, step) - 1


def refuse_carried(
    recorder: Recorder, again: Recorder, left: Mapping[Root, Collection[int]], on_modules: Collection[Root]
) -> None:
    """Refuses cuts between an event that left a tensor and the reader of that tensor in the next microbatch.

    Args:
        recorder: Record of the first microbatch.
        again: Record of the next microbatch.
        left: Tensors that the first microbatch left, and the events that left them.
        on_modules: Those that were left on modules. If there are any and the next microbatch takes another path, every
            cut is refused.
    """
    another_way = [call.name for call in again.calls] != [call.name for call in recorder.calls]
    if another_way and (on_modules or len(again.usages) != len(recorder.usages)):
        recorder.refuse(
            f"the model takes another path in the second microbatch than in the first: {MADE_ONCE}", after=0
        )
        return
    for root, writers in left.items():
        reason = (
            f"{root[1]} is carried from one microbatch to the next, but left and read by different stages; " + MADE_ONCE
        )
        if root in again.everywhere.roots:
            recorder.refuse(reason, after=0)
        for reader, usage in enumerate(again.usages):
            for writer in writers:
                if root in usage.roots and reader != writer:
                    first, last = sorted((reader, writer))
                    recorder.refuse(reason, after=recorder.event_steps[first], until=recorder.event_steps[last])


def refuse_shared_generators(recorder: Recorder) -> tuple[ReferenceType[torch.Generator], ...]:
    """Refuses cuts between two events that draw from one generator: each stage would miss the other's draws.

    Every stage makes the draws before the first event. That is right if there are no other draws, or if the generator
    is created anew for each microbatch.

    Returns:
        The generators that outlive the microbatch.
    """
    lasting = []
    for users, reference in recorder.drawn.release():
        reason = (
            "a torch.Generator of the model's or fn's own is drawn from on both sides of the cut, and each stage would "
            "miss the other's draws: use one generator for each block, or torch's default one"
        )
        after = sorted(users - {-1})
        if len(after) > 1:
            recorder.refuse(reason, after=recorder.event_steps[after[0]], until=recorder.event_steps[after[-1]])
        if reference() is not None:
            lasting.append(reference)
            if after and -1 in users:
                recorder.refuse(reason, after=0)
    return tuple(lasting)
