"""Batches that are compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy
import torch


def digest(value: Any) -> str:
    """Of all numbers in a batch, with their types and shapes."""
    summed = hashlib.sha256()
    _feed(summed, value)
    return summed.hexdigest()


def _feed(summed: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        summed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = torch.empty(value.shape, dtype=value.dtype).copy_(value).reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, numpy.ndarray):
        summed.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key in value:
            summed.update(repr(key).encode())
            _feed(summed, value[key])
    elif isinstance(value, list | tuple):
        summed.update(f"{type(value).__name__}{len(value)}".encode())
        for each in value:
            _feed(summed, each)
    else:
        summed.update(repr(value).encode())
