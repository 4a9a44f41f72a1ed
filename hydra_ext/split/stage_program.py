"""The seam between what makes stages (explicit modules, a plain module's split) and what runs them.

A *stage program* runs one stage of the model, on one rank, for one microbatch at a time. Several microbatches may have
been forwarded before the first goes backward; each keeps what it needs in the :class:`StagePass` that its forward
returned, and nowhere else. The caller shows the right version of the weights in the modules before ``forward`` and
before ``backward`` (a checkpoint inside the stage reads them again there), and moves values between ranks.
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
        tensors: in an order that both sides know; without a graph; the receiver may write to them.
        requires_grad: of each: whether a gradient comes back for it.
        structure: how the next stage puts them together. The text is the same for microbatches of one kind; each
            side compares it with its own, or is built from it.
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
        leaving: what goes to the next stage; None from the last one. Read once.
        loss: of the microbatch, without a graph; None but from the last stage.
        metrics: what ``fn`` returned beside the loss, its tensors without a graph; last stage only.
    """

    loss: Tensor | None
    metrics: Any

    @property
    def leaving(self) -> Crossing | None: ...

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Adds to the parameters' ``.grad``; may be called once.

        Args:
            gradients: of ``leaving.tensors``, as the next stage returned them; empty in the last stage, where it
                starts from the loss divided by the ``divisor`` of the forward.

        Returns:
            Those of the tensors that arrived, None where nothing came.
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
            fn: what the caller of the step gave; returns the loss, (loss, metrics) or a mapping with "loss".
            arriving: from the stage before; None in the first.
            seed: of the microbatch. :func:`event_seed` says what is drawn from it, so that the numbers do not depend
                on the number of stages.
            divisor: the loss is divided by it before backward.
        """


def event_seed(seed: int, event: int, *, after: bool = False) -> int:
    """What ``torch.manual_seed`` is called with as the n-th event (a block's call, counted from 0 in the microbatch's
    forward) begins, and ``after`` it has ended; before the first it is called with the microbatch's ``seed`` itself.
    So are Python's ``random.seed``, and ``numpy.random.seed`` with the lower 32 bits.

    A stage skips the events before its own, whose random numbers it therefore never draws: each event has a stream of
    its own, and so has what the model draws between two events.
    """
    mixed = (seed ^ ((2 * event + (2 if after else 1)) * 0x9E3779B97F4A7C15)) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) >> 2  # what manual_seed takes on every device


def microbatch_seed(seed: int, replica: int, batch: int, microbatch: int) -> int:
    """That of a microbatch, from the pipeline's."""
    return event_seed(event_seed(event_seed(seed, replica), batch), microbatch)


def reseed(seed: int) -> None:
    """Of torch's default generators on all devices, of Python's ``random`` and of numpy's global generator.

    ``torch.manual_seed`` does it, but where nothing else than the CPU is there it formats its caller's stack each time,
    for a GPU that might appear: a tenth of a millisecond and more.
    """
    everywhere = torch.accelerator.is_available()
    if everywhere:
        torch.manual_seed(seed)
    seed_generators(seed, () if everywhere else [torch.default_generator])
