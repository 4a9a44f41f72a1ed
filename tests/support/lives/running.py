"""Runs a program on both sides, one operation at a time, and reports differences."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hydra_ext.errors import HydraError
from support.lives import changes, contexts, training, variations
from support.lives.program import Op, Program, op
from support.lives.sides import Side, differences, same

Make = Callable[..., "list[Any] | None"]


NO_STASH = op("stash", policy="none", budget=None, device="plain", seed=0)


def look(_side: Side) -> list[Any] | None:
    """Does nothing; the runner compares everything after it."""
    return []


OPERATIONS: dict[str, Make] = {
    make.__name__: make
    for make in (
        *(training.train, training.rounds, training.accumulate, training.clip, training.step, training.zero),
        *(training.evaluate, training.decode, training.gradients, training.dropped),
        *(training.raises, training.rounds_raise),
        *(changes.freeze, changes.thaw, changes.add_group, changes.rate, changes.schedule),
        *(changes.reload, changes.keep_state, changes.take_state, changes.save, changes.load),
        *(changes.average, changes.averaged, changes.copied),
        *(changes.write, changes.share, changes.sync, changes.reform, changes.stash, changes.enter, changes.leave),
        *(variations.part, variations.hooked, variations.scale_gradients, variations.scaled, variations.closed),
        *(variations.observed, variations.checkpointed, variations.two_graphs, variations.twice_differentiated),
        look,
    )
}


@dataclass
class Outcome:
    """The outcome of a program.

    Attributes:
        wrong: The differences, and the operation before them; the program ends there.
        refusals: Typed errors and lack of memory, as "operation: kind: message".
        made: Counts of operations that were not no-ops, by name.
    """

    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    made: Counter[str] = field(default_factory=Counter)


def run(program: Program) -> Outcome:
    outcome = Outcome()
    ours, plain = Side(program, ours=True), Side(program, ours=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, step in enumerate((*program.ops, Op("leave"), NO_STASH, Op("look"))):
                wrong = _both(step, ours, plain, outcome, whole=program.looks or step.name == "look")
                if wrong:
                    outcome.wrong = [f"operation {number}, {step}: {what}" for what in wrong]
                    break
    finally:
        if ours.run is not None:
            _leave_whatever(ours)
        ours.end()
        plain.end()
    return outcome


def _leave_whatever(side: Side) -> None:
    """Ends the contexts after a failure, and ignores further errors."""
    try:
        contexts.leave(side)
    except (HydraError, RuntimeError, AssertionError):
        gc.collect()


def _both(step: Op, ours: Side, plain: Side, outcome: Outcome, *, whole: bool) -> list[str]:
    make = OPERATIONS[step.name]
    try:
        with ours.alone():
            seen = make(ours, **step.arguments)
    except (HydraError, torch.OutOfMemoryError) as error:
        return _refused(step, error, ours, plain, outcome)
    except contexts.LeftBehind as error:
        return [str(error)]
    except Exception as error:  # noqa: BLE001 - plain PyTorch decides whether it is right
        return _raised(step, error, ours, plain)
    with plain.alone():
        expected = make(plain, **step.arguments)
    if seen is not None:
        outcome.made[step.name] += 1
    if (seen is None) != (expected is None):
        return [f"made {seen is not None}, {expected is not None} in plain PyTorch"]
    found = _compared(seen or [], expected or [])
    found += ours.randomness.differences(plain.randomness)
    found += contexts.passed(ours)
    return found + (differences(ours, plain) if whole else [])


def _compared(seen: list[Any], expected: list[Any]) -> list[str]:
    if len(seen) != len(expected):
        return [f"{len(seen)} values, {len(expected)} in plain PyTorch"]
    found = []
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if not same(one, other):
                found.append(f"value {number}: {_shown(one)}, {_shown(other)} in plain PyTorch")
        elif type(one) is not type(other) or one != other:
            found.append(f"value {number}: {one}, {other} in plain PyTorch")
    return found


def _shown(value: Tensor) -> str:
    return repr(value.item()) if value.numel() == 1 else f"another tensor of {tuple(value.shape)}"


def _raised(step: Op, error: Exception, ours: Side, plain: Side) -> list[str]:
    """Handles a foreign error. It is right if plain PyTorch raises it too, and leaves the same state."""
    try:
        with plain.alone():
            OPERATIONS[step.name](plain, **step.arguments)
    except Exception as other:  # noqa: BLE001 - compared
        if type(other) is not type(error):
            return [f"{type(error).__name__}: {error}; {type(other).__name__}: {other} in plain PyTorch"]
        return differences(ours, plain)
    return [f"{type(error).__name__}: {error}; no error in plain PyTorch"]


def _refused(step: Op, error: Exception, ours: Side, plain: Side, outcome: Outcome) -> list[str]:
    """Handles a refusal. Plain PyTorch skips the operation, and weights and optimizer state have to be as before.

    Gradients are dropped, as after any error. Random states and buffers are restored.
    """
    if step.name in ("save", "load") and isinstance(error, HydraError):  # a saved state can be loaded
        return [f"{type(error).__name__}: {error}"]
    outcome.refusals.append(f"{step.name}: {type(error).__name__}: {error}")
    outcome.made[step.name] += 1
    error.__traceback__ = None
    for side in (ours, plain):
        training.drop_gradients(side)
    ours.randomness = plain.randomness
    if step.name == "leave":
        ours.run, plain.inside = None, False
    with torch.no_grad():
        for buffer, other in zip(ours.model.buffers(), plain.model.buffers(), strict=True):
            buffer.copy_(other)
    return differences(ours, plain)
