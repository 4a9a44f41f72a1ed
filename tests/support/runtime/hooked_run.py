"""Trains under the preloaded malloc hook, and prints the counts of the hook and of the run as JSON. See HookedRun.

Run as ``python -m support.runtime.hooked_run SCENARIOS`` by observe(), with the hook preloaded, in a process that has
computed nothing before. So the hook also sees memory that libraries allocate only once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HEAP, ALIGNED, PAGE_ALIGNED, MAPPED = range(4)
STEPS = 4


@dataclass(frozen=True)
class Scenario:
    """A training, its budget, and whether it uses kernels for processors without instructions for bfloat16."""

    family: str
    checkpointing: str
    autocast: bool
    budget: int
    without_bf16: bool = False


@dataclass(frozen=True)
class Moment:
    """Bytes in use at one moment: four kinds counted by the hook, two classes counted by the run's ledger.

    Buffers are in neither, since they existed before the context. The heap is without ``matrix_buffers``, which MKL
    counts itself.
    """

    heap: int
    matrix_buffers: int
    tensors: int
    slots: int
    mapped: int
    ledger_slots: int
    ledger_tensors: int
    arena: int


@dataclass(frozen=True)
class StepSeen:
    """One step: the bytes at two moments and after it, and the peaks in between."""

    after_forward: Moment
    after_backward: Moment
    after_step: Moment
    hook_device_peak: int
    hook_heap_peak: int
    hook_mapped_peak: int
    largest_tensor: int
    ledger_peak: int


@dataclass
class HookedRun:
    """The steps of a scenario, and the proof that the engine was used."""

    windows: int = 0
    weights_moved: int = 0
    steps: list[StepSeen] = field(default_factory=list)


def build_hook(folder: Path) -> Path:
    """Compiles the malloc hook."""
    library = folder / "malloc_hook.so"
    source = Path(__file__).parents[1] / "malloc_hook.c"
    subprocess.run(
        ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
    )
    return library


def observe(hook: Path, scenarios: list[Scenario]) -> list[HookedRun]:
    """Runs the scenarios in order, in one process under the hook for each kind of kernels."""
    with_others = [[one for one in scenarios if one.without_bf16 == without] for without in (False, True)]
    runs = {one: run for same in with_others for one, run in zip(same, _observe(hook, same), strict=True)}
    return [runs[one] for one in scenarios]


def _observe(hook: Path, scenarios: list[Scenario]) -> list[HookedRun]:
    kernels = {"ONEDNN_MAX_CPU_ISA": "AVX2"} if any(one.without_bf16 for one in scenarios) else {}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "support.runtime.hooked_run",
            json.dumps([asdict(one) for one in scenarios]),
        ],
        env={
            **os.environ,
            **kernels,
            "LD_PRELOAD": str(hook),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # Otherwise Python maps a MiB for small objects from time to time, which would count as a mapping of a step.
            "PYTHONMALLOC": "malloc",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [_parse(run) for run in json.loads(done.stdout.splitlines()[-1])]


def _parse(run: dict[str, Any]) -> HookedRun:
    steps = []
    for step in run.pop("steps"):
        moments = {name: Moment(**step.pop(name)) for name in ("after_forward", "after_backward", "after_step")}
        steps.append(StepSeen(**moments, **step))
    return HookedRun(**run, steps=steps)


class _Hook:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        for name in ("hook_live", "hook_peak", "hook_aligned_peak", "hook_largest_aligned"):
            getattr(self.library, name).restype = ctypes.c_long
        import torch

        # Where torch has no MKL there is no such function.
        self._mkl_bytes = getattr(ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so"), "mkl_serv_mem_stat", None)
        if self._mkl_bytes is not None:
            self._mkl_bytes.restype = ctypes.c_longlong

    def matrix_buffers(self) -> int:
        return 0 if self._mkl_bytes is None else int(self._mkl_bytes(ctypes.byref(ctypes.c_int())))

    def moment(self, ledger: Any, arena: Any, arena_before: int) -> Moment:
        from hydra_ext import _C

        self.library.hook_end()
        live = [self.library.hook_live(kind) for kind in range(4)]
        matrix_buffers = self.matrix_buffers()
        weights, buffers = (ledger.in_use_by(cls) for cls in (_C.MemoryClass.WEIGHTS, _C.MemoryClass.BUFFERS))
        return Moment(
            heap=live[HEAP] - matrix_buffers,
            matrix_buffers=matrix_buffers,
            tensors=live[ALIGNED],
            slots=live[PAGE_ALIGNED],
            mapped=live[MAPPED],
            ledger_slots=weights,
            ledger_tensors=ledger.in_use - weights - buffers,
            arena=arena.mapped_bytes - arena_before,
        )

    def step(self, before: Moment, forward: Moment, backward: Moment, after: Moment, ledger_peak: int) -> StepSeen:
        # Memory that earlier scenarios of this process have left does not count.
        def own(moment: Moment) -> Moment:
            return replace(
                moment,
                heap=moment.heap - before.heap,
                matrix_buffers=moment.matrix_buffers - before.matrix_buffers,
                mapped=moment.mapped - before.mapped,
                tensors=moment.tensors - before.tensors,
                slots=moment.slots - before.slots,
            )

        return StepSeen(
            own(forward),
            own(backward),
            own(after),
            hook_device_peak=self.library.hook_aligned_peak() - before.tensors - before.slots,
            hook_heap_peak=self.library.hook_peak(HEAP) - after.matrix_buffers - before.heap,
            hook_mapped_peak=self.library.hook_peak(MAPPED) - before.mapped,
            largest_tensor=self.library.hook_largest_aligned(),
            ledger_peak=ledger_peak,
        )


def _run(scenario: Scenario) -> HookedRun:
    import hydra_ext
    from hydra_ext import _C
    from support.models.zoo import FAMILIES
    from support.training import Recipe, build, build_optimizer

    gc.collect()  # leftovers of the run before must not be freed in the middle of this one
    arenas: list[Any] = []
    make_arena = _C.HostArena
    _C.HostArena = lambda: arenas.append(make_arena()) or arenas[0]  # type: ignore[misc,assignment]
    family = FAMILIES[scenario.family]
    recipe = Recipe(checkpointing=scenario.checkpointing, autocast=scenario.autocast)
    model = build(family, recipe)
    optimizer = build_optimizer(model, recipe)
    batches = family.batches(1, STEPS)
    seen = HookedRun()
    hook = _Hook()
    with hydra_ext.offload(model, optimizer, budget=scenario.budget, activations=None) as run:
        ledger, arena_before = run.core.memory.ledger, arenas[0].mapped_bytes
        buffers = ledger.in_use_by(_C.MemoryClass.BUFFERS)
        before = hook.moment(ledger, arenas[0], arena_before)
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
            after_step = hook.moment(ledger, arenas[0], arena_before)
            peak = ledger.peak - buffers
            seen.steps.append(hook.step(before, after_forward, after_backward, after_step, peak))
        seen.windows, seen.weights_moved = run.report().windows, run.report().weights_moved_bytes
    _C.HostArena = make_arena  # type: ignore[misc]
    return seen


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    runs = [_run(Scenario(**scenario)) for scenario in json.loads(sys.argv[1])]
    print(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    _main()
