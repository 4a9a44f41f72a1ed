"""What one microbatch leaves on the modules, and the next may read there.

A stage ends its forward before the rest of the model has run, and skips what came before; so what is carried from one
microbatch to the next is right only where the same stage leaves it and reads it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from hydra_ext.pipeline.split.recorder import Recorder

_NO_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that modules hold, also in a list, tuple or dict, but for parameters and buffers."""
    for module_name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if attribute in _NO_ATTRIBUTES:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                members = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{name}[{place!r}]", member) for place, member in members if isinstance(member, Tensor))


def outside_numbers(model: nn.Module, blocks: Collection[nn.Module]) -> dict[str, float]:
    """Python numbers that modules outside blocks hold."""
    inside = {inner for block in blocks for inner in block.modules()}
    return {
        f"{name}.{attribute}" if name else attribute: value
        for name, module in model.named_modules()
        if module not in inside
        for attribute, value in module.__dict__.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def left_on_modules(recorder: Recorder, model: nn.Module, before: dict[str, Tensor]) -> dict[str, int]:
    """Names of the tensors that the forward has set on modules since the first event, and which event's stage did."""
    left: dict[str, int] = {}
    for name, tensor in attribute_tensors(model):
        note = recorder.notes.get(tensor)
        if before.get(name) is tensor or note is None:
            continue
        key = recorder.key_of(tensor)
        step = recorder.values[key].made if key is not None else note.made
        if step >= recorder.event_steps[0]:
            left[name] = bisect_right(recorder.event_steps, step) - 1
    return left


def refuse_carried(recorder: Recorder, again: Recorder, left: dict[str, int]) -> None:
    """No cut between who left something and who reads it in the next microbatch, which ``again`` has recorded."""
    if [call.name for call in again.calls] != [call.name for call in recorder.calls]:
        recorder.refuse("the model takes another way in the second microbatch than in the first", after=0)
        return
    for name, writer in left.items():
        reason = f"{name} is carried from one microbatch to the next, and left there by another stage than reads it"
        if ("buffer", name) in again.everywhere:
            recorder.refuse(reason, after=0)
        for reader, usage in enumerate(again.usages):
            if ("buffer", name) in usage.roots and reader != writer:
                first, last = sorted((reader, writer))
                recorder.refuse(reason, after=recorder.event_steps[first], until=recorder.event_steps[last])


def refuse_shared_generators(recorder: Recorder) -> tuple[ReferenceType[torch.Generator], ...]:
    """No cut between two who draw from one generator: each stage has one of its own, which lacks the other's draws.

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
