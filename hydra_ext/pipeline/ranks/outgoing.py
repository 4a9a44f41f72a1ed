"""The parts of a message that a link's sender keeps until it is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks.watch import Failure


@dataclass(frozen=True)
class Outgoing:
    """A message to send: its tensors, and the words that announce them.

    Attributes:
        nbytes: Bytes of the tensors' memory.
        start: When the message was put, in seconds of ``time.perf_counter``.
        words: The prologue, and the form's description if it is new.
        counts: The tensors' version counters when they were put.
        layout: Number of the tensors' layout.
        computed: Event after which the tensors may be read; None on the host.
        sends: Sends of words and tensors that have begun.
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
    """The failure of this rank if a tensor was written to before it was sent."""
    where = f"while sending microbatch {entry.microbatch} of batch {entry.batch} ({link})"
    return Failure(
        rank,
        where,
        "a tensor that a stage has handed on was written to before it was sent: return a clone() of what the model "
        "keeps and writes to again",
    )


def when_computed(device: torch.device) -> torch.cuda.Event | None:
    """An event that happens when all work enqueued so far has been computed; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
