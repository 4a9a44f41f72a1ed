"""Trains a bf16 model under a small budget, and prints the process's host memory meanwhile, as JSON.

Run as ``python -m support.runtime.host_memory LAYERS ROUND_SIZE`` by observe(), in a process of its own. With the
malloc hook preloaded it counts blocks. Resident memory is measured without it, since its own tables take memory, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

WIDTH = 1024
STEPS = 6
MICROBATCHES = 3
HEAP, ALIGNED, PAGE_ALIGNED, MAPPED = range(4)  # the numbers of kinds in the hook


@dataclass(frozen=True)
class StepHeld:
    """Bytes after one step and its update.

    Attributes:
        resident: Resident bytes of the process, after the C library has returned free pages.
        arena: Bytes mapped for parameters and gradients.
        slots: Bytes of the simulated device's slots, which are host memory.
        live: Bytes in use, by the hook's kinds; all zero without the hook.
        peak: Most bytes in use since the step before, by the hook's kinds.
        device_peak: Peak of the run's ledger in the step.
    """

    resident: int
    arena: int
    slots: int
    live: list[int]
    peak: list[int]
    device_peak: int


@dataclass
class HostMemory:
    """The host memory of a training.

    Attributes:
        parameters: Number of elements.
        resident_before: Resident bytes of the process before the model was made.
        arena_before: Bytes mapped before the first gradient.
        state: Bytes of the optimizer's state, by its tensors.
        updates: Number of updates that ran behind the next forward.
        steps: Bytes after each step.
    """

    parameters: int = 0
    resident_before: int = 0
    arena_before: int = 0
    state: int = 0
    updates: int = 0
    steps: list[StepHeld] = field(default_factory=list)


def observe(layers: int, hook: Path | None = None, round_size: int = MICROBATCHES) -> HostMemory:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONMALLOC": "malloc"}
    if hook is not None:
        environment["LD_PRELOAD"] = str(hook)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.runtime.host_memory", str(layers), str(round_size)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    return HostMemory(**{**seen, "steps": [StepHeld(**step) for step in seen["steps"]]})


class _Hook:
    """The preloaded hook's counts; zeros without the hook."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._library: Any = library if hasattr(library, "hook_begin") else None
        if self._library is not None:
            for name in ("hook_live", "hook_peak"):
                getattr(self._library, name).restype = ctypes.c_long
            self._library.hook_begin()

    def counts(self, name: str) -> list[int]:
        return [getattr(self._library, name)(kind) if self._library is not None else 0 for kind in range(4)]

    def reset_peaks(self) -> None:
        if self._library is not None:
            self._library.hook_reset_peaks()


def _resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _make(layers: int, width: int) -> nn.Sequential:
    import torch
    from torch import nn

    bf16: Any = {"dtype": torch.bfloat16}
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width, **bf16), nn.LayerNorm(width, **bf16)) for _ in range(layers)]
    )


def _train(layers: int, width: int, round_size: int) -> HostMemory:
    import torch

    import hydra_ext
    from hydra_ext.optim import AdamW

    hook, seen = _Hook(), HostMemory(resident_before=_resident())
    model = _make(layers, width)
    optimizer = AdamW(model.parameters())
    seen.parameters = sum(parameter.numel() for parameter in model.parameters())
    budget = 5 * 2 * width * width + 2**20

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(inputs).float().square().mean()
        return value

    with hydra_ext.offload(model, optimizer, budget=budget) as run:
        core = run.core
        seen.arena_before = core.memory.arena_bytes
        for _ in range(STEPS):
            hook.reset_peaks()
            core.memory.ledger.reset_peak()
            batches = [torch.ones(2, width, dtype=torch.bfloat16) for _ in range(MICROBATCHES)]
            run.step(batches, loss, max_norm=1.0, round_size=round_size, recompute=False)
            run.sync()
            del batches
            live, peak = hook.counts("hook_live"), hook.counts("hook_peak")
            seen.steps.append(
                StepHeld(
                    _resident(), core.memory.arena_bytes, core.memory.slot_bytes, live, peak, core.memory.ledger.peak
                )
            )
        seen.updates = run.report().deferred_updates
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    seen.state = sum(value.nbytes for value in tensors)
    return seen


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    layers, round_size = (int(argument) for argument in sys.argv[1:])
    _train(2, 64, round_size)  # libraries and hydra_ext allocate their permanent memory
    gc.collect()
    gc.freeze()  # its leftovers must not be freed in the middle of a step
    print(json.dumps(asdict(_train(layers, WIDTH, round_size))))


if __name__ == "__main__":
    _main()
