"""What a link's sender keeps of a message until it has left."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks.watch import Failure


@dataclass(frozen=True)
class Outgoing:
    """Words of the header, then tensors.

    Attributes:
        nbytes: of the tensors' memory.
        counts: of writes to the tensors, when they were handed over.
        computed: when the tensors may be read.
        sends: of the words, and of the tensors, where they have begun.
    """

    batch: int
    microbatch: int
    nbytes: int
    start: float
    words: list[Tensor]
    tensors: list[Tensor]
    counts: list[int]
    layout: int
    computed: torch.cuda.Event | None
    sends: list[dist.Work]


def written(rank: int, entry: Outgoing, link: str) -> Failure:
    """This rank's, that a tensor was written to."""
    where = f"on the way of microbatch {entry.microbatch} of batch {entry.batch} ({link})"
    return Failure(
        rank,
        where,
        "a tensor that a stage has handed on was written to before it was sent: return a clone() of what the model "
        "keeps and writes to again",
    )


def when_computed(device: torch.device) -> torch.cuda.Event | None:
    """Has happened when what was enqueued so far has been computed."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
