"""The times of a rank's messages, reductions of gradients and updates, for its trace."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

ROOM = 20_000  # entries of each kind that a rank keeps


@dataclass(frozen=True)
class Transfer:
    """A message that this rank has sent or received, in seconds of ``time.perf_counter``.

    Attributes:
        link: The link's name: its content, and the rank at its other end.
        nbytes: Bytes of its tensors.
        start: For a send, when the message was put and the one before had ended. For a receive, when its prologue
            had come and there was room.
        end: When the transport was done with it. A message that was sent need not have arrived then.
    """

    link: str
    sent: bool
    batch: int
    microbatch: int
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Reduction:
    """The time of a batch's sums over ranks, of gradients and of their squares; seconds of ``time.perf_counter``."""

    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class UpdateBehind:
    """The time of an update that ran while other actions ran; seconds of ``time.perf_counter``."""

    stage: int
    batch: int
    start: float
    end: float


class LinkLog:
    """Adds the transfers of one end of a link to its rank's ``transfers``, which all links share.

    Each link's thread uses a log of its own.
    """

    def __init__(self, link: str, *, sent: bool, transfers: deque[Transfer]) -> None:
        self.link = link
        self._sent = sent
        self._transfers = transfers
        self._last_end = 0.0

    def note(self, batch: int, microbatch: int, nbytes: int, start: float) -> None:
        """Adds a transfer that has ended. Transfers of a link do not overlap: one starts after the end of the last."""
        end = time.perf_counter()
        start = max(start, self._last_end)
        self._last_end = end
        self._transfers.append(Transfer(self.link, self._sent, batch, microbatch, nbytes, start, end))
