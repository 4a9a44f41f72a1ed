"""Offloads models of 256 MiB that were built without memory, and prints the process's peak memory, as JSON.

Run as ``python -m support.construction.materialized_memory FOLDER`` by observe(), in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.checkpoint.checkpoint_memory import growth

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Taken:
    """Measured bytes.

    Attributes:
        peak: Peak memory of the process, above its memory before, while a model is built and offloaded.
        arena, expected_arena: Bytes of the blocks' homes, measured and by the formula.
        foreign: Bytes of parameters that are outside these homes.
        largest_block, largest_parameter: Bytes of the largest one.
    """

    peak: int
    arena: int
    expected_arena: int
    foreign: int
    largest_block: int
    largest_parameter: int


def observe(folder: Path) -> dict[str, Taken]:
    """Returns the bytes of each model, by the source of its numbers: "files" or "numbers"."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.construction.materialized_memory", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: Taken(**taken) for name, taken in json.loads(done.stdout.splitlines()[-1]).items()}


def _build(layers: int = 4, width: int = 1024) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=16,
            vocab_size=6 * width,
        )
    )


def _measure(build: Callable[[], nn.Module], weights: Path | None = None) -> Taken:
    import hydra_ext
    from support.construction.materialized import arena_bytes

    seen: dict[str, int] = {}

    def work() -> None:
        model = hydra_ext.materialize(build, weights=weights)
        with hydra_ext.offload(model, budget=2**30) as run:
            seen["arena"] = _arenas[-1].mapped_bytes
            seen["expected_arena"] = arena_bytes(run)
            seen["foreign"] = run.core.blocks.foreign_bytes
            seen["largest_block"] = max(block.nbytes for block in run.layout.blocks)
            seen["largest_parameter"] = max(parameter.nbytes for parameter in model.parameters())

    gc.collect()  # frees the model before this one
    return Taken(peak=growth(work), **seen)


_arenas: list[Any] = []


def _main() -> None:
    import torch

    from hydra_ext.runtime.placement.devices import SimulatedPlace

    torch.set_num_threads(1)
    make = SimulatedPlace.make_arena
    SimulatedPlace.make_arena = lambda self: _arenas.append(make(self)) or _arenas[-1]  # type: ignore[method-assign]
    _measure(lambda: _build(layers=4, width=32))  # libraries and hydra_ext allocate their permanent memory
    folder = Path(sys.argv[1])
    model: Any = _build()
    model.save_pretrained(folder, max_shard_size="100MB")
    del model
    taken = {"files": _measure(_build, folder), "numbers": _measure(_build)}
    print(json.dumps({name: asdict(each) for name, each in taken.items()}))


if __name__ == "__main__":
    _main()
