"""Processes of tests are forked from one that has imported slow libraries: support.frozen is the last of them."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext

_IMPORTED_ONCE = [
    "torch.distributed",
    "transformers.models.gpt2.modeling_gpt2",
    "peft",
    "hydra_ext.pipeline",
    "support.plain.plain_models",
    "support.frozen",
]


def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    first = ["support.emulated_first"] if "emulated_cuda" in sys.modules else []
    made.set_forkserver_preload(first + _IMPORTED_ONCE)
    return made
