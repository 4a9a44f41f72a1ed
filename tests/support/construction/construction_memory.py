"""Builds models of some hundred MiB in parts, and prints the bytes of tensors meanwhile, as JSON.

Run as ``python -m support.construction.construction_memory`` by observe(), in a process of its own with the malloc hook
preloaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Held:
    """Measured bytes.

    Attributes:
        whole: Bytes of all parameters.
        largest: Bytes of the largest parameter.
        filled: Bytes of the filled parameters.
        ordinary_peak, materialize_peak, fill_peak: Most bytes of tensors at one time, above those before, in the
            ordinary constructor, in materialize() and in fill().
        materialize_left, fill_left: Bytes of tensors afterwards.
        resident_after_materialize, resident_after_fill: Growth of the process's resident memory. Memory that was free
            before is used again first, so only the first model's figures are meaningful.
    """

    whole: int
    largest: int
    filled: int
    ordinary_peak: int
    materialize_peak: int
    materialize_left: int
    fill_peak: int
    fill_left: int
    resident_after_materialize: int
    resident_after_fill: int


def observe(hook: Path) -> dict[str, Held]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.construction.construction_memory"],
        env={**os.environ, "LD_PRELOAD": str(hook), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: Held(**held) for name, held in json.loads(done.stdout.splitlines()[-1]).items()}


class _Hook:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.hook_aligned_peak.restype = ctypes.c_long
        self._library.hook_live.restype = ctypes.c_long
        self._library.hook_begin()

    def live(self) -> int:
        aligned = (1, 2)
        return sum(self._library.hook_live(kind) for kind in aligned)

    def during(self, work: Callable[[], Any]) -> tuple[Any, int, int]:
        """Returns the result, the peak, and the remaining bytes, both above the bytes before."""
        before = self.live()
        self._library.hook_reset_peaks()
        result = work()
        return result, self._library.hook_aligned_peak() - before, self.live() - before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def _llama(layers: int = 4, width: int = 1024) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=16,
            vocab_size=9000,
        )
    )


def _copied() -> nn.Module:
    from torch import nn

    return nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096), 4, enable_nested_tensor=False)


def _made_from_numbers() -> nn.Module:
    import torch
    from torch import nn

    return nn.ParameterList([nn.Parameter(torch.randn(1024, 4096) * 0.02) for _ in range(12)]).to(torch.bfloat16)


def _measure(build: Callable[[], nn.Module], weights: Path | None = None) -> Held:
    from hydra_ext.construction import fill, materialize

    hook = _Hook()
    if weights is not None:
        from safetensors.torch import save_model

        save_model(build(), str(weights))
    before = _resident()
    model, materialize_peak, materialize_left = hook.during(lambda: materialize(build, weights=weights))
    after_materialize = _resident() - before
    parameters = dict(model.named_parameters())
    sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
    names = list(parameters)[len(parameters) // 2 :][: len(parameters) // 4]
    _, fill_peak, fill_left = hook.during(lambda: fill(model, names))
    after_fill = _resident() - before
    _, ordinary_peak, _ = hook.during(build)
    return Held(
        whole=sum(sizes.values()),
        largest=max(sizes.values()),
        filled=sum(sizes[name] for name in names),
        ordinary_peak=ordinary_peak,
        materialize_peak=materialize_peak,
        materialize_left=materialize_left,
        fill_peak=fill_peak,
        fill_left=fill_left,
        resident_after_materialize=after_materialize,
        resident_after_fill=after_fill,
    )


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    _measure(lambda: _llama(layers=4, width=32))  # libraries and hydra_ext allocate their permanent memory
    with tempfile.TemporaryDirectory() as folder:
        held = {
            "library": _measure(_llama),
            "files": _measure(_llama, Path(folder) / "model.safetensors"),
            "copies": _measure(_copied),
            "converted": _measure(_made_from_numbers),
        }
    print(json.dumps({name: asdict(each) for name, each in held.items()}))


if __name__ == "__main__":
    _main()
