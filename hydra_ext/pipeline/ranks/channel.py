"""What a link's two ends talk through: sends and receives that begin, and what says which belong together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.transport import carrying
from hydra_ext.state.layout import Layout

# A user may do other things between two steps; a rank that does not answer is the watch's affair. Of sends and
# receives gloo takes it only where they are waited for: without it the time counts that their group was made with.
FOREVER = timedelta(days=30)

_CPU = torch.device("cpu")
_issuing = threading.Lock()  # NCCL: operations of several threads at once may deadlock
_STRUCTURES = 64  # that a link keeps
_WORDS, _TENSORS = 0, 1  # tags; that of tensors grows with every new layout


class Channel:
    """The process groups of one link, as one of its two ranks sees them.

    Everything here raises :class:`~hydra_ext.pipeline.ranks.transport.TransportError` where the link is broken.
    """

    def __init__(self, headers: dist.ProcessGroup, payload: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._headers = headers
        self._payload = payload
        self._peer = peer  # its rank in both groups
        self._direct = payload is not headers
        self.device = device if self._direct else _CPU

    @property
    def receives_ahead(self) -> bool:
        """Tags keep apart what is received; NCCL has none."""
        return not self._direct

    def send_words(self, words: Tensor) -> dist.Work:
        with carrying():
            return self._headers.send([words], self._peer, _WORDS)

    def post_words(self, count: int) -> tuple[Tensor, dist.Work]:
        words = torch.empty(count, dtype=torch.int64, device="cpu")
        with carrying():
            return words, self._headers.recv([words], self._peer, _WORDS)

    def receive_words(self, count: int) -> Tensor:
        words, arriving = self.post_words(count)
        self.wait(arriving)
        return words

    def wait(self, work: dist.Work) -> None:
        """For what was begun here."""
        with carrying():
            work.wait(FOREVER)

    def send(self, tensors: Sequence[Tensor], layout: int) -> list[dist.Work]:
        works = []
        for tensor in tensors:
            if tensor.numel():
                data = messages.as_bytes(tensor).to(self.device)
                with _issuing, carrying():
                    works.append(self._payload.send([data], self._peer, _TENSORS + layout))
        return works

    def post(self, tensors: Sequence[Tensor], layout: int) -> list[dist.Work]:
        """Receives, which begin."""
        works = []
        for tensor in tensors:
            if tensor.numel():
                data = messages.as_bytes(tensor)
                with _issuing, carrying():
                    works.append(self._payload.recv([data], self._peer, _TENSORS + layout))
        return works


class Layouts:
    """What both ends of a link know of its messages so far.

    Attributes:
        number: of the last message's layout: of how many there were, one after the other.
        repeats: the last two messages had it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.repeats = False
        self.last: list[Layout] = []

    def note(self, layout: list[Layout]) -> None:
        self.repeats = layout == self.last
        self.number += not self.repeats
        self.last = layout


class Structures:
    """The structures that came last on a link, by their fingerprints: both ends keep the same ones, since they see the
    same messages in the same order. A text may be of one message only: it can have numbers in it."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._texts

    def __getitem__(self, fingerprint: int) -> str:
        return self._texts[fingerprint]

    def note(self, fingerprint: int, text: str) -> None:
        """Of each message in turn; the text does not matter where it is known."""
        self._texts.setdefault(fingerprint, text)
        self._texts.move_to_end(fingerprint)
        if len(self._texts) > _STRUCTURES:
            self._texts.popitem(last=False)


def write_counts(tensors: Sequence[Tensor]) -> list[int]:
    """How often each has been written to, as far as it is counted."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass(frozen=True)
class Posted:
    """Receives of the tensors of a message.

    Attributes:
        layout: its number.
    """

    layout: int
    tensors: list[Tensor]
    works: list[dist.Work]


class LinkStream:
    """A link's own stream on a GPU, so that its copies do not queue behind the computation; nothing elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        self._entered = None
        if self._stream is not None:
            self._entered = torch.cuda.stream(self._stream)
            self._entered.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if self._stream is not None and self._entered is not None:
            self._stream.synchronize()
            self._entered.__exit__(None, None, None)
