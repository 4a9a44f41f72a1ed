"""The interface between the makers of stages (explicit modules, a plain module's split) and the code that runs them.

A *stage program* runs one stage of the model, on one rank, for one microbatch at a time. Several microbatches may have
run forward before the first runs backward. Each keeps its state in the :class:`StagePass` that its forward returned,
and nowhere else. The caller moves values between ranks. It also puts the right version of the weights into the modules
before ``forward``, and again before ``backward``, where a checkpoint inside the stage reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hydra_ext.state.randomness import seed_generators


@dataclass(frozen=True)
class Crossing:
    """The values that cross from one stage to the next for one microbatch.

    Attributes:
        tensors: The tensors, in an order that both sides know, and without a graph. The receiver may write to them.
        requires_grad: For each tensor, whether the next stage returns a gradient for it.
        structure: Text that tells the next stage how to put the tensors together. It is the same for microbatches of
            one kind. The receiver compares it with its own text, or rebuilds its input by it.
    """

    tensors: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    structure: str = ""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class StagePass(Protocol):
    """One microbatch between its forward and its backward in one stage.

    Attributes:
        leaving: Values for the next stage; None in the last stage. Read once.
        loss: Loss of the microbatch, without a graph; None except in the last stage.
        metrics: The value that ``fn`` returned beside the loss, its tensors without a graph; last stage only.
    """

    loss: Tensor | None
    metrics: Any

    @property
    def leaving(self) -> Crossing | None: ...

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Adds to the parameters' ``.grad``; may be called once.

        Args:
            gradients: Gradients of ``leaving.tensors``, as the next stage returned them. Empty in the last stage:
                there backward starts from the loss divided by the ``divisor`` of the forward.

        Returns:
            The gradients of the tensors that arrived; None for each tensor that got none.
        """


class StageProgram(Protocol):
    """One stage on one rank."""

    def forward(
        self,
        fn: Callable[..., Any],
        microbatch: Any,
        arriving: Crossing | None,
        *,
        seed: int,
        divisor: int,
    ) -> StagePass:
        """
        Args:
            fn: Function that the caller of the step gave. It returns the loss, (loss, metrics) or a mapping with
                "loss".
            arriving: Values from the stage before; None in the first stage.
            seed: Seed of the microbatch. :func:`event_seed` derives each event's seed from it, so that the numbers do
                not depend on the number of stages.
            divisor: Number that the loss is divided by before backward.
        """


def event_seed(seed: int, event: int, *, after: bool = False) -> int:
    """The seed of the default generators as an event begins or, with ``after``, once it has ended.

    It is given to ``torch.manual_seed``, to Python's ``random.seed`` and, with its lower 32 bits, to
    ``numpy.random.seed``. Before the first event the generators are seeded with the microbatch's ``seed`` itself.

    A stage skips the events before its own and never draws their random numbers. So each event has a stream of its own,
    and so has the glue between two events.

    Args:
        seed: Seed of the microbatch.
        event: Number of the event (a block's call) in the microbatch's forward, from 0.
    """
    mixed = (seed ^ ((2 * event + (2 if after else 1)) * 0x9E3779B97F4A7C15)) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) >> 2  # the range that manual_seed accepts on every device


def microbatch_seed(seed: int, replica: int, batch: int, microbatch: int) -> int:
    """The seed of a microbatch, derived from the pipeline's ``seed``."""
    return event_seed(event_seed(event_seed(seed, replica), batch), microbatch)


def reseed(seed: int) -> None:
    """Seeds torch's default generators on all devices, Python's ``random`` and numpy's global generator.

    On a machine that has only a CPU, torch's default generator is seeded directly. ``torch.manual_seed`` would format
    its caller's stack there at each call, in case a GPU is initialized later: at least 0.1 ms.
    """
    everywhere = torch.accelerator.is_available()
    if everywhere:
        torch.manual_seed(seed)
    seed_generators(seed, () if everywhere else [torch.default_generator])
