"""What training takes of host memory for a parameter: python benchmarks/host_memory.py [--layers 12] [--width 768]

A bf16 model with hydra_ext.optim.AdamW, whose master is exact fp32, and clipping to the exact norm, for which gradients
wait on the host. Goals: weights and state at most 12.5 bytes a parameter, gradients at most 2.1 more, and what the
process holds no more than both and what the simulated device may hold, which is host memory, too.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import sys
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from models import Size, make_model

import hydra_ext
from hydra_ext.optim import AdamW

STEPS = 6


def resident() -> int:
    """Bytes of the process, once the C library has given free pages back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def train(size: Size) -> bool:
    """Prints what it took. Whether the goals were reached."""
    before = resident()
    torch.set_default_dtype(torch.bfloat16)
    model = make_model(size)
    torch.set_default_dtype(torch.float32)
    optimizer = AdamW(model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.transformer.h[0].parameters())
    budget = 6 * layer + 2**22
    ids = torch.randint(0, 256, (2, 1, size.tokens))
    with hydra_ext.offload(model, optimizer, budget=budget) as run:
        weights = run.core.memory.arena_bytes
        arenas = []
        for _ in range(STEPS):
            run.step(
                list(ids),
                lambda one: model(input_ids=one, labels=one, use_cache=False).loss,
                max_norm=1.0,
                round_size=len(ids),
                recompute=False,
            )
            run.sync()
            arenas.append(run.core.memory.arena_bytes)
        state = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        held = resident() - before
    kept, gradients = (weights + state) / count, (arenas[-1] - weights) / count
    print(f"{count / 1e6:.1f} M parameters, budget {budget / 2**20:.1f} MiB; bytes a parameter:")
    print(f"    weights {weights / count:.3f}, state {state / count:.3f}: {kept:.3f}, at most 12.5")
    print(f"    gradients {gradients:.3f}, at most 2.1")
    print(f"    process {held / count:.3f}, of it the device at most {budget / count:.3f}")
    print(f"    mapped from the fourth step on: {sum(b - a for a, b in pairwise(arenas[3:]))}")
    return kept <= 12.5 and gradients <= 2.1 and held - budget <= (12.5 + 2.1) * count and arenas[3] == arenas[-1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()):
        train(Size(layers=2, width=64, tokens=32))  # what libraries allocate once
    reached = train(Size(layers=options.layers, width=options.width, tokens=32))
    print("goals reached" if reached else "goals MISSED")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
