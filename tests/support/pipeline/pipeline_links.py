"""One link between two ranks: messages of many layouts, which are expected early or late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.ranks import links as pipeline_links
from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.channel import Channel
from hydra_ext.pipeline.ranks.links import Inbox, Links, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.ranks.watch import Watch

ALIKE = ((torch.float32, (7,)),)
LAYOUTS = (
    ALIKE,
    ((torch.float32, (3, 5)),),
    ((torch.float32, (5, 3)),),
    ((torch.float32, (3, 5)), None, (torch.int64, (2,))),
    ((torch.bfloat16, (0, 4)), (torch.float32, (1,))),
    ((torch.float64, (300, 70)),),
    (),
)
WORDY = tuple((torch.float32, (1, 2, 1, number)) for number in range(1, 30))  # too many shapes for one header


def tensors(layout: Any, number: int) -> tuple[Tensor | None, ...]:
    """Returns the tensors of message ``number``."""
    found: list[Tensor | None] = []
    for index, each in enumerate(layout):
        if each is None:
            found.append(None)
            continue
        dtype, size = each
        values = (torch.arange(torch.Size(size).numel()).reshape(size) + 17 * number + index).to(dtype)
        found.append(_lying(values, number // 4 % 6) if len(size) == 2 else values)
    return tuple(found)


def _lying(values: Tensor, way: int) -> Tensor:
    """Returns a tensor with another layout in memory, which has to arrive. Ways 3 and 4 change the values, too."""
    rows, columns = values.shape
    if way == 0:  # in another order
        return values.t().contiguous().t()
    if way == 1:  # with gaps, and an offset
        return values.repeat(1, 2)[:, columns:]
    if way == 2:  # in another order, with gaps between all elements
        return values.t().repeat(2, 1).t()[:, ::2] if columns > 1 else values
    if way == 3:  # all rows in one memory
        return values[:1].expand(rows, columns)
    if way == 4:  # rows that overlap
        return values.flatten().repeat(2).unfold(0, columns, 2)[:rows] if rows and columns > 1 else values
    return values


def through_a_link(tensor: Tensor) -> Tensor:
    """Returns the tensor as it arrives on another rank, without a link."""
    layout = messages.layout_of(tensor)
    data = messages.as_bytes(messages.packed(tensor, layout))
    assert data.numel() == layout.packed.nbytes
    arriving = layout.packed.empty(tensor.device)
    messages.as_bytes(arriving).copy_(data)
    return messages.laid_out(arriving, layout, tensor.device)


def crossing_bytes(layout: Any, number: int) -> int:
    """Returns the bytes to send of message ``number``, without gaps and duplicates."""
    found = 0
    for each in tensors(layout, number):
        if each is not None and each.numel():
            places = torch.arange(each.untyped_storage().nbytes() // each.itemsize)
            found += len(places.as_strided(each.size(), each.stride()).unique()) * each.itemsize
    return found


def exchange(
    rank: int,
    programs: Sequence[tuple[Sequence[int], Sequence[int]]],
    most_abandoned: int = 1000,
    in_step: bool = False,
) -> list[dict[str, Any]]:
    """Returns, for each program, the errors in arrived messages, and the number of messages received ahead.

    A program has, for each message, its layout and the number of later messages that are already expected when it is
    taken.

    Args:
        in_step: Whether each message is sent only after it is expected, so that its header comes after its receives are
            posted.
    """
    pipeline_links._MOST_ABANDONED = most_abandoned
    results = []
    for number, (layouts, ahead) in enumerate(programs):
        watch = Watch(rank, 2, f"links {number}", patience=120.0, describe=lambda: "")
        links = Links(rank, torch.device("cpu"), watch)
        end = links.connect(0, 1, "test")
        chosen = [(*LAYOUTS, WORDY)[index] for index in layouts]
        if isinstance(end, Outbox):
            for index, layout in enumerate(chosen):
                there = tensors(layout, index)
                if in_step:
                    dist.barrier()
                flags = tuple(tensor is not None and index % 2 == 0 for tensor in there)
                end.put(Message(number, index, len(chosen), there, flags, f"of {len(there)}"))
            end.flush()
            results.append({})
        elif isinstance(end, Inbox):
            results.append(_receive(end, chosen, ahead, in_step=in_step))
        links.close(120.0)
        watch.end()
    return results


def _receive(inbox: Inbox, layouts: Sequence[Any], ahead: Sequence[int], *, in_step: bool) -> dict[str, Any]:
    expected = 0
    wrong = []
    for index, layout in enumerate(layouts):
        while expected < min(index + 1 + ahead[index], len(layouts)):
            inbox.expect()
            expected += 1
        if in_step:
            dist.barrier()
        message = inbox.take()
        wanted = tensors(layout, index)
        if len(message.tensors) != len(wanted) or message.microbatch != index:
            wrong.append(f"message {index} is {message}")
            continue
        for got, want in zip(message.tensors, wanted, strict=True):
            if (got is None) != (want is None):
                wrong.append(f"message {index}: {got} for {want}")
            elif got is not None and want is not None:
                same = got.dtype == want.dtype and got.stride() == want.stride() and torch.equal(got, want)
                same = same and (not want.numel() or got.data_ptr() % 64 == want.data_ptr() % 64)
                if not same:
                    wrong.append(f"message {index}: {got} for {want}")
        if message.requires_grad != tuple(want is not None and index % 2 == 0 for want in wanted):
            wrong.append(f"message {index}: requires_grad {message.requires_grad}")
        if message.structure != f"of {len(wanted)}":
            wrong.append(f"message {index}: structure {message.structure}")
    counts = {"ahead": inbox.received_ahead, "abandoned": inbox.abandoned, "bytes": inbox.received_bytes}
    return {"wrong": wrong, **counts}


# ---- forms ----------------------------------------------------------------------------------------------------------
_PLAIN = Message(3, 0, 4, (torch.arange(6.0).view(2, 3), torch.ones(2)), (True, False), "a pair", 1.0)


def _with(*tensors: Tensor | None) -> Message:
    return replace(_PLAIN, tensors=tensors)


CHANGES = {
    "a size": _with(torch.arange(9.0).view(3, 3), torch.ones(2)),
    "the last rows": _with(torch.arange(3.0).view(1, 3), torch.ones(2)),
    "a shape of as many bytes": _with(torch.arange(6.0).view(3, 2), torch.ones(2)),
    "a dtype of as many bytes": _with(torch.arange(6, dtype=torch.int32).view(2, 3), torch.ones(2)),
    "the order in memory": _with(torch.arange(6.0).view(3, 2).t(), torch.ones(2)),
    "gaps in memory": _with(torch.arange(12.0).view(2, 6)[:, ::2], torch.ones(2)),
    "the place beside 64 bytes": _with(torch.arange(7.0)[1:].view(2, 3), torch.ones(2)),
    "no tensor": _with(None, torch.ones(2)),
    "no other tensor": _with(torch.arange(6.0).view(2, 3), None),
    "fewer tensors": replace(_PLAIN, tensors=_PLAIN.tensors[:1], requires_grad=(True,)),
    "more tensors": replace(_PLAIN, tensors=(*_PLAIN.tensors, torch.zeros(1)), requires_grad=(True, False, False)),
    "nothing": Message(3, 0, 4, (), (), "a pair", 1.0),
    "an empty tensor": _with(torch.empty(0, 3), torch.ones(2)),
    "what requires a gradient": replace(_PLAIN, requires_grad=(True, True)),
    "the structure": replace(_PLAIN, structure="two others"),
}
SAME_FORM = {
    "the batch": replace(_PLAIN, batch=4),
    "an evaluation": replace(_PLAIN, batch=-2),
    "the microbatch": replace(_PLAIN, microbatch=2),
    "the number of microbatches": replace(_PLAIN, count=5),
    "max_norm": replace(_PLAIN, max_norm=0.5),
    "no max_norm": replace(_PLAIN, max_norm=None),
    "the numbers": _with(torch.arange(6.0).view(2, 3) + 1, torch.zeros(2)),
}


def _noting(sent: list[list[int]]) -> Any:
    """Notes the words that go before each message's tensors; a message begins with a prologue."""
    plain = Channel.send_words

    def send_words(self: Channel, words: Tensor) -> dist.Work:
        if words.numel() == messages.PROLOGUE_WORDS:
            sent.append([])
        sent[-1].append(words.numel())
        return plain(self, words)

    return mock.patch.object(Channel, "send_words", send_words)


