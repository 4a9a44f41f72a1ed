"""The gradients of one batch, from the end of its backward to the optimizer's step.

In the background, batch by batch, every rank makes these steps in this order:

1. Weights that several stages use: the stages' gradients are added, beginning with the last stage's.
2. Replicas: the mean over the copies of a stage. It is added in the order of the ranks and divided once, by their
   number. So it has the same bits on all of them and with every backend.
3. Clipping: every rank of a line gets the sums of squares of all stages' gradients, by parameter. The norm is that of
   :func:`hydra_ext.optim.clip_grad_norm_`, to the bit. The sums are added in the order of the model's parameters, and a
   weight that several stages use counts once. For gradients on a GPU, or in fp64, torch adds the squares, in fp64 and
   in an order of its own. The sums are the same on all ranks.

No optimizer changes its state before the norm is known, and all ranks decide alike whether it is finite.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.errors import RankFailed, StateError
from hydra_ext.optim import threads
from hydra_ext.optim.clip import combined
from hydra_ext.optim.layout import as_parameter_lies
from hydra_ext.pipeline.ranks.messages import norm_word
from hydra_ext.pipeline.ranks.transfers import ROOM, Reduction
from hydra_ext.pipeline.ranks.transport import TransportError, carrying, issuing
from hydra_ext.pipeline.ranks.watch import Failure, Watch, describe_error

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_TOGETHER = 2**22  # bytes of gradients that are averaged in one message: each message takes time beside its bytes
_ABSENT = -1.0  # in place of a sum of squares


@dataclass
class StageGradients:
    """One stage's gradients of one batch, in the order of the stage's parameters."""

    stage: int
    parameters: Sequence[nn.Parameter]
    gradients: list[Tensor | None]


@dataclass
class BatchGradients:
    """The gradients of one batch of all of a rank's stages.

    The reducer's thread owns them until ``done``; then the thread that makes the steps does.

    Attributes:
        stages: The gradients of stages that have not been updated with them yet.
        max_norm: The norm to clip to; None for no clipping, and no norm.
        norm: Norm of the whole model's gradients; valid once ``done``.
        factor: Number by which updates multiply the gradients; valid once ``done``.
        done: Whether the reduction has ended.
        behind: For each stage that has been updated, whether other actions ran meanwhile.
    """

    batch: int
    stages: list[StageGradients]
    max_norm: float | None
    norm: float | None = None
    factor: float = 1.0
    done: bool = False
    behind: list[bool] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """Whether there is no update with these gradients, because their norm is not finite."""
        return self.norm is not None and not math.isfinite(self.norm)

    def of(self, stage: int) -> StageGradients:
        return next(each for each in self.stages if each.stage == stage)


@dataclass(frozen=True)
class Holder:
    """A stage that holds a shared weight.

    Attributes:
        rank: The stage's rank in the weight's process group; 0 without a group.
        index: Index of the weight among the stage's parameters; None for another rank's stage.
    """

    stage: int
    rank: int
    index: int | None


@dataclass(frozen=True)
class SharedWeight:
    """A weight that several stages train, at least one of them on this rank. All ranks have them in the same order.

    Attributes:
        group: The ranks of the line that hold it; None if this rank alone does.
        holders: Its holders, from the last stage to the first.
    """

    group: dist.ProcessGroup | None
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class Partners:
    """The ranks that this one reduces with.

    Attributes:
        copies: The ranks with copies of this rank's stages; None without replicas.
        line: The ranks that hold the model together; None if this rank alone does.
        orders: For every rank of the line, the places of its stages' parameters among the model's parameters, stage
            after stage; -1 for one that another stage counts.
        shared: The shared weights of this rank.
    """

    copies: dist.ProcessGroup | None
    line: dist.ProcessGroup | None
    orders: tuple[tuple[int, ...], ...]
    shared: tuple[SharedWeight, ...] = ()


class Reducer:
    """Reduces gradients in a thread of its own, one batch after another.

    Attributes:
        reductions: Times of the last reductions, at most ``ROOM``.
    """

    def __init__(self, partners: Partners, watch: Watch, rank: int) -> None:
        self.reductions: deque[Reduction] = deque(maxlen=ROOM)
        self._partners = partners
        self._watch = watch
        self._rank = rank
        self._queue: queue.SimpleQueue[tuple[BatchGradients, torch.cuda.Stream | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hydra_ext gradients", daemon=True)
        self._thread.start()

    def start(self, batch: BatchGradients) -> None:
        """Starts the reduction of a batch. At its end ``done`` is set and the watch's ``changed`` is notified.

        On a GPU it is a part of the caller's stream.
        """
        self._queue.put((batch, _stream_of(batch)))

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    @torch.no_grad()
    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            batch, stream = entry
            start = time.perf_counter()
            try:
                with torch.cuda.stream(stream):
                    self._reduce(batch)
            except TransportError as error:
                with suppress(RankFailed):  # the watch has entered it: waiting threads learn of it there
                    self._watch.wait_for_cause()
                self._fail(batch, str(error))
                return
            except Exception as error:  # noqa: BLE001 - threads that wait have to learn of it
                self._fail(batch, describe_error(error))
                return
            self.reductions.append(Reduction(batch.batch, start, time.perf_counter()))
            with self._watch.changed:
                batch.done = True
                self._watch.changed.notify_all()
            del batch, entry

    def _fail(self, batch: BatchGradients, what: str) -> None:
        self._watch.fail(Failure(self._rank, f"at the gradients of batch {batch.batch}", what))

    def _reduce(self, batch: BatchGradients) -> None:
        for weight in self._partners.shared:
            _add_up(weight, batch)
        if self._partners.copies is not None:
            for stage in batch.stages:
                _average(stage, batch.max_norm, self._partners.copies)
        if batch.max_norm is not None:
            batch.norm, batch.factor = self._norm(batch, batch.max_norm)

    def _norm(self, batch: BatchGradients, max_norm: float) -> tuple[float, float]:
        own = [value for stage in batch.stages for value in square_sums(stage.parameters, stage.gradients)]
        orders = self._partners.orders
        gathered = [own]
        if self._partners.line is not None:
            longest = max(len(order) for order in orders)
            sent = torch.tensor(own + [_ABSENT] * (longest - len(own)), dtype=torch.float64, device="cpu")
            received = [torch.empty_like(sent) for _ in orders]
            with carrying():
                dist.all_gather(received, sent, group=self._partners.line)
            gathered = [values.tolist() for values in received]
        counted = sorted(
            (place, value)
            for order, values in zip(orders, gathered, strict=True)
            for place, value in zip(order, values, strict=False)
            if place >= 0 and value != _ABSENT
        )
        return combined([value for _, value in counted], max_norm)


def _stream_of(batch: BatchGradients) -> torch.cuda.Stream | None:
    """The calling thread's stream on the GPU that has the gradients; None on the host."""
    parameters = (parameter for stage in batch.stages for parameter in stage.parameters)
    device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


