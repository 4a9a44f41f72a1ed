"""Sends and receives of one link, and the state by which both ends match them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.transport import carrying, issuing
from hydra_ext.state.layout import Layout

# A program may take any time between two steps, and the watch finds a rank that does not answer. gloo takes a timeout
# of a send or receive only where it is waited for. Without one the timeout counts that its group was made with.
FOREVER = timedelta(days=30)

Key = TypeVar("Key")
Value = TypeVar("Value")

_CPU = torch.device("cpu")
_FORMS = 64  # that a link keeps
_WORDS, _TENSORS = 0, 1  # tags; the tag of tensors grows with every new layout


class Channel:
    """The process groups of one link, on one of its two ranks.

    All methods raise :class:`~hydra_ext.pipeline.ranks.transport.TransportError` if the link is broken.

    Args:
        words: The group for prologues and descriptions, of gloo.
        payload: The group for tensors: the same one, or a group of NCCL.
        peer: The other rank's rank in both groups.
        device: Where this rank's tensors are.
    """

    def __init__(self, words: dist.ProcessGroup, payload: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._words = words
        self._payload = payload
        self._peer = peer
        self._direct = payload is not words
        self.device = device if self._direct else _CPU

    @property
    def receives_ahead(self) -> bool:
        """Whether receives may be posted before their prologues. That needs tags, and NCCL has none."""
        return not self._direct

    def send_words(self, words: Tensor) -> dist.Work:
        with carrying():
            return self._words.send([words], self._peer, _WORDS)

    def post_words(self, words: Tensor) -> dist.Work:
        """Begins a receive into these words."""
        with carrying():
            return self._words.recv([words], self._peer, _WORDS)

    def receive_words(self, count: int) -> Tensor:
        words = torch.empty(count, dtype=torch.int64, device="cpu")
        self.wait(self.post_words(words))
        return words

    def wait(self, work: dist.Work) -> None:
        """Waits for a send or receive of this channel."""
        with carrying():
            work.wait(FOREVER)

    def send(self, tensors: Sequence[Tensor], layout: int) -> list[dist.Work]:
        """Begins sends of these tensors."""
        if self._direct:
            return self._batch(dist.isend, [messages.as_bytes(each) for each in tensors if each.numel()])
        data = [_as_gloo_takes(each) for each in tensors if each.numel()]
        with carrying():
            return [self._payload.send([each], self._peer, _TENSORS + layout) for each in data]

    def post(self, tensors: Sequence[Tensor], layout: int) -> list[dist.Work]:
        """Begins receives into these tensors."""
        if self._direct:
            return self._batch(dist.irecv, [messages.as_bytes(each) for each in tensors if each.numel()])
        data = [_as_gloo_takes(each) for each in tensors if each.numel()]
        with carrying():
            return [self._payload.recv([each], self._peer, _TENSORS + layout) for each in data]

    def _batch(self, operation: Callable[..., dist.Work | None], data: Sequence[Tensor]) -> list[dist.Work]:
        """Begins the operations of one message together: NCCL makes one kernel of them."""
        if not data:
            return []
        batch = [dist.P2POp(operation, each, group=self._payload, group_peer=self._peer) for each in data]
        with issuing(self._payload, self.device):
            works: list[dist.Work] = dist.batch_isend_irecv(batch)
        return works


class Layouts:
    """The layouts of a link's messages so far, the same at both ends.

    Attributes:
        number: Number of the last message's layout. It grows by one whenever a message has another layout than the
            message before.
        repeats: Whether the last two messages had the same layout.
        last: The last message's layout.
    """

    def __init__(self) -> None:
        self.number = 0
        self.repeats = False
        self.last: tuple[Layout, ...] = ()

    def note(self, layout: tuple[Layout, ...]) -> None:
        self.repeats = layout == self.last
        self.number += not self.repeats
        self.last = layout


class Forms(Generic[Key, Value]):
    """The forms that a link has seen last, the same at both ends, since both see the same messages in the same order.

    Their number is bounded: a structure's text can contain numbers, and so may occur in one message only.

    Attributes:
        noted: Number of forms so far, those included that have been forgotten.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def use(self, key: Key) -> Value | None:
        """The value that the next message's form was noted with; None if the form is new."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def note(self, key: Key, value: Value) -> None:
        """Notes the form of the next message, which is new."""
        self.noted += 1
        self._values[key] = value
        if len(self._values) > _FORMS:
            self._values.popitem(last=False)


def _as_gloo_takes(tensor: Tensor) -> Tensor:
    """A tensor's memory on the host. gloo takes any contiguous tensor there, without a look at its dtype."""
    if tensor.is_contiguous() and not tensor.is_cuda:
        return tensor
    return messages.as_bytes(tensor).cpu()


def write_counts(tensors: Sequence[Tensor]) -> list[int]:
    """The version counter of each tensor; -1 for an inference tensor, which has none."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass(frozen=True)
class Posted:
    """Receives of the tensors of one message, which have begun.

    Attributes:
        layout: Number of the layout for which they were posted.
    """

    layout: int
    tensors: list[Tensor]
    works: list[dist.Work]


class LinkStream:
    """A context with a link's own stream on a GPU, so that its copies do not queue behind the computation.

    It waits for the stream on exit. On other devices it does nothing.
    """

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
