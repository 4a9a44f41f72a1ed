"""The state that a constructor's result depends on besides its code: random states, and torch's defaults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from hydra_ext.state.randomness import RandomState


@dataclass(frozen=True)
class Surroundings:
    """The state of a constructor's first run, so that it can be run again."""

    random: RandomState
    dtype: torch.dtype
    grad_enabled: bool

    @classmethod
    def now(cls) -> Surroundings:
        return cls(RandomState(torch.device("cpu")), torch.get_default_dtype(), torch.is_grad_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs the body with this state, and puts the present one back."""
        with ExitStack() as entered:
            entered.enter_context(self.random.in_place())
            entered.callback(torch.set_default_dtype, torch.get_default_dtype())
            entered.enter_context(torch.inference_mode(False))
            entered.enter_context(torch.set_grad_enabled(self.grad_enabled))
            torch.set_default_dtype(self.dtype)
            yield
