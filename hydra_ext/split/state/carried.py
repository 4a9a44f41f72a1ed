"""What one microbatch leaves on the modules, and the next may read there.

A stage ends its forward before the rest of the model has run, and skips what came before; so what is carried from one
microbatch to the next is right only where the same stage leaves it and reads it.
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
    """Names and tensors that modules hold, also in containers and objects, but for parameters and buffers."""
    for entry in entries(module_roots(all_modules(model))):
        if isinstance(entry.value, Tensor):
            yield entry.path, entry.value


def left_on_modules(recorder: Recorder, model: nn.Module, before: dict[str, Tensor]) -> dict[Root, set[int]]:
    """The tensors that the forward has set on modules since the first event, and which events' stages did."""
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
    """What the forward has made since the first event, or written to, and what is kept elsewhere than by the model."""
    if not _alive(recorder, model):
        return {}
    gc.collect()  # what only garbage holds is not kept
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
    """No cut between what left something and what reads it in the next microbatch, which ``again`` has recorded.

    Args:
        on_modules: those of them about which nothing can be said if the next microbatch takes another way.
    """
    another_way = [call.name for call in again.calls] != [call.name for call in recorder.calls]
    if another_way and (on_modules or len(again.usages) != len(recorder.usages)):
        recorder.refuse(f"the model takes another way in the second microbatch than in the first: {MADE_ONCE}", after=0)
        return
    for root, writers in left.items():
        reason = (
            f"{root[1]} is carried from one microbatch to the next, and left there by another stage than reads it; "
            + MADE_ONCE
        )
        if root in again.everywhere.roots:
            recorder.refuse(reason, after=0)
        for reader, usage in enumerate(again.usages):
            for writer in writers:
                if root in usage.roots and reader != writer:
                    first, last = sorted((reader, writer))
                    recorder.refuse(reason, after=recorder.event_steps[first], until=recorder.event_steps[last])


def refuse_shared_generators(recorder: Recorder) -> tuple[ReferenceType[torch.Generator], ...]:
    """No cut between two that draw from one generator: each stage has one of its own, which lacks the other's draws.

    What comes before the first event is drawn by every stage, which is right where nothing else is, or where the
    generator is made anew for each microbatch.

    Returns:
        The generators that are not.
    """
    lasting = []
    for users, reference in recorder.drawn.release():
        reason = (
            "a torch.Generator of the model's or fn's own is drawn from on both sides of the cut, and what one stage "
            "draws another would not: take a generator for each block, or torch's default one"
        )
        after = sorted(users - {-1})
        if len(after) > 1:
            recorder.refuse(reason, after=recorder.event_steps[after[0]], until=recorder.event_steps[after[-1]])
        if reference() is not None:
            lasting.append(reference)
            if after and -1 in users:
                recorder.refuse(reason, after=0)
    return tuple(lasting)
