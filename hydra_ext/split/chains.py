"""A model's blocks as the chain that planners of pipelines cut: from a rehearsal, and from times and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from hydra_ext.errors import NotOnFakeTensors
from hydra_ext.plan import Boundary, Event, SharedParameters
from hydra_ext.plan.pipelines.chains import Chain, Overheads
from hydra_ext.profile import Profile, device_of, dry_run, faked
from hydra_ext.profile.cards import Speed
from hydra_ext.profile.real_run import has_numbers, on_doubles, real_run
from hydra_ext.split.rehearsal.record import Rehearsal
from hydra_ext.split.rehearsal.rehearse import rehearse
from hydra_ext.state.arguments import tensors_in

Example = TypeVar("Example")

BACKWARD = 2.0  # a backward's time in forwards: it has two products for each one of the forward


def chain_of(
    model: nn.Module,
    rehearsal: Rehearsal,
    forward_seconds: Sequence[float],
    *,
    samples: int = 0,
    backward: float = BACKWARD,
    profile: Profile | None = None,
    param_dtype: torch.dtype | None = None,
    input_bytes: int = 0,
    overheads: Overheads | None = None,
) -> Chain:
    """The chain of a rehearsed model.

    Args:
        model: The model, whole or on meta.
        rehearsal: Its calls of blocks.
        forward_seconds: Of each call.
        samples: Of the microbatch.
        backward: Seconds of a backward for each one of its forward.
        profile: What the modules save; without one nothing counts as saved.
        param_dtype: Dtype in which floating parameters compute; by default their own.
        input_bytes: Of the microbatch.
        overheads: Of a stage; None for none.
    """
    sizes = {
        name: parameter.numel()
        * (param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype).itemsize
        for name, parameter in model.named_parameters()
    }
    users: dict[str, list[int]] = {}
    for number, event in enumerate(rehearsal.events):
        for name in event.parameters:
            users.setdefault(name, []).append(number)
    alone = [0] * len(rehearsal.events)
    for name, events in users.items():
        if len(events) == 1:
            alone[events[0]] += sizes[name]
    saved, working = _kept(rehearsal, profile)
    possible = set(rehearsal.possible_cuts)
    return Chain(
        samples=samples,
        names=tuple(event.name for event in rehearsal.events),
        events=tuple(
            Event(forward_seconds=time, backward_seconds=backward * time, parameter_bytes=size, activation_bytes=kept)
            for time, size, kept in zip(forward_seconds, alone, saved, strict=True)
        ),
        boundaries=tuple(
            Boundary(crossing_bytes=rehearsal.crossing_bytes[b], possible=b in possible)
            for b in range(1, len(rehearsal.events))
        ),
        shared=tuple(
            SharedParameters(nbytes=sizes[name], events=tuple(events))
            for name, events in users.items()
            if len(events) > 1
        ),
        working_bytes=working,
        input_bytes=input_bytes,
        overheads=overheads or Overheads(),
    )


def _kept(rehearsal: Rehearsal, profile: Profile | None) -> tuple[list[int], tuple[int, ...]]:
    """Bytes that each event saves, and the most that it uses beside them. What glue saves is the last event's."""
    if profile is None:
        return [0] * len(rehearsal.events), (0,) * len(rehearsal.events)
    figures = [profile.modules[event.name] for event in rehearsal.events]
    saved = [each.saved.fresh // max(each.calls, 1) for each in figures]
    saved[-1] += max(profile.modules[""].saved.fresh - sum(saved), 0)
    return saved, tuple(max(each.forward_bytes, each.backward_bytes) for each in figures)


def microbatch_chain(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    samples: int,
    speed: Speed | None = None,
    param_dtype: torch.dtype | None = None,
) -> tuple[Chain, str | None]:
    """The chain of a microbatch, from fake tensors: no memory is taken and no step is made.

    Where ``fn`` needs numbers, and there are some, it is from real microbatches; the second result says why. Seconds
    outside of blocks are the last event's, as the loss is.

    Raises:
        NotOnFakeTensors: ``fn`` needs numbers, and the model or the example has none.
        SplitError: The forward cannot be followed.
    """
    place = device_of(model, None)
    try:
        profile, because = dry_run(model, example, fn, param_dtype=param_dtype, speed=speed), None
        with faked(model, example, device=place, param_dtype=param_dtype) as given:
            rehearsal = rehearse(model, fn, given, device=place)
    except NotOnFakeTensors as error:
        if not has_numbers(model, example):
            raise
        profile, because = real_run(model, example, fn, param_dtype=param_dtype, speed=speed), error.reason
        with on_doubles(model, example, param_dtype=param_dtype) as (double,):
            rehearsal = rehearse(model, fn, double, device=place)
    figures = [profile.modules[event.name] for event in rehearsal.events]
    seconds = [each.forward_seconds / max(each.calls, 1) for each in figures]
    seconds[-1] += max(profile.modules[""].forward_seconds - sum(seconds), 0.0)
    chain = chain_of(
        model,
        rehearsal,
        seconds,
        samples=samples,
        backward=profile.backward_ratio,
        profile=profile,
        param_dtype=param_dtype,
        input_bytes=sum(tensor.nbytes for tensor in tensors_in(example)),
    )
    return chain, because
