"""Threads for updates and norms: one pool for each number of them."""

from __future__ import annotations

import functools

import torch

from hydra_ext import _C


def pool(threads: int | None) -> _C.ThreadPool:
    """As many as torch computes with, unless a number is given."""
    return _pool(torch.get_num_threads() if threads is None else threads)


@functools.cache
def _pool(threads: int) -> _C.ThreadPool:
    return _C.ThreadPool(threads)
