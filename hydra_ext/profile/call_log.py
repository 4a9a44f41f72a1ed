"""Calls of modules in one microbatch, and which of them runs now.

Forward is followed by the calls themselves. Backward is followed by the sequence numbers of autograd's nodes: a node
belongs to the innermost call in which it was made.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import torch

from hydra_ext.profile.figures import Amount, Storage
from hydra_ext.profile.timeline import Part

UNKNOWN = -1  # in place of a storage's number: the storage is small, or not counted

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Call:
    """One call of a module.

    Attributes:
        module: Its number in the model; 0 for the microbatch as a whole.
        parent: Number of the call around it.
        first_node: Sequence number of the first node of autograd that it may have made.
        next_node: Sequence number of the first node after it.
        writes: Storages among its inputs that it writes to; :data:`UNKNOWN` for those without a number.
        saved: Bytes by storage.
        fresh: Those that no call before it has saved.
        inputs: As saved.
        fresh_inputs: As fresh.
        seconds: Of its operators in forward and in backward.
        began: Seconds of all operators before it.
        again: Seconds from there until it has saved its last tensor; None if it saves nothing.
    """

    def __init__(self, module: int, parent: int) -> None:
        self.module = module
        self.parent = parent
        self.first_node = _next_node()
        self.next_node = -1
        self.writes: set[int] = set()
        self.saved: dict[Storage, int] = {}
        self.fresh: dict[Storage, int] = {}
        self.inputs: dict[Storage, int] = {}
        self.fresh_inputs: dict[Storage, int] = {}
        self.seconds = [0.0, 0.0]
        self.began = 0.0
        self.again: float | None = None


class CallLog:
    """The calls of one microbatch.

    Attributes:
        calls: The first is the microbatch as a whole. Calls inside a call come later.
        part: What runs now.
        spent: Seconds of all operators of forward so far.
    """

    def __init__(self) -> None:
        self.calls = [Call(module=0, parent=-1)]
        self.part = Part(0)
        self.spent = 0.0
        self._open = [0]
        self._first_nodes: list[int] = []

    @property
    def open_calls(self) -> list[Call]:
        return [self.calls[number] for number in self._open]

    def begin(self, module: int) -> Call:
        self._open.append(len(self.calls))
        call = Call(module, parent=self.part.call)
        call.began = self.spent
        self.calls.append(call)
        self.part = Part(self._open[-1])
        return call

    def end(self, call: Call) -> None:
        call.next_node = _next_node()
        self._open.pop()
        self.part = Part(self._open[-1])

    def spend(self, seconds: float) -> None:
        """An operator has run."""
        self.calls[self.part.call].seconds[self.part.is_backward] += seconds
        if not self.part.is_backward:
            self.spent += seconds

    def saves(self) -> None:
        """A tensor is saved for backward."""
        for call in self.open_calls:
            call.again = self.spent - call.began

    def begin_backward(self) -> None:
        self.calls[0].next_node = _next_node()
        self._first_nodes = [call.first_node for call in self.calls]
        self.part = Part(0, is_backward=True)

    def follow_backward(self) -> None:
        """Finds out whose backward runs now. A sum of gradients belongs to no node, and so to the last one."""
        node = torch._C._current_autograd_node() if self.part.is_backward else None
        if node is None or node._sequence_nr() >= self.calls[0].next_node:
            return
        self.part = Part(self._call_of(node._sequence_nr()), is_backward=True)

    def _call_of(self, node: int) -> int:
        call = bisect.bisect_right(self._first_nodes, node) - 1
        while call > 0 and self.calls[call].next_node <= node:
            call = self.calls[call].parent
        return max(call, 0)


def amount(fresh: Iterable[dict[Storage, int]], every: Iterable[dict[Storage, int]]) -> Amount:
    """Bytes of the storages of several calls, each counted once."""
    return Amount(fresh=_sum(fresh), all=_sum(every))


def _sum(parts: Iterable[dict[Storage, int]]) -> int:
    together: dict[Storage, int] = {}
    for part in parts:
        together.update(part)
    return sum(together.values())
