"""Stages that pass on memory and then write to it again, and messages whose texts and numbers never repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydra_ext.errors import RankFailed, UnsupportedModel
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.links import Inbox, Links, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.ranks.watch import Watch
from support.pipeline import pipelines

COUNT = 6
KEPT = ("buffer", "view of a buffer", "attribute", "list", "parameter", "object", "object in a list", "microbatch")


class Keeps(nn.Module):
    """Writes the microbatch's number into tensors that it keeps, and passes them on.

    The other rank asks for nothing until the last microbatch lets it begin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(pipelines.WIDTH, pipelines.WIDTH)
        self.register_buffer("buffer", torch.zeros(3, 5))
        self.frozen = nn.Parameter(torch.zeros(3, 5), requires_grad=False)
        self.attribute = torch.zeros(3, 5)
        self.members = [torch.zeros(3, 5)]
        self.helper = SimpleNamespace(kept={"it": torch.zeros(3, 5)})
        self.helpers = [SimpleNamespace(kept=torch.zeros(3, 5))]

    def forward(self, microbatch: dict[str, Any]) -> tuple[Tensor, ...]:
        buffer: Any = self.buffer
        kept = [buffer, buffer[1:].detach(), self.attribute, self.members[0], self.frozen.data]
        kept += [self.helper.kept["it"], self.helpers[0].kept, microbatch["scratch"].kept]
        for tensor in kept:
            tensor.fill_(microbatch["number"])
        if microbatch["number"] == COUNT:
            dist.barrier()
        return (self.linear(microbatch["x"]), *kept)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(pipelines.WIDTH, pipelines.CLASSES)
        self.seen: list[list[set[float]]] = []

    def forward(self, arrived: tuple[Tensor, ...]) -> Tensor:
        x, *kept = arrived
        self.seen.append([set(tensor.flatten().tolist()) for tensor in kept])
        return self.head(x)


def numbers_seen(rank: int) -> list[list[set[float]]]:
    """Returns the numbers that the second stage has got: by microbatch, and by kind of tensor."""
    stages = [Keeps(), Looks()]
    scratch = SimpleNamespace(kept=torch.zeros(3, 5))
    data = [
        {"x": torch.randn(2, 3, pipelines.WIDTH), "labels": torch.zeros(2, 3, dtype=torch.long)} for _ in range(COUNT)
    ]
    microbatches = [{**each, "scratch": scratch, "number": number} for number, each in enumerate(data, 1)]
    with Pipeline(None, pipelines.sgd, stages=stages, schedule="gpipe", microbatches=COUNT, seed=5) as pipe:
        if rank == 1:
            dist.barrier()
        pipe.step(microbatches, pipelines.loss_of)
    return stages[1].seen  # type: ignore[return-value]


@contextmanager
def _link(rank: int, name: str) -> Iterator[tuple[Watch, Outbox | Inbox | None]]:
    watch = Watch(rank, 2, name, patience=20.0, describe=lambda: "")
    links = Links(rank, torch.device("cpu"), watch)
    yield watch, links.connect(0, 1, "test")
    links.close(20.0)
    watch.end()


def write_too_soon(rank: int) -> str:
    """Returns the error of the rank that writes to a sent tensor before the other one asks for it."""
    error = ""
    with _link(rank, "written") as (watch, end):
        tensor = torch.zeros(1000)
        if isinstance(end, Outbox):
            end.put(Message(0, 3, 8, (tensor,)))
            tensor.add_(1)
        dist.barrier()
        if isinstance(end, Inbox):
            end.expect()
            watch.wait_for(lambda: end.arrived)
        try:
            watch.wait_for(lambda: False)
        except RankFailed as failed:
            error = str(failed)
    return error


def texts_that_never_repeat(rank: int) -> tuple[list[str], int]:
    """Returns the arrived messages, every third of which repeats a text, and the number of texts that this end kept."""
    texts = [f"{number}" if number % 3 else "again" for number in range(200)]
    texts += [f"{number}" for number in range(200)] + ["", "again"]
    arrived = []
    kept = 0
    with _link(rank, "texts") as (_, end):
        for number, text in enumerate(texts):
            if isinstance(end, Outbox):
                end.put(Message(0, number, len(texts), (torch.tensor(number),), structure=text))
            elif isinstance(end, Inbox):
                end.expect()
                message = end.take()
                arrived.append(f"{message.structure} {message.tensors[0]}")
        kept = len(end._forms) if end is not None else 0
    return arrived, kept


def steps_with_numbers(rank: int) -> tuple[list[Any], list[int]]:
    """Returns the metrics of all steps, and the number of texts that each of this rank's links has kept."""
    found = []
    with Pipeline(None, pipelines.sgd, stages=pipelines.make_stages(2), schedule="1f1b", microbatches=2) as pipe:
        for step in range(100):
            output = pipe.step(
                [pipelines.make_microbatch(step, index) for index in range(2)],
                lambda value, microbatch, step=step: (pipelines.loss_of(value, microbatch), {"of": step}),
            )
            found.append([metric["of"] for metric in output.metrics])
        ends = pipe._engine.assembly.links._ends  # type: ignore[union-attr]
        return found, [len(end._forms) for end in ends]


def what_cannot_be_sent(rank: int) -> list[str]:
    """Returns the sender's error for each object, or the result of the message after them."""
    found = []
    sparse, quantized = torch.eye(4).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)
    with _link(rank, "cannot") as (_, end):
        if isinstance(end, Outbox):
            for tensor in (sparse, quantized, torch.eye(4).to_sparse_csr()):
                try:
                    end.put(Message(0, 0, 1, (torch.ones(2), tensor), structure="of two"))
                except UnsupportedModel as error:
                    found.append(str(error))
            end.put(Message(0, 0, 1, (torch.ones(2),), structure="of one"))
        elif isinstance(end, Inbox):
            end.expect()
            message = end.take()
            found.append(
                f"{message.structure}: {[tensor.tolist() for tensor in message.tensors if tensor is not None]}"
            )
    return found
