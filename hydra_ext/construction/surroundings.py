"""What a constructor's outcome depends on besides its code: random states, and torch's defaults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Of torch on the CPU, of Python's ``random`` and of numpy's global generator."""

    torch_state: Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls) -> RandomState:
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


@dataclass(frozen=True)
class Surroundings:
    """With which a constructor was run first, so that it can be run again."""

    random: RandomState
    dtype: torch.dtype
    grad_enabled: bool

    @classmethod
    def now(cls) -> Surroundings:
        return cls(RandomState.now(), torch.get_default_dtype(), torch.is_grad_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts everything back afterwards."""
        before = Surroundings.now()
        with ExitStack() as entered:
            entered.callback(before.random.restore)
            entered.callback(torch.set_default_dtype, before.dtype)
            entered.enter_context(torch.inference_mode(False))
            entered.enter_context(torch.set_grad_enabled(self.grad_enabled))
            torch.set_default_dtype(self.dtype)
            self.random.restore()
            yield