def square_sums(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[float]:
    """The sum of squares of each gradient; ``-1`` where there is no gradient."""
    sums = [_ABSENT] * len(gradients)
    native: dict[int, Tensor] = {}
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None:
            continue
        if gradient.device.type == "cpu" and gradient.dtype in _NATIVE:
            native[index] = as_parameter_lies(gradient, parameter)
        else:
            wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)
            sums[index] = float(wide.abs().square().sum())
    for index, value in zip(native, _C.sums_of_squares(list(native.values()), threads.pool(None)), strict=True):
        sums[index] = value
    return sums


def ordered_means(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The means over a group's ranks, added in their order: the same bits on every rank and with every backend.

    Each rank adds up one share and sends it to all. So every rank sends and receives about twice the tensors' bytes, as
    in a ring.

    Args:
        tensors: All of one dtype and device.
        group: The ranks, which give tensors of the same shapes; None for all ranks.
    """
    size = dist.get_world_size(group)
    sizes = [tensor.numel() for tensor in tensors]
    part = -(-sum(sizes) // size)
    padding = tensors[0].new_zeros(part * size - sum(sizes))
    sent = torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding])
    received = torch.empty_like(sent)
    with issuing(group, sent.device):
        dist.all_to_all_single(received, sent, group=group)
    total, *others = received.view(size, part).unbind()
    for other in others:
        total += other
    total /= size
    with issuing(group, sent.device):
        dist.all_gather([*sent.view(size, part).unbind()], total, group=group)
    means = torch.split(sent[: sum(sizes)], sizes)
    # Copies, so that each can be freed by itself.
    return [mean.view_as(tensor).clone() for mean, tensor in zip(means, tensors, strict=True)]


def _together(tensors: Mapping[int, Tensor]) -> Iterator[list[int]]:
    """Cuts tensors into runs that are averaged together, of one dtype and device each."""
    run: list[int] = []
    nbytes = 0
    for index, tensor in tensors.items():
        alike = run and tensor.dtype == tensors[run[0]].dtype and tensor.device == tensors[run[0]].device
        if run and not (alike and nbytes + tensor.nbytes <= _TOGETHER):
            yield run
            run, nbytes = [], 0
        run.append(index)
        nbytes += tensor.nbytes
    if run:
        yield run


def _average(stage: StageGradients, max_norm: float | None, group: dist.ProcessGroup) -> None:
    """Replaces a stage's gradients by their means over the replicas.

    A replica without a gradient of a parameter counts as zeros, if another one has it.

    Raises:
        StateError: The replicas were not given the same ``max_norm``.
    """
    norm = norm_word(max_norm)
    words = [norm, ~norm, *(gradient is not None for gradient in stage.gradients)]
    marks = torch.tensor(words, dtype=torch.int64, device="cpu")
    with carrying():
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)
    highest, lowest, *known = marks.tolist()
    if highest != ~lowest:
        raise StateError(
            f"the replicas do not make the same steps: this one was given max_norm={max_norm}, and another replica "
            "another one. Give all ranks the same max_norm"
        )
    own = zip(known, stage.gradients, stage.parameters, strict=True)
    summed = {
        index: torch.zeros_like(parameter) if gradient is None else gradient
        for index, (there, gradient, parameter) in enumerate(own)
        if there
    }
    for indices in list(_together(summed)):
        means = ordered_means([summed.pop(index) for index in indices], group)
        for index, mean in zip(indices, means, strict=True):
            stage.gradients[index] = mean


def _add_up(weight: SharedWeight, batch: BatchGradients) -> None:
    """Adds up the gradients of a weight's holders, and gives each holder the sum."""
    own = {holder.stage: holder.index for holder in weight.holders if holder.index is not None}
    held = {stage: batch.of(stage).gradients[index] for stage, index in own.items()}
    marks = torch.tensor(
        [held.get(holder.stage) is not None for holder in weight.holders], dtype=torch.uint8, device="cpu"
    )
    if weight.group is not None:
        with carrying():
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=weight.group)
    like = next(batch.of(stage).parameters[index] for stage, index in own.items())
    total: Tensor | None = None
    for holder, there in zip(weight.holders, marks.tolist(), strict=True):
        if not there:
            continue
        gradient = held.get(holder.stage)
        part = torch.empty_like(like) if gradient is None else gradient.clone()
        if weight.group is not None:
            with issuing(weight.group, part.device):
                dist.broadcast(part, group_src=holder.rank, group=weight.group)
        total = part if total is None else total.add_(part)
    for stage, index in own.items():
        batch.of(stage).gradients[index] = None if total is None else total.clone()
