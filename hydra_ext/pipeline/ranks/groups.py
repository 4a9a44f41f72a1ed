"""The process groups of a pipeline. To make one with a rank that has just ended fails soon, and does not hang."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.channel import FOREVER
from hydra_ext.pipeline.ranks.watch import Watch

_PIECE = 2**26  # bytes
_UNUSED_TAG = 2**31 - 1  # no rank sends with it

logger = logging.getLogger(__name__)


class Groups:
    """Of one rank. All ranks make the same ones in the same order, whether they are in them or not, after they have
    met: torch.distributed hears of no failure while it connects, and a rank that is not there by then has ended."""

    def __init__(self, rank: int, watch: Watch) -> None:
        self._rank = rank
        self._watch = watch
        self._soon = timedelta(seconds=watch.patience)
        self._made: list[dist.ProcessGroup] = []

    def make(self, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup | None:
        """A new group of these ranks; None where this rank is not in it.

        Raises:
            RankFailed: a rank has ended.
        """
        try:
            made: dist.ProcessGroup = dist.new_group(sorted(ranks), timeout=self._soon, backend=backend)
        except RuntimeError:
            self._watch.wait_for_cause()
            raise
        if self._rank not in ranks:
            return None
        dist.distributed_c10d._set_pg_timeout(FOREVER, made)
        self._made.append(made)
        return made

    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """The first rank's contiguous tensor; in pieces, each of which has to arrive soon.

        Raises:
            RankFailed: a rank has ended.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._soon
        self._in_pieces(tensor, lambda piece: group.broadcast([piece], options))

    def send(self, tensor: Tensor, target: int, group: dist.ProcessGroup) -> None:
        """A contiguous tensor, to this rank of the group, which receives it now; in pieces likewise.

        Raises:
            RankFailed: a rank has ended.
        """
        self._in_pieces(tensor, lambda piece: group.send([piece], target, 0))

    def receive(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Into a contiguous tensor.

        Raises:
            RankFailed: a rank has ended.
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
        """All ranks have to."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()

    def abort(self) -> None:
        """After a failure has been entered, and without the others: what waits in a group of gloo's, here or there,
        gets an error, and the group is gone. Others stay until the process ends."""
        for group in self._made:
            try:
                backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
                if backends.get("cpu") == "gloo":
                    _disconnect(group)
                if set(backends.values()) == {"gloo"}:
                    dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError) as error:  # torch.distributed has been ended before
                logger.info("a process group was not ended: %s", error)
        self._made.clear()


def _disconnect(group: dist.ProcessGroup) -> None:
    """gloo cannot end what waits, but closes all connections of a group as soon as one wait takes too long."""
    devices = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # each has connections of its own, in turn by tag
    for peer in range(group.size()):
        for tag in range(_UNUSED_TAG, _UNUSED_TAG - devices, -1):
            if peer != group.rank():
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, device="cpu")], peer, tag).wait(timedelta(milliseconds=1))