def _exchanged(rank: int, name: str, sequence: Sequence[Message]) -> tuple[list[list[int]], list[str]]:
    """The words before each message, on the sender; the names of fields that have arrived wrong, on the receiver."""
    watch = Watch(rank, 2, name, patience=120.0, describe=lambda: "")
    links = Links(rank, torch.device("cpu"), watch)
    end = links.connect(0, 1, "test")
    sent: list[list[int]] = []
    wrong: list[str] = []
    with _noting(sent):
        for number, message in enumerate(sequence):
            if isinstance(end, Outbox):
                end.put(message)
                end.flush()  # so that what is noted belongs to this message
            elif isinstance(end, Inbox):
                end.expect()
                wrong += [f"message {number}: {field}" for field in _differing(end.take(), message)]
    links.close(120.0)
    watch.end()
    return sent, wrong


def _differing(got: Message, wanted: Message) -> list[str]:
    names = ("batch", "microbatch", "count", "structure", "max_norm", "requires_grad")
    found = [name for name in names if getattr(got, name) != getattr(wanted, name)]
    pairs = list(zip(got.tensors, wanted.tensors, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return [*found, "which tensors there are"]
    same = all(
        a.dtype == b.dtype
        and a.stride() == b.stride()
        and torch.equal(a, b)
        and (a.data_ptr() - b.data_ptr()) % 64 == 0
        for a, b in pairs
        if a is not None and b is not None and b.numel()
    )
    return found if same else [*found, "tensors"]


def through_forms(rank: int) -> dict[str, Any]:
    """For each change: two plain messages, the changed one, and two plain ones again."""
    results: dict[str, Any] = {}
    for name, changed in (CHANGES | SAME_FORM).items():
        results[name] = _exchanged(rank, name, [_PLAIN, _PLAIN, changed, _PLAIN, changed])[rank]
    return results


def through_many_forms(rank: int, count: int) -> Any:
    """So many forms, then the first one twice."""
    forms = [_with(torch.full((1, 1 + number), 1.0), None) for number in range(count)]
    return _exchanged(rank, "many forms", [*forms, forms[0], forms[0]])[rank]


def order_of_sends(rank: int) -> list[str]:
    """The order in which two messages of one form are sent: their tensors and their words."""
    order: list[str] = []

    def noting(method: str, what: str) -> Any:
        plain = getattr(Channel, method)

        def noted(self: Channel, *arguments: Any) -> Any:
            order.append(what)
            return plain(self, *arguments)

        return mock.patch.object(Channel, method, noted)

    with noting("send", "tensors"), noting("send_words", "words"):
        _exchanged(rank, "order", [_PLAIN, _PLAIN])
        return order[:5]
