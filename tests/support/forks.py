"""Processes of tests are forked from one that has imported slow libraries: support.frozen is the last of them."""

from __future__ import annotations

import multiprocessing
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
    made.set_forkserver_preload(_IMPORTED_ONCE)
    return made
