"""Links between two ranks, one of which fails, and the errors on both, which name the failed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from hydra_ext.errors import RankFailed
from hydra_ext.pipeline.ranks.links import Inbox, Links, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.state.layout import Layout

NO_MEMORY = RuntimeError("can't allocate memory: you tried to allocate 1000000000000 bytes")


class Full(deque[Any]):
    """A queue without room for an entry."""

    def append(self, _: Any) -> None:
        raise MemoryError("no room for an entry")


def whom_ranks_name(rank: int) -> dict[str, tuple[str, str]]:
    """Returns, for each case, the error of this rank's calls, and the failure that its watch then knows."""
    results = {}
    for name, case in CASES.items():
        watch = Watch(rank, 2, name, patience=20.0, describe=lambda: "")
        links = Links(rank, torch.device("cpu"), watch)
        raised = ""
        try:
            case(links, links.connect(0, 1, "test"))
        except (RankFailed, RuntimeError) as error:
            raised = f"{type(error).__name__}: {error}"
        try:
            watch.wait_for(lambda: False)
        except RankFailed as error:
            results[name] = raised, str(error)
        links.close(0.0)
        watch.end()
    return results


def _message(number: int) -> Message:
    return Message(0, number, 3, (torch.ones(5),))


def _no_memory_for_what_arrives(_: Links, end: Outbox | Inbox | None) -> None:
    if isinstance(end, Outbox):
        end.put(_message(0))
    elif end is not None:
        with mock.patch.object(Layout, "empty", side_effect=NO_MEMORY):
            end.expect()
            end.take()


def _no_memory_for_what_is_expected(_: Links, end: Outbox | Inbox | None) -> None:
    if isinstance(end, Outbox):
        for number in range(2):
            end.put(_message(number))
    elif end is not None:
        for _number in range(2):
            end.expect()
            end.take()
        try:
            with mock.patch.object(Layout, "empty", side_effect=NO_MEMORY):
                end.expect()
        except RuntimeError as error:
            end._watch.fail_with(error)  # as the pipeline does
            raise


def _no_entry(of: type[Outbox] | type[Inbox]) -> Callable[[Links, Outbox | Inbox | None], None]:
    def case(links: Links, end: Outbox | Inbox | None) -> None:
        assert end is not None
        if isinstance(end, of):
            end.log._transfers = Full()
        if isinstance(end, Outbox):
            end.put(_message(0))
            end.flush()
        else:
            end.expect()
            end.take()

    return case


def _sender_leaves(_: Links, end: Outbox | Inbox | None) -> None:
    if isinstance(end, Outbox):
        end.put(_message(0))
        end.close(20.0)
    elif end is not None:
        for _number in range(2):
            end.expect()
            end.take()


CASES = {
    "no memory for what arrives": _no_memory_for_what_arrives,
    "no memory for what is expected": _no_memory_for_what_is_expected,
    "no entry of what was sent": _no_entry(Outbox),
    "no entry of what has arrived": _no_entry(Inbox),
    "the sender leaves": _sender_leaves,
}
