"""The process groups of a pipeline. Making one with a rank that has just ended fails soon instead of hanging."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.channel import FOREVER
from hydra_ext.pipeline.ranks.transport import backend_of
from hydra_ext.pipeline.ranks.watch import Watch

_PIECE = 2**26  # bytes
_UNUSED_TAG = 2**31 - 1  # no rank sends with it

logger = logging.getLogger(__name__)


class Groups:
    """The process groups of one rank.

    All ranks make the same groups in the same order, whether they are in them or not. They have to meet before:
    torch.distributed does not learn of failures while it connects, so that a rank that does not come then has ended.

    Groups of NCCL get their communicators here too: NCCL would make them at the first operation, and block the thread
    that begins it until the other rank begins one. After a failure :meth:`stop_kernels` is called at once. A kernel
    that waits for a rank that has ended would hold the device: all calls that wait for the whole device would hang.

    Args:
        device: Where this rank's tensors are.
    """

    def __init__(self, rank: int, watch: Watch, device: torch.device) -> None:
        self._rank = rank
        self._watch = watch
        self._soon = timedelta(seconds=watch.patience)
        self._device = device
        self._made: list[dist.ProcessGroup] = []
        watch.at_failure.append(self.stop_kernels)

    @property
    def for_gradients(self) -> str:
        """The backends of groups that reduce gradients: one for the host's tensors, and NCCL if the ranks use it."""
        return "cpu:gloo,cuda:nccl" if backend_of(self._device) == "nccl" else "gloo"

    def make(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """Makes a group of these ranks; returns None if this rank is not in it.

        Raises:
            RankFailed: A rank has ended.
        """
        try:
            made: dist.ProcessGroup = dist.new_group(
                sorted(ranks), timeout=self._soon, backend=backend, device_id=self._to_connect(backend)
            )
        except RuntimeError:
            self._watch.wait_for_cause()
            raise
        if self._rank not in ranks:
            return None
        dist.distributed_c10d._set_pg_timeout(FOREVER, made)
        self._made.append(made)
        return made

    def _to_connect(self, backend: str) -> torch.device | None:
        """The device for which a group makes a communicator at once; None without NCCL."""
        if "nccl" not in backend:
            return None
        bound: torch.device | None = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
        if bound is not None:
            return bound  # torch takes no other one
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        return torch.device("cuda", index)

    def stop_kernels(self) -> None:
        """Ends the operations of NCCL that this rank has begun, after a failure; later ones are errors."""
        try:
            found = [group for group in list(self._made) if backend_of(self._device, group) == "nccl"]
            backends: list[Any] = [group._get_backend(self._device) for group in found]
            if backends:
                # As torch does: aborts of several communicators, one after another, may wait for each other.
                backends[0]._group_start()
                try:
                    for backend in backends:
                        backend.abort()
                finally:
                    backends[0]._group_end()
        except (RuntimeError, ValueError, AssertionError) as error:  # torch.distributed was destroyed before
            logger.info("operations of NCCL were not ended: %s", error)

    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sends the group's first rank's contiguous tensor to the others, in chunks. Each has to arrive in time.

        Raises:
            RankFailed: A rank has ended, or a chunk took longer than the watch's patience.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._soon
        self._in_pieces(tensor, lambda piece: group.broadcast([piece], options))

    def send(self, tensor: Tensor, target: int, group: dist.ProcessGroup) -> None:
        """Sends a contiguous tensor, in chunks, to a rank of the group, which has to receive it now.

        Args:
            target: The receiver's rank in the group.

        Raises:
            RankFailed: A rank has ended.
        """
        self._in_pieces(tensor, lambda piece: group.send([piece], target, 0))

    def receive(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Receives into a contiguous tensor.

        Args:
            source: The sender's rank in the group.

        Raises:
            RankFailed: A rank has ended.
        """
        self._in_pieces(tensor, lambda piece: group.recv([piece], source, 0))

    def _in_pieces(self, tensor: Tensor, begin: Callable[[Tensor], dist.Work]) -> None:
        memory = messages.as_bytes(tensor)
        try:
            for start in range(0, memory.numel(), _PIECE):
                begin(memory[start : start + _PIECE]).wait(self._soon)
        except RuntimeError:
            self._watch.wait_for_cause()
            raise

    def destroy(self) -> None:
        """Ends the groups. All ranks have to call it."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()

    def abort(self) -> None:
        """Ends the groups after a failure, without the other ranks. The watch has to know the failure.

        Operations that wait in groups of gloo, on any rank, get an error; in groups of NCCL this rank's do.
        """
        self.stop_kernels()
        for group in self._made:
            try:
                if backend_of(torch.device("cpu"), group) == "gloo":
                    _disconnect(group)
                if backend_of(self._device, group) == "nccl":
                    dist.distributed_c10d._abort_process_group(group)
                else:
                    dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError) as error:  # torch.distributed was destroyed before
                logger.info("a process group was not ended: %s", error)
        self._made.clear()


def _disconnect(group: dist.ProcessGroup) -> None:
    """Closes a group's connections. gloo cannot cancel an operation, but closes them when a wait takes too long."""
    # Each network device has connections of its own. Consecutive tags take the devices in turn.
    devices = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
    for peer in range(group.size()):
        for tag in range(_UNUSED_TAG, _UNUSED_TAG - devices, -1):
            if peer != group.rank():
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, device="cpu")], peer, tag).wait(timedelta(milliseconds=1))
