"""One step's work: as users give it, and as the rank that has it knows it."""

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


def as_microbatches(data: Any, count: int) -> list[Any]:
    """The microbatches themselves, or those that a tensor, or a mapping of tensors, is cut into.

    A whole is cut along the first dimension of every tensor that has as many rows as most; what is no tensor, or has
    no rows, goes to all. The parts are as even as they can be, the larger ones first; there are fewer than ``count``
    where there are fewer rows.

    Raises:
        InvalidArgument: there is nothing in it, or tensors do not have the same number of rows.
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
