"""Trains under the preloaded malloc hook and prints, as JSON, what it and the run's own counter saw. See HookedRun.

Run as ``python -m support.hooked_run FAMILY CHECKPOINTING AUTOCAST PERCENT`` by the tests, with the hook preloaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HEAP, ALIGNED, PAGE_ALIGNED, MAPPED = range(4)
STEPS = 4


@dataclass(frozen=True)
class Moment:
    """Bytes live at one moment: four kinds as the hook counts them, two classes as the run's ledger does."""

    heap: int
    tensors: int
    slots: int
    mapped: int
    ledger_slots: int
    ledger_tensors: int
    arena: int


@dataclass(frozen=True)
class StepSeen:
    """One step: two moments of it, the highest points in between, and what was left after it."""

    after_forward: Moment
    after_backward: Moment
    after_step: Moment
    hook_device_peak: int
    hook_heap_peak: int
    hook_mapped_peak: int
    ledger_peak: int


@dataclass
class HookedRun:
    budget: int
    largest_gradient: int
    windows: int = 0
    weights_moved: int = 0
    steps: list[StepSeen] = field(default_factory=list)


def build_hook(folder: Path) -> Path:
    """Compiles the shim."""
    library = folder / "malloc_hook.so"
    source = Path(__file__).with_name("malloc_hook.c")
    subprocess.run(
        ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
    )
    return library


def observe(hook: Path, *, family: str, checkpointing: str, autocast: bool, percent: int) -> HookedRun:
    """Runs this module in a process of its own under the hook."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.hooked_run", family, checkpointing, str(autocast), str(percent)],
        env={**os.environ, "LD_PRELOAD": str(hook), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    steps = []
    for step in seen.pop("steps"):
        moments = {name: Moment(**step.pop(name)) for name in ("after_forward", "after_backward", "after_step")}
        steps.append(StepSeen(**moments, **step))
    return HookedRun(**seen, steps=steps)


class _Hook:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        for name in ("hook_live", "hook_peak", "hook_aligned_peak"):
            getattr(self.library, name).restype = ctypes.c_long

    def moment(self, ledger: Any, arena: Any, arena_before: int) -> Moment:
        from hydra_ext import _C

        self.library.hook_end()
        live = [self.library.hook_live(kind) for kind in range(4)]
        weights = ledger.in_use_by(_C.MemoryClass.WEIGHTS)
        return Moment(
            heap=live[HEAP],
            tensors=live[ALIGNED],
            slots=live[PAGE_ALIGNED],
            mapped=live[MAPPED],
            ledger_slots=weights,
            ledger_tensors=ledger.in_use - weights,
            arena=arena.mapped_bytes - arena_before,
        )


def _run(family_name: str, checkpointing: str, autocast: bool, percent: int) -> HookedRun:
    import hydra_ext
    import torch
    from hydra_ext import _C

    from support.training import Recipe, build, build_optimizer, parameter_bytes, plain_peak
    from support.zoo import FAMILIES

    torch.set_num_threads(1)
    arenas: list[Any] = []
    make_arena = _C.HostArena
    _C.HostArena = lambda: arenas.append(make_arena()) or arenas[0]  # type: ignore[misc,assignment]
    family, recipe = FAMILIES[family_name], Recipe(checkpointing=checkpointing, autocast=autocast)
    model = build(family, recipe)
    optimizer = build_optimizer(model, recipe)
    batches = family.batches(1, STEPS)
    budget = plain_peak(family, recipe) + percent * parameter_bytes(model) // 100
    seen = HookedRun(budget=budget, largest_gradient=max(parameter.nbytes for parameter in model.parameters()))
    hook = _Hook()
    with hydra_ext.offload(model, optimizer, budget=budget) as run:
        ledger, arena_before = run.core.ledger, arenas[0].mapped_bytes
        for batch in batches:
            hook.library.hook_reset_peaks()
            ledger.reset_peak()
            hook.library.hook_begin()
            with recipe.precision():
                loss = family.loss(model, batch)
            after_forward = hook.moment(ledger, arenas[0], arena_before)
            hook.library.hook_begin()
            loss.backward()
            after_backward = hook.moment(ledger, arenas[0], arena_before)
            optimizer.step()
            optimizer.zero_grad()
            del loss
            seen.steps.append(
                StepSeen(
                    after_forward,
                    after_backward,
                    hook.moment(ledger, arenas[0], arena_before),
                    hook_device_peak=hook.library.hook_aligned_peak(),
                    hook_heap_peak=hook.library.hook_peak(HEAP),
                    hook_mapped_peak=hook.library.hook_peak(MAPPED),
                    ledger_peak=ledger.peak,
                )
            )
        seen.windows, seen.weights_moved = run.report().windows, run.report().weights_moved_bytes
    return seen


if __name__ == "__main__":
    name, checkpointing_mode, autocast_text, percent_text = sys.argv[1:]
    print(json.dumps(asdict(_run(name, checkpointing_mode, autocast_text == "True", int(percent_text)))))
