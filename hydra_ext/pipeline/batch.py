"""One step's work, as the rank that has it knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hydra_ext.errors import StateError
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.stages.update import Settings
from hydra_ext.schedule import Action


@dataclass
class Batch:
    """
    Attributes:
        number: counted from 0; of an evaluation below -1.
        settings: of each of the rank's optimizers when the step was called, by stage: that of its update, which may
            come later.
        losses: by microbatch, where the last stage is this rank's; in whatever order they were computed.
        metrics: likewise.
    """

    number: int
    microbatches: Sequence[Any]
    fn: Callable[..., Any]
    seeds: Sequence[int]
    divisor: int
    max_norm: float | None
    settings: dict[int, Settings]
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, Any] = field(default_factory=dict)

    def message(
        self,
        microbatch: int,
        tensors: tuple[Tensor | None, ...],
        requires_grad: tuple[bool, ...] = (),
        structure: str = "",
    ) -> Message:
        """What a stage hands to another for one microbatch."""
        count = len(self.microbatches)
        return Message(self.number, microbatch, count, tensors, requires_grad, structure, self.max_norm)

    def check(self, message: Message, action: Action) -> None:
        """That it is what the action is to take.

        Raises:
            StateError: the rank that has sent it was given another step.
        """
        count = len(self.microbatches)
        if (message.batch, message.microbatch, message.count) != (action.batch, action.microbatch, count):
            raise StateError(
                f"the ranks do not make the same steps: stage {action.stage} is at microbatch {action.microbatch} of "
                f"{count} in batch {action.batch}, and got number {message.microbatch} of {message.count} of batch "
                f"{message.batch}. Give all ranks of a line the same microbatches"
            )
        if message.max_norm != self.max_norm:
            raise StateError(
                f"the ranks do not make the same steps: stage {action.stage} was given max_norm={self.max_norm} for "
                f"batch {action.batch}, and a stage beside it max_norm={message.max_norm}. Give all ranks the same one"
            )
