"""Thread pools for updates and norms: one for each number of threads."""

from __future__ import annotations

import functools

import torch

from hydra_ext import _C


def pool(threads: int | None) -> _C.ThreadPool:
    """The pool of ``threads``, or of as many as torch computes with."""
    return _pool(torch.get_num_threads() if threads is None else threads)


@functools.cache
def _pool(threads: int) -> _C.ThreadPool:
    return _C.ThreadPool(threads)
