"""The microbatches of one step, as users pass them and as a rank runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.stages.update import Settings
from hydra_ext.schedule import Action


@dataclass
class Batch:
    """One step, as one rank runs it.

    Attributes:
        number: The batch's number, from 0. An evaluation has one below -1.
        divisor: The number of microbatches, by which each loss is divided; 1 in an evaluation.
        settings: The options of each stage's optimizer when the step was called. Its update, which may be made in a
            later step, uses them.
        losses: Losses by microbatch, on the rank of the last stage. They are in the order of computation.
        metrics: Likewise.
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
        """A message of this batch, for one microbatch, from one stage to another."""
        count = len(self.microbatches)
        return Message(self.number, microbatch, count, tensors, requires_grad, structure, self.max_norm)

    def check(self, message: Message, action: Action) -> None:
        """Checks that a message is the one that the action takes.

        Raises:
            StateError: The sender makes another step.
        """
        count = len(self.microbatches)
        if (message.batch, message.microbatch, message.count) != (action.batch, action.microbatch, count):
            raise StateError(
                f"the ranks do not make the same steps: stage {action.stage} is at microbatch {action.microbatch} of "
                f"{count} in batch {action.batch}, and got microbatch {message.microbatch} of {message.count} in batch "
                f"{message.batch}. Give all ranks of a line the same microbatches"
            )
        if message.max_norm != self.max_norm:
            raise StateError(
                f"the ranks do not make the same steps: stage {action.stage} was given max_norm={self.max_norm} for "
                f"batch {action.batch}, and a stage beside it max_norm={message.max_norm}. Give all ranks the same "
                "max_norm"
            )


def as_microbatches(data: Any, count: int) -> list[Any]:
    """Returns the list of microbatches, or cuts a tensor, or a mapping of tensors, into microbatches.

    Each tensor is cut along its first dimension. All microbatches get every value that is no tensor, and every tensor
    without dimensions. The microbatches are as even as they can be, the larger ones first. There are fewer than
    ``count`` if there are fewer rows.

    Raises:
        InvalidArgument: There are no microbatches, or the tensors do not have the same number of rows.
    """
    if isinstance(data, (Tensor, Mapping)):
        return _cut(data, count)
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InvalidArgument(
            f"microbatches is a {type(data).__name__}: give a list of microbatches, or a tensor or a mapping of "
            "tensors that is to be cut into them"
        )
    works = list(data)
    if not works:
        raise InvalidArgument("the step has no microbatches: give at least one, on every rank")
    return works


def _cut(data: Any, count: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(dict(data) if isinstance(data, Mapping) else data)
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) != 1:
        raise InvalidArgument(
            f"the batch's tensors have {sorted(rows) or 'no'} rows and cannot be cut into microbatches: give them the "
            "same number of rows, or a list of microbatches"
        )
    (total,) = rows
    if total == 0:
        raise InvalidArgument("the batch has no rows: give at least one, on every rank")
    parts = min(count, total)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * parts for leaf in leaves]
    return [pytree.tree_unflatten([pieces[i] for pieces in cut], spec) for i in range(parts)]
