"""The work of ranks in single tests of data parallel training."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.errors import ReplicasDiffer
from hydra_ext.runtime.averaging import Averaging
from support.replicas.replicated import Job, Recorder, average, take_any_step, take_step, train_together, values_of

ROOMY = 2**26
AT_THE_END = 10**6  # turns


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> hydra_ext.offload:
    return hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True), **options)


@dataclass(frozen=True)
class BlockSeen:
    """The turns that had run when a block's gradients were finished, issued and delivered."""

    block: int
    finished: int
    issued: int
    from_device: bool
    delivered: int


def follow_blocks(rank: int, job: Job) -> list[dict[str, int]]:
    """Returns a :class:`BlockSeen` of each block in the second step's last round, in the order of their issue."""
    issued: dict[int, tuple[int, int, bool]] = {}
    delivered: dict[int, int] = {}
    turns = [0]

    def noting(name: str, note: Callable[..., None]) -> Any:
        plain = getattr(Averaging, name)

        def call(self: Averaging, *args: Any) -> Any:
            note(self, *args)
            return plain(self, *args)

        return mock.patch.object(Averaging, name, call)

    def reach(_averaging: Averaging, reached: int = AT_THE_END) -> None:
        turns[0] = reached

    def issue(averaging: Averaging, block: int, shares: list[Any]) -> None:
        from_device = all(share.from_device for share in shares)
        issued[block] = (averaging._order._last_turns[block] + 1, turns[0], from_device)

    def deliver(_averaging: Averaging, block: int, _share: Any) -> None:
        delivered[block] = turns[0]

    model, optimizer = job.make(rank)
    patches = [("advance", reach), ("complete", reach), ("_begin", issue), ("_deliver", deliver)]
    with ExitStack() as stack:
        for name, note in patches:
            stack.enter_context(noting(name, note))
        run = stack.enter_context(offloaded(model, optimizer))
        for step in range(2):
            issued.clear()
            take_step(run, job, job.microbatches(rank, step), Recorder(model, optimizer))
    return [asdict(BlockSeen(block, *known, delivered[block])) for block, known in issued.items()]


def own_gradients(job: Job, size: int) -> Iterator[list[Tensor | None]]:
    """Yields the gradients of the first step of each rank by itself."""
    for rank in range(size):
        model, _ = job.make(0)
        given = job.microbatches(rank, 0)
        for seed, batch in given:
            torch.manual_seed(seed)
            (job.loss(model, batch) / len(given)).backward()
        yield [parameter.grad for parameter in model.parameters()]


def ways(job: Job) -> Iterator[list[tuple[Tensor | None, Tensor | None]]]:
    """Yields, for each step, which parameters get a gradient on each of two ranks: a tensor, or None."""
    for step in range(job.steps):
        gradients = []
        for rank in range(2):
            model, _ = job.make(0)
            for _, batch in job.microbatches(rank, step):
                job.loss(model, batch).backward()
            gradients.append([None if p.grad is None else torch.ones(()) for p in model.parameters()])
        yield list(zip(*gradients, strict=True))


# ---- infinities -----------------------------------------------------------------------------------------------------


def overflow(rank: int) -> tuple[list[bool], list[list[Tensor | None]], list[Tensor | None]]:
    """Trains with an infinite first loss on the second rank."""
    job = Job(m=(2,), optimizer="ours")
    model, optimizer = job.make(rank)
    factors = [float("inf") if rank == 1 else 1.0, 1.0]
    skipped, kept = [], []
    with offloaded(model, optimizer) as run:
        kept.append(values_of(list(model.parameters())))
        for step, factor in enumerate(factors):
            batches = [batch for _, batch in job.microbatches(rank, step)]
            out = run.step(batches, lambda batch, factor=factor: job.loss(model, batch) * factor, max_norm=1.0)
            skipped.append(out.skipped)
            kept.append(values_of(list(model.parameters())))
    return skipped, kept[:2], kept[2]


