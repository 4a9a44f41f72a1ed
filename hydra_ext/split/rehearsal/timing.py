"""Measures how long each event takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from hydra_ext.errors import SplitError
from hydra_ext.outputs import split
from hydra_ext.runtime.rounds.isolation import Surroundings
from hydra_ext.split.blocks import blocks_call, find_blocks
from hydra_ext.split.rehearsal.glue_mode import away
from hydra_ext.split.rehearsal.record import Rehearsal
from hydra_ext.split.stages.randomness import EventRandomness
from hydra_ext.split.stages.stage import SplitStage
from hydra_ext.split.stages.stand_ins import device_of, present, with_stand_ins
from hydra_ext.split.stages.tensors import out_of_graph
from hydra_ext.split.state.changes import ChangeWatch
from hydra_ext.split.state.generators import DrawnGenerators, DrawWatch
from hydra_ext.split.state.restoring import unchanged
from hydra_ext.state.arguments import own_copy, tensors_in
from hydra_ext.state.memory import Undo
from hydra_ext.state.randomness import host_randomness_kept

Measured = TypeVar("Measured")
Unwatched = Callable[[], AbstractContextManager[None]]


def time_events(
    model: nn.Module,
    fn: Callable[[Any], Any],
    microbatch: Any,
    rehearsal: Rehearsal,
    *,
    seed: int = 0,
    runs: int = 3,
    device: torch.device | None = None,
) -> list[float]:
    """Median seconds of each event's forward, over ``runs`` forwards after one that does not count.

    Blocks that are absent get random parameters; making these is not timed. The model, and generators that ``fn`` draws
    from, are restored afterwards, as by :func:`~hydra_ext.split.rehearsal.rehearse.rehearse`.

    Raises:
        SplitError: A run makes another number of calls of blocks than the rehearsal.
    """
    device = device or device_of(model)
    blocks = find_blocks(model, rehearsal.blocks)

    def timed(given: Any, unwatched: Unwatched) -> list[float]:
        with with_stand_ins(model, device):
            times = _run(blocks, fn, given, EventRandomness(device, seed), device, unwatched)
        if len(times) != len(rehearsal.events):
            raise SplitError(f"fn made {len(times)} calls of blocks; in the rehearsal {len(rehearsal.events)}")
        return times

    measured = _restored(model, microbatch, timed, runs, device)
    return [statistics.median(times) for times in zip(*measured, strict=True)]


def time_microbatch(
    model: nn.Module,
    fn: Callable[[Any], Any],
    microbatch: Any,
    *,
    seed: int = 0,
    runs: int = 2,
    device: torch.device | None = None,
) -> tuple[float, float] | None:
    """Seconds of a whole forward, and of its backward: the fewest of ``runs`` after one that does not count.

    The model, its gradients, and generators that ``fn`` draws from are as before. None if parameters are absent, or if
    the backward cannot run without adding to gradients.
    """
    device = device or device_of(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(parameter.is_meta for parameter in model.parameters()):
        return None

    def timed(given: Any, unwatched: Unwatched) -> tuple[float, float]:
        EventRandomness(device, seed).begin()
        with unwatched():
            started = _now(device)
            loss, _ = split(fn(given))
            between = _now(device)
            torch.autograd.grad(loss, trained, allow_unused=True)
            return between - started, _now(device) - between

    try:
        measured = _restored(model, microbatch, timed, runs, device)
    except RuntimeError:  # of a checkpoint that is reentrant, for instance
        return None
    forward, backward = (min(times) for times in zip(*measured, strict=True))
    return forward, backward


def time_stage(
    model: nn.Module,
    fn: Callable[[Any], Any],
    microbatch: Any,
    rehearsal: Rehearsal,
    *,
    seed: int = 0,
    runs: int = 2,
    device: torch.device | None = None,
) -> float:
    """Seconds of a forward of the whole model as one stage: the fewest of ``runs`` after one that does not count.

    The model, whose parameters are all there, and generators that ``fn`` draws from are as before.
    """
    device = device or device_of(model)
    stage = SplitStage(model, rehearsal, 0, len(rehearsal.events), device=device)

    def timed(given: Any, unwatched: Unwatched) -> float:
        with unwatched():
            started = _now(device)
            stage.forward(fn, given, None, seed=seed, divisor=1)
            return _now(device) - started

    return min(_restored(model, microbatch, timed, runs, device))


def _restored(
    model: nn.Module, microbatch: Any, body: Callable[[Any, Unwatched], Measured], runs: int, device: torch.device
) -> list[Measured]:
    """What ``body`` returns in runs after a first one. All is as before then.

    ``body`` gets the microbatch, and a context for what is timed: the first run watches it, too, and later ones, which
    write to the same memory, do not.
    """
    measured = []
    undo, drawn = Undo(), DrawnGenerators()
    for number in range(runs + 1):
        surroundings = Surroundings(device)
        try:
            with (
                host_randomness_kept(),
                unchanged(model, microbatch),
                ChangeWatch(undo) as changes,
                DrawWatch(drawn) as draws,
            ):
                unwatched = partial(_unwatched, changes, draws) if number > 0 else nullcontext
                measured.append(body(own_copy(microbatch), unwatched))
        finally:
            undo.put_back()
            drawn.put_back()
            surroundings.restore()
    return measured[1:]


def _run(
    blocks: dict[str, nn.Module],
    fn: Callable[[Any], Any],
    microbatch: Any,
    randomness: EventRandomness,
    device: torch.device,
    unwatched: Unwatched,
) -> list[float]:
    times: list[float] = []
    inside = False

    def call(
        _name: str, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        nonlocal inside
        if inside:
            return forward(*args, **kwargs)
        number = len(times)
        randomness.enter(number)
        inside = True
        try:
            with present(block, device), unwatched():
                started = _now(device)
                output = forward(*args, **kwargs)
                times.append(_now(device) - started)
        finally:
            inside = False
        randomness.leave(number)
        with torch._C.DisableTorchFunction():
            return out_of_graph(output, [*tensors_in((args, kwargs))])

    randomness.begin()
    with blocks_call(blocks, call):
        fn(microbatch)
    return times


@contextmanager
def _unwatched(changes: ChangeWatch, draws: DrawWatch) -> Iterator[None]:
    """Removes each watch for the body, unless the program has entered a mode of its own inside it."""
    innermost = _get_current_dispatch_mode() is changes
    if innermost:
        _pop_mode()
    try:
        with away(draws):
            yield
    finally:
        if innermost:
            _push_mode(changes)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
