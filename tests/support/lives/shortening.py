"""Shortens a failing program: leaves out operations as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from support.lives.program import Program
from support.lives.running import run


def goes_wrong(program: Program) -> bool:
    return bool(run(program).wrong)


def shortened(program: Program, *, fails: Callable[[Program], bool] = goes_wrong) -> Program:
    size = max(len(program.ops) // 2, 1)
    while size:
        at = 0
        while at < len(program.ops):
            fewer = program.with_ops(program.ops[:at] + program.ops[at + size :])
            if fails(fewer):
                program = fewer
            else:
                at += size
        size //= 2
    for simpler in (replace(program, wide=False), replace(program, bf16=False), replace(program, half=False)):
        if simpler != program and fails(simpler):
            program = simpler
    return program
