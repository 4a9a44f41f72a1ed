"""When a rank's messages, sums of gradients and updates were under way, for its trace."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

ROOM = 20_000  # of each kind


@dataclass(frozen=True)
class Transfer:
    """A message that this rank has sent or received, in seconds of ``time.perf_counter``.

    Attributes:
        link: what it carries, and to or from which rank.
        nbytes: of its tensors.
        start: of a send: it was handed over, and the one before has ended; of a receive: its header has come, and
            there is room.
        end: the transport is done with it, which of a send need not mean that it has arrived.
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
    """Sums over ranks, of a batch's gradients and their squares; seconds of ``time.perf_counter``."""

    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class UpdateBehind:
    """An update that was made while other actions ran; seconds of ``time.perf_counter``."""

    stage: int
    batch: int
    start: float
    end: float


class LinkLog:
    """One end's entries into its rank's ``transfers``, which all its links share; each link's thread makes its own."""

    def __init__(self, link: str, *, sent: bool, transfers: deque[Transfer]) -> None:
        self.link = link
        self._sent = sent
        self._transfers = transfers
        self._last_end = 0.0

    def note(self, batch: int, microbatch: int, nbytes: int, start: float) -> None:
        """One that has ended. Those of a link go one after the other, whenever they were handed over."""
        end = time.perf_counter()
        start = max(start, self._last_end)
        self._last_end = end
        self._transfers.append(Transfer(self.link, self._sent, batch, microbatch, nbytes, start, end))
