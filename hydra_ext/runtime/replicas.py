"""The ranks that train copies of one model: their process group, checks that the copies match, and collectives.

This module does not know about steps; :mod:`hydra_ext.runtime.averaging` does.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydra_ext.blocks import Layout
from hydra_ext.errors import InvalidArgument, RankFailed, ReplicasDiffer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_FOR_BOTH = ': init_process_group("cpu:gloo,cuda:nccl")'
_FAILED = "\0"  # precedes the text of an error, which may be empty


def check_group(group: object) -> None:
    """Checks the argument ``process_group=``.

    Raises:
        InvalidArgument: it is neither a process group nor None nor False.
    """
    known = dist.is_available() and isinstance(group, dist.ProcessGroup)
    if group is not None and group is not False and not known:
        raise InvalidArgument(
            f"process_group={group!r}: give a torch.distributed.ProcessGroup that this rank belongs to, None for the "
            "default one, or False to train by itself"
        )


def choose_group(group: dist.ProcessGroup | bool | None) -> dist.ProcessGroup | None:
    """The process group that ``offload(process_group=...)`` selects; None if there is no other rank."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or isinstance(group, bool) or dist.get_world_size(group) == 1:
        return None
    return group


@dataclass
class Reduction:
    """One reduction under way."""

    tensor: Tensor
    sent: Tensor  # the tensor itself, or a copy on the device from which the backend sends
    work: dist.Work


