"""Sends losses and metrics from the rank that computes them to the others of its line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.output import PipelineOutput
from hydra_ext.pipeline.ranks.links import Inbox, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.stages.chain import assemble, take_apart
from hydra_ext.pipeline.tally import Tally


class Announcements:
    """One rank's losses: the rank of the last stage announces them, the others listen.

    The thread that makes the steps owns it.

    Args:
        inbox: The link on which losses arrive; None on the rank that announces.
        outboxes: The links on which that rank sends them.
        tally: Counts the waits for losses.
    """

    def __init__(self, inbox: Inbox | None, outboxes: Sequence[Outbox], tally: Tally) -> None:
        self._inbox = inbox
        self._tally = tally
        self._outboxes = outboxes
        self._waiting: WeakValueDictionary[int, PipelineOutput] = WeakValueDictionary()
        self._expected: list[int] = []

    def publish(self, output: PipelineOutput, batch: Batch | None) -> None:
        """Announces the losses of one step, or begins to listen for them.

        Args:
            output: The step's output, which the losses will resolve.
            batch: The batch with its losses; None on a rank that listens.
        """
        if batch is None:
            self._expect(output)
        else:
            numbers = sorted(batch.losses)
            losses, metrics = [batch.losses[n] for n in numbers], [batch.metrics[n] for n in numbers]
            self._announce(output, losses, metrics)

    def finish(self) -> None:
        """Takes all losses that were expected, so that they can be read after the pipeline's end.

        Raises:
            RankFailed: A rank has failed.
        """
        while self._inbox is not None and self._expected:
            self._take(self._inbox)

    def _announce(self, output: PipelineOutput, losses: Sequence[Tensor], metrics: Sequence[Any]) -> None:
        """Sends the losses of one step, on the rank that has them."""
        stacked = torch.stack(list(losses))
        if self._outboxes:
            tensors, structure = take_apart(tuple(metrics), "the metrics that fn returned")
            copies = [tensor.clone() for tensor in tensors]  # fn may keep a metric and add to it before it is sent
            message = Message(output.batch, -1, len(losses), (stacked, *copies), structure=structure)
            for outbox in self._outboxes:
                outbox.put(message)
        output.resolve(stacked, tuple(metrics))

    def _expect(self, output: PipelineOutput) -> None:
        """Listens for the losses of one step. An output to which nothing refers is not kept."""
        if self._inbox is None:
            return
        self._inbox.expect()
        self._expected.append(output.batch)
        self._waiting[output.batch] = output
        output.wait_with(self._wait)
        while self._inbox.arrived:
            self._take(self._inbox)

    def _wait(self, output: PipelineOutput) -> None:
        start = time.perf_counter()
        try:
            while self._inbox is not None and not output.resolved:
                self._take(self._inbox)
        finally:
            self._tally.count_loss_wait(time.perf_counter() - start)

    def _take(self, inbox: Inbox) -> None:
        message = inbox.take()
        losses, *tensors = (tensor for tensor in message.tensors if tensor is not None)
        output = self._waiting.get(self._expected.pop(0))
        if output is not None:
            output.resolve(losses, assemble(tensors, message.structure))
