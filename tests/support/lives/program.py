"""A training as data: what is made, and what is done to it, one operation after the other.

Data, not a state machine: a program can be drawn from a number, printed as a script that runs it, made shorter by
leaving operations out, and run again with a defect put back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Op:
    """One operation. Each can be made in any state of a training; where it has nothing to do it does nothing."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"op({', '.join([repr(self.name), *(f'{name}={value!r}' for name, value in self.arguments.items())])})"


def op(name: str, **arguments: Any) -> Op:
    return Op(name, arguments)


@dataclass(frozen=True)
class Program:
    """A model and its optimizer, both named as in :mod:`support.lives.subjects`, and the operations on them.

    Attributes:
        wide: matrices are of 16 KiB and more, so that they can be at home on the disk.
        bf16: the model is in bfloat16.
        half: the optimizer has the first half of the parameters, until an operation gives it the rest.
        looks: everything is compared after each operation; else losses, random states and the budget are, and the rest
            where an operation looks. Looking waits for updates under way, which hides what goes wrong in them.
    """

    model: str
    optimizer: str
    seed: int
    ops: tuple[Op, ...]
    wide: bool = False
    bf16: bool = False
    half: bool = False
    looks: bool = True

    def script(self) -> str:
        """Runs it where tests/ can be imported from, and prints what differs."""
        head = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name in ("model", "optimizer", "seed", "wide", "bf16", "half", "looks")
            if name in ("model", "optimizer", "seed", "looks") or getattr(self, name)
        )
        lines = "".join(f"    {step!r},\n" for step in self.ops)
        return (
            "from support.lives.program import Program, op\n"
            "from support.lives.running import run\n\n"
            f"ops = (\n{lines})\nprint(run(Program({head}, ops=ops)))\n"
        )

    def with_ops(self, ops: tuple[Op, ...]) -> Program:
        return replace(self, ops=ops)
