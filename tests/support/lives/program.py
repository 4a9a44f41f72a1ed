"""A training as data: the model and optimizer, and the operations on them in order.

A program is data, not a state machine. So it can be drawn from a number, printed as a script that runs it, shortened by
leaving out operations, and run again with a defect put back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Op:
    """One operation. Each is possible in any state of a training, if only as a no-op."""

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
        wide: Matrices have 16 KiB or more, so that their home can be the disk.
        bf16: The model is in bfloat16.
        half: The optimizer has the first half of the parameters, until an operation adds the rest.
        looks: Whether everything is compared after each operation. If not, only losses, random states and the budget
            are, and everything after the operation "look". A comparison waits for updates under way, which can hide
            their errors.
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
        """Returns a script that runs the program, with tests/ on the path, and prints differences."""
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
