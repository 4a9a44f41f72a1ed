"""Programs, drawn from a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from support.lives.contexts import ACTIVATIONS
from support.lives.program import Op, Program, op
from support.lives.stateful import LAYERS_OF
from support.lives.subjects import FP32_ONLY, HOST_OPTIMIZERS, OPTIMIZERS, STATELESS

LENGTH = (6, 16)
Draw = Callable[[random.Random, Program], Op]


def _data(r: random.Random) -> int:
    return r.randrange(1000)


def _enter(r: random.Random, program: Program) -> Op:
    native = program.optimizer in HOST_OPTIMIZERS
    return op(
        "enter",
        budget=r.choice(["tight", "middling", "roomy"]),
        device=r.choice(["plain", "plain", "asynchronous", "slow", "slow and asynchronous"]),
        seed=r.randrange(100),
        poison=r.random() < 0.7,
        activations=r.choice(["none", "none", "none", *ACTIVATIONS[1:]]),
        spills=native and program.wide and r.random() < 0.7,
        named=r.random() < 0.2,
    )


def _stash(r: random.Random, _: Program) -> Op:
    return op(
        "stash",
        policy=r.choice([*ACTIVATIONS, "offload", "dynamic"]),
        budget=r.choice([None, None, 2000, 100_000]),
        device=r.choice(["plain", "asynchronous"]),
        seed=r.randrange(100),
    )


def _train(r: random.Random, _: Program) -> Op:
    return op(
        "train",
        data=_data(r),
        microbatches=r.choice([1, 1, 1, 2, 3]),
        norm=r.choice([0.0, 0.0, 0.1, 10.0]),
        to_none=r.random() < 0.7,
        autocast=r.random() < 0.1,
    )


def _rounds(r: random.Random, _: Program) -> Op:
    return op(
        "rounds",
        data=_data(r),
        microbatches=r.choice([1, 2, 3, 4]),
        size=r.choice([None] * 6 + [1, 2]),
        recompute=r.choice([None] * 6 + [False, True]),
        norm=r.choice([0.0, 0.0, 0.1, 10.0]),
        seeds=r.choice([None, 7]),
        total=r.random() < 0.2,
        autocast=r.random() < 0.1,
    )


def _raises(r: random.Random, _: Program) -> Op:
    when = r.choice(["forward", "forward", "backward"])
    return op("raises", data=_data(r), kind=r.choice(["error", "interrupt"]), where=r.randrange(20), when=when)


def _rounds_raise(r: random.Random, _: Program) -> Op:
    return op(
        "rounds_raise",
        data=_data(r),
        microbatches=r.choice([1, 2, 3]),
        kind=r.choice(["error", "interrupt"]),
        last=r.random() < 0.5,
        size=r.choice([None, 1, 2]),
    )


def _writes(r: random.Random, _: Program) -> Op:
    how = r.choice(["in place", "data", "new data", "element", "numpy"])
    return op("write", which=r.randrange(40), how=how)


def _shares(r: random.Random, _: Program) -> Op:
    return op("share", how=r.choice(["vector", "gradients", "pair", "apart"]), which=r.randrange(40))


def _reloads(r: random.Random, _: Program) -> Op:
    return op("reload", what=r.choice(["model", "optimizer"]), through=r.choice(["itself", "copy", "file"]))


def _freezes(r: random.Random, _: Program) -> Op:
    return op("freeze", which=r.randrange(20), trained=r.random() < 0.3)


def _reforms(r: random.Random, _: Program) -> Op:
    return op("reform", which=r.randrange(20), how=r.choice(["pruned", "weight norm", "doubled"]))


def _scaled(r: random.Random, _: Program) -> Op:
    whole = r.random() < 0.6
    return op("scaled", data=_data(r), microbatches=r.choice([1, 2]), whole=whole, norm=r.choice([0.0, 0.1]))


# The relative frequency of each kind of operation.
_DRAWS: dict[Draw, int] = {
    _train: 16,
    _rounds: 14,
    lambda r, _: op("accumulate", data=_data(r), autocast=r.random() < 0.1): 6,
    lambda r, _: op("clip", norm=r.choice([0.1, 10.0])): 2,
    lambda r, _: op("step"): 6,
    lambda r, _: op("zero", to_none=r.random() < 0.5): 3,
    lambda r, _: op("evaluate", data=_data(r)): 3,
    lambda r, _: op("decode", data=_data(r), words=r.randint(1, 3)): 2,
    lambda r, _: op("gradients", data=_data(r), twice=r.random() < 0.5): 2,
    lambda r, _: op("dropped", data=_data(r)): 1,
    _raises: 3,
    _rounds_raise: 2,
    _freezes: 6,
    lambda r, _: op("thaw"): 2,
    lambda r, _: op("add_group"): 2,
    lambda r, _: op("rate", factor=r.choice([0.5, 2.0])): 2,
    lambda r, _: op("schedule", kind=r.choice(["exponential", "cosine", "steps"])): 2,
    _reloads: 4,
    lambda r, _: op("keep_state"): 2,
    lambda r, _: op("save"): 3,
    lambda r, _: op("average", decay=0.75): 2,
    lambda r, _: op("averaged", data=_data(r)): 2,
    lambda r, _: op("copied", data=_data(r)): 1,
    _writes: 4,
    _shares: 4,
    lambda r, _: op("sync"): 1,
    _reforms: 1,
    lambda r, _: op("part", which=r.randrange(20), data=_data(r), trains=r.random() < 0.5): 1,
    lambda r, _: op("hooked", which=r.randrange(40), factor=r.choice([0.5, 2.0])): 1,
    lambda r, _: op("scale_gradients", which=r.randrange(40), how=r.choice(["in place", "new", "none", "data"])): 2,
    _scaled: 2,
    lambda r, _: op("closed", data=_data(r)): 1,
    lambda r, _: op("observed", data=_data(r), how=r.choice(["trace", "on_step"])): 1,
    lambda r, _: op("checkpointed", how=r.choice(["no", "plain", "plain", "reentrant"])): 1,
    lambda r, _: op("two_graphs", data=_data(r), how=r.choice(["retained", "in order", "turned"])): 2,
    lambda r, _: op("twice_differentiated", data=_data(r)): 2,
    _enter: 4,
    _stash: 1,
    lambda r, _: op("leave"): 2,
    lambda r, _: op("look"): 2,
}


# After each operation named first, the second is inserted at a random later place.
_PAIRS = {"save": op("load"), "keep_state": op("take_state")}


def program_of(seed: int | random.Random, *, without: frozenset[str] = frozenset(), stash: bool = False) -> Program:
    """The program of a number, without the operations named in ``without`` (see :func:`named`).

    With ``stash``, tensors saved for backward leave the device, and weights stay.
    """
    r = seed if isinstance(seed, random.Random) else random.Random(seed)
    optimizer = r.choice([*OPTIMIZERS, *HOST_OPTIMIZERS, *HOST_OPTIMIZERS])
    program = Program(
        model=r.choice(STATELESS),
        optimizer=optimizer,
        seed=r.randrange(100),
        ops=(),
        wide=r.random() < 0.25,
        bf16=r.random() < 0.1 and optimizer not in FP32_ONLY,
        half=r.random() < 0.15,
        looks=r.random() < 0.4,
    )
    before = [_reforms(r, program)] if r.random() < 0.15 else []
    before += [draw(r, program) for draw in r.choices([*_DRAWS], [*_DRAWS.values()], k=r.choice([0, 0, 1, 3]))]
    draws = r.choices([*_DRAWS], [*_DRAWS.values()], k=r.randint(*LENGTH))
    inside = [_enter(r, program), _train(r, program), *(draw(r, program) for draw in draws)]
    for first, second in _PAIRS.items():
        for at in [at for at, step in enumerate(inside) if step.name == first]:
            inside.insert(r.randint(at + 1, len(inside)), second)
    ops = tuple(step for step in (*before, *inside) if step.name == "enter" or not named(step) & without)
    ops = tuple(_stash(r, program) if stash and step.name == "enter" else _simpler(step, without) for step in ops)
    program = program.with_ops(ops)
    return program if f"model={program.model}" not in without else replace(program, model="layered")


def named(step: Op) -> set[str]:
    """Returns the names to leave out an operation by: its name, or its name and an argument, as "share how=vector"."""
    return {step.name, *(f"{step.name} {name}={value}" for name, value in step.arguments.items())}


def _simpler(step: Op, without: frozenset[str]) -> Op:
    """Replaces the arguments of an "enter" that ``without`` names by the simplest ones."""
    simplest = {
        "budget": "roomy",
        "device": "plain",
        "activations": "none",
        "spills": False,
        "poison": True,
        "named": False,
    }
    changed = {
        name: simplest[name]
        for name, value in step.arguments.items()
        if name in simplest and f"enter {name}={value}" in without
    }
    return op(step.name, **{**step.arguments, **changed}) if step.name == "enter" else step


# Operations after which the modules' own state is equal on both sides.
_WITH_STATE: tuple[Draw, ...] = (
    _rounds,
    _rounds,
    _rounds,
    _train,
    lambda r, _: op("accumulate", data=_data(r), autocast=False),
    lambda r, _: op("zero", to_none=True),
    lambda r, _: op("step"),
    lambda r, _: op("evaluate", data=_data(r)),
)


def stateful_program_of(seed: int) -> Program:
    """Draws steps of a model whose forwards read and write state of all kinds."""
    r = random.Random(seed)
    program = Program(
        model=r.choice([*LAYERS_OF]), optimizer=r.choice([*OPTIMIZERS]), seed=r.randrange(100), ops=(), looks=True
    )
    enter = op(
        "enter", budget="roomy", device="plain", seed=0, poison=True, activations="none", spills=False, named=False
    )
    return program.with_ops((enter, *(r.choice(_WITH_STATE)(r, program) for _ in range(r.randint(3, 8)))))