def overflow_scaled(rank: int) -> list[float]:
    job = Job(m=(2,))
    model, optimizer = job.make(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    with offloaded(model, optimizer) as run:
        for step in range(2):
            factor = float("inf") if rank == 1 and step == 0 else 1.0
            batches = [batch for _, batch in job.microbatches(rank, step)]
            run.step(batches, lambda batch, factor=factor: job.loss(model, batch) * factor, scaler=scaler)
            scales.append(scaler.get_scale())
    return scales


# ---- fallbacks ------------------------------------------------------------------------------------------------------

REFUSED = Job(m=(2,))


def refuse(rank: int) -> tuple[list[list[Tensor | None]], int]:
    """Trains where the second rank's microbatches count in one attribute before and after a call of the model.

    A round cannot tell apart whose count it is. Returns the parameters after each step, and the number of fallbacks.
    """
    model, optimizer = REFUSED.make(rank)
    recorder = Recorder(model, optimizer)

    def loss(batch: Any) -> Tensor:
        model.tally = getattr(model, "tally", 0) + rank
        value = REFUSED.loss(model, batch)
        if rank == 1:
            model.tally = model.tally + 1
        return value

    with offloaded(model, optimizer) as run:
        for step in range(REFUSED.steps):
            given = REFUSED.microbatches(rank, step)
            run.step([batch for _, batch in given], loss, seeds=[seed for seed, _ in given], round_size=2)
            recorder.step_ended()
        return recorder.seen["parameters"], run.report().fallbacks


def refuse_together() -> Any:
    return train_together(REFUSED)[0]["parameters"]


def leave(rank: int) -> tuple[int, int, bool]:
    """Returns the threads of the process before and after a context, and whether the process group outlives its end."""
    job = Job(m=(2,), steps=2)
    model, optimizer = job.make(rank)
    job.loss(model, job.microbatches(rank, 0)[0][1]).backward()
    average([model])
    dist.all_reduce(torch.ones(1))
    optimizer.zero_grad()
    before = len(os.listdir("/proc/self/task"))
    with offloaded(model, optimizer) as run:
        for step in range(job.steps):
            take_any_step(run, job, rank, step, Recorder(model, optimizer))
    replicas = run.replicas
    del run
    gc.collect()
    after = len(os.listdir("/proc/self/task"))
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert replicas is not None  # alive, but does not keep the group alive
    return before, after, group() is not None


# ---- at the beginning -----------------------------------------------------------------------------------------------


def enter_different(rank: int, difference: str) -> tuple[str, int, list[bool]]:
    """Returns the error of entering, the rank that it names, and whether the model's class and values are unchanged."""
    torch.manual_seed(rank)
    width = 16 if difference == "shape" and rank == 1 else 8
    model: nn.Module = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width))
    if rank == 1 and difference == "dtype":
        model = model.to(torch.float64)
    elif rank == 1 and difference == "trained":
        model[0].bias.requires_grad_(False)
    elif rank == 1 and difference == "buffer":
        model[1].register_buffer("more", torch.zeros(3))
    blocks = [model[0]] if rank == 1 and difference == "blocks" else [model]
    before = values_of(list(model.state_dict().values()))
    try:
        with hydra_ext.offload(model, budget=ROOMY, blocks=blocks):
            return "", -1, []
    except ReplicasDiffer as error:
        pairs = zip(before, model.state_dict().values(), strict=True)
        left = [type(model) is nn.Sequential, *(torch.equal(a, b) for a, b in pairs)]
        return str(error), -1 if error.rank is None else error.rank, left


def enter(rank: int) -> tuple[list[Tensor | None], list[int], list[str]]:
    """Enters with different parameters and buffers on every rank, and then once more.

    Returns:
        Parameters and buffers after the first time, the number of writes to each parameter in each of the two, and the
        logged messages.
    """
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("hydra_ext").addHandler(handler)
    logging.getLogger("hydra_ext").setLevel(logging.INFO)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(3, 4))
    model[1].running_mean.fill_(rank)
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    model.register_buffer("wide", torch.full((2, 3), float(rank)).t())
    before = [tensor._version for tensor in model.parameters()]
    with hydra_ext.offload(model, budget=ROOMY):
        entered = values_of(list(model.state_dict().values()))
    bumps = [tensor._version - old for tensor, old in zip(model.parameters(), before, strict=True)]
    again = [tensor._version for tensor in model.parameters()]
    with hydra_ext.offload(model, budget=ROOMY):
        pass
    bumps += [tensor._version - old for tensor, old in zip(model.parameters(), again, strict=True)]
    return entered, bumps, logged


def choose(rank: int) -> list[list[float]]:
    """Returns a weight's gradient and the number of ranks for each ``process_group``. Rank r contributes r + 1."""
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([other]) for other in range(2)][rank]
    gradients = []
    for group in (None, pair, False, alone):
        model = nn.Linear(1, 1, bias=False)
        with hydra_ext.offload(model, budget=ROOMY, process_group=group) as run:
            (model(torch.ones(1, 1)) * (rank + 1)).sum().backward()
            gradients.append([model.weight.grad.item(), float(run.report().ranks)])
    return gradients


def grad_of(rank: int) -> list[list[float]]:
    """Calls torch.autograd.grad on one rank: it neither averages nor waits for another rank."""
    model = nn.Linear(1, 1, bias=False)
    with hydra_ext.offload(model, budget=ROOMY):
        found = []
        if rank == 1:
            loss = (model(torch.ones(1, 1)) * 3).sum()
            found = [gradient.item() for gradient in torch.autograd.grad(loss, [model.weight])]
        (model(torch.ones(1, 1)) * (rank + 1)).sum().backward()
        return [found, [model.weight.grad.item()]]


def assigned(rank: int) -> list[list[float]]:
    """Returns assigned gradients of a weight that a backward uses on one rank or on none."""
    found = []
    for users in (0, 1):
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        with offloaded(model, torch.optim.SGD(model.parameters(), lr=1.0)):
            for layer in model:
                layer.weight.grad = torch.full((1, 1), float(rank))
            used = list(model) if rank < users else list(model)[:1]
            sum(layer(torch.ones(1, 1)).sum() for layer in used).backward()
            found.append([layer.weight.grad.item() for layer in model])
    return found