class Replicas:
    """The copies of one model, as one of their ranks sees them.

    All ranks have to call the same methods in the same order.

    Attributes:
        rank: Rank of this process in the group.
        size: Number of ranks.
        gradient_device: Device on which gradients are reduced: the GPU if the group can reduce there, else the host.
        takes_gathered: Whether that is the device on which backward leaves gradients.
        reduced_bytes: Bytes of gradients reduced so far.
        waited_seconds: Time that this rank has waited for others, without the waits of a GPU's streams.
        passes: Number of steps and backwards whose gradients were averaged, and that have ended without an error.

    Raises:
        InvalidArgument: the group has no usable backend.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.reduced_bytes = 0
        self.waited_seconds = 0.0
        self.passes = 0
        self._group: dist.ProcessGroup | None = group
        config = dist.get_backend_config(group)
        backends = dict(entry.split(":") for entry in config.split(","))
        direct = backends.get(device.type, "gloo") != "gloo"  # gloo's own copies from a GPU are slower than the lanes
        if not direct and "cpu" not in backends:
            raise InvalidArgument(
                f"process_group has the backends {config!r}, and the model is on {device}: initialise it with a "
                f"backend for that device, or with gloo{_FOR_BOTH if 'nccl' in config else ''}"
            )
        if "cpu" not in backends and device.type == "cuda":
            logger.warning(
                "process_group has the backends %r, and none for tensors of the host: the host waits for the GPU at "
                "every block whose gradients are averaged. Initialise torch.distributed with both%s",
                config,
                _FOR_BOTH,
            )
        self.gradient_device = device if direct else torch.device("cpu")
        self.takes_gathered = self.gradient_device == device
        self._nccl = group if backends.get(device.type) == "nccl" else None
        self._message_device = torch.device("cpu") if "cpu" in backends else device
        logger.info("gradients are averaged over %d ranks (%s); this is rank %d", self.size, config, self.rank)

    def leave(self) -> None:
        """Ends communication and drops the group, so that it can be destroyed. The counts stay."""
        self._group = self._nccl = None

    # ---- reductions -------------------------------------------------------------------------------------------------

    def start_sums(self, gradients: Sequence[Tensor]) -> list[Reduction]:
        """Starts sums over ranks, in place, of as many of the first gradients as one operation of the backend takes.

        For NCCL these are all up to the next dtype, else it is one. Each gradient has the same layout, without gaps, on
        every rank.
        """
        if self._nccl is None:
            reductions = [self._start(gradients[0], dist.ReduceOp.SUM, self.gradient_device)]
        else:
            alike = takewhile(lambda gradient: gradient.dtype == gradients[0].dtype, gradients)
            reductions = self._start_together([_flat(gradient) for gradient in alike], self._nccl)
        self.reduced_bytes += sum(reduction.tensor.nbytes for reduction in reductions)
        return reductions

    def _start_together(self, flats: Sequence[Tensor], group: dist.ProcessGroup) -> list[Reduction]:
        sent = [flat.to(self.gradient_device) for flat in flats]
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.asyncOp = True
        work = group.allreduce_coalesced(sent, options)
        return [Reduction(*tensors, work) for tensors in zip(flats, sent, strict=True)]

    def start_maximum(self, values: Sequence[int]) -> Reduction:
        """Starts an elementwise maximum over ranks."""
        message = torch.tensor(values, dtype=torch.int64, device="cpu")
        return self._start(message, dist.ReduceOp.MAX, self._message_device)

    def start_telling(self, values: Sequence[int]) -> Reduction:
        """Starts to tell all ranks these numbers. The result has those of every rank, in the order of the ranks."""
        message = torch.zeros((self.size, len(values)), dtype=torch.int64, device="cpu")
        message[self.rank] = torch.tensor(values, dtype=torch.int64, device="cpu")
        return self._start(message, dist.ReduceOp.SUM, self._message_device)

    def start_exchange(self, data: Tensor, sizes: Sequence[int]) -> dict[int, Reduction]:
        """Starts to send bytes to all ranks, and to receive theirs.

        Args:
            data: This rank's bytes, on the host.
            sizes: Number of bytes of each rank, which all ranks know.

        Returns:
            By rank, those that have bytes. The result of each is these bytes.
        """
        of_each = [
            data if rank == self.rank else torch.empty(size, dtype=torch.uint8, device="cpu")
            for rank, size in enumerate(sizes)
        ]
        sent = [each.to(self._message_device) for each in of_each]
        return {
            rank: Reduction(
                of_each[rank], sent[rank], dist.broadcast(sent[rank], group=self._group, group_src=rank, async_op=True)
            )
            for rank, size in enumerate(sizes)
            if size > 0
        }

    def _start(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType, device: torch.device) -> Reduction:
        flat = _flat(tensor)
        sent = flat.to(device)
        work = dist.all_reduce(sent, operation, group=self._group, async_op=True)
        return Reduction(flat, sent, work)

    def wait(self, reduction: Reduction) -> Tensor:
        """Waits for a reduction. Returns its result, flat, in the memory of the tensor that was given."""
        start = time.perf_counter()
        reduction.work.wait()
        self.waited_seconds += time.perf_counter() - start
        if reduction.sent is not reduction.tensor:
            reduction.tensor.copy_(reduction.sent)
        return reduction.tensor

    # ---- at the beginning -------------------------------------------------------------------------------------------

    def expect_alike(self, description: Sequence[str]) -> None:
        """Checks that every rank gives the same description of its copy.

        Raises:
            ReplicasDiffer: a description differs; every rank raises it.
        """
        text = "\n".join(description).encode()
        digests = self._gather(torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8))
        if all(torch.equal(digest, digests[0]) for digest in digests):
            return
        texts = [received.decode().split("\n") for received in self.gather(text)]
        rank = next(rank for rank, lines in enumerate(texts) if lines != texts[0])
        lines = zip_longest(texts[0], texts[rank], fillvalue="nothing")
        expected, found = next((a, b) for a, b in lines if a != b)
        raise ReplicasDiffer(
            f"the ranks' models differ: rank {rank} has {found} where rank 0 has {expected}. Build the same model on "
            "every rank, with the same budget= and blocks=, which determine the blocks; or give process_group=False if "
            "each rank is to train a model of its own",
            rank=rank,
        )

    @torch.no_grad()
    def follow_first(self, tensors: Sequence[Tensor]) -> None:
        """Copies rank 0's values to the tensors of the other ranks. Tensors with equal values are not written to."""
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            values = tensor.detach().contiguous()
            own = values.reshape(-1).view(torch.uint8)
            # A copy on rank 0 as well: a thread of the backend may hold it for a while, and a tensor whose memory has
            # another owner cannot move to the arena.
            sent = own.to(self._message_device, copy=True)
            dist.broadcast(sent, group=self._group, group_src=0)
            received = sent.to(own.device)
            if self.rank != 0 and not torch.equal(received, own):
                tensor.copy_(received.view(values.dtype).view(values.shape))

    # ---- anything else ----------------------------------------------------------------------------------------------

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in the order of the ranks."""
        lengths = [int(length) for length in self._gather(torch.tensor([len(data)], device="cpu"))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return [received.numpy().tobytes()[:n] for received, n in zip(self._gather(padded), lengths, strict=True)]

    def together(self, work: Callable[[], Result]) -> Result:
        """Runs ``work``, which must not communicate, and returns when every rank has run its own.

        Raises:
            RankFailed: another rank has failed. If this rank fails, it raises its own error.
        """
        try:
            result = work()
        except BaseException as error:  # re-raised, once the others know
            self.gather(f"{_FAILED}{type(error).__name__}: {error}".encode(errors="replace"))
            raise
        for rank, answer in enumerate(self.gather(b"")):
            if answer:
                reason = answer.decode(errors="replace").removeprefix(_FAILED)
                raise RankFailed(f"rank {rank} has failed, and so this one has, too: {reason}", rank=rank)
        return result

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        sent = tensor.to(self._message_device)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self._group)
        return [one.cpu() for one in received]


def describe(model: nn.Module, layout: Layout) -> list[str]:
    """Lines that have to be the same on every rank, one for each parameter and buffer."""
    lines = [
        f"{_trained(parameter)} '{name}' of {_kind(parameter)}, in block {number} ('{block.name}')"
        for number, block in enumerate(layout.blocks)
        for name, parameter in block.parameters
    ]
    lines += [
        f"{_trained(table.weight)} '{table.name}' of {_kind(table.weight)}, a table with "
        f"{'sparse' if table.sparse else 'dense'} gradients, of which rows move"
        for table in layout.tables
    ]
    return lines + [f"a buffer '{name}' of {_kind(buffer)}" for name, buffer in model.named_buffers()]


def _trained(parameter: Tensor) -> str:
    return "a trained parameter" if parameter.requires_grad else "a frozen parameter"


def _kind(tensor: Tensor) -> str:
    there = " and no memory" if tensor.is_meta else ""
    return f"{tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}{there}"


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
