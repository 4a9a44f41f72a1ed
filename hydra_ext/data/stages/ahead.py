"""Nodes that take items from their source before they are asked for, and give them in the source's order."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from hydra_ext.data.workers.pool import Made, Outcome, Raised
from hydra_ext.errors import InvalidArgument, StageFailed, StateError

_Item = TypeVar("_Item", covariant=True)

_STOPPED = "this node was stopped: reset() lets it begin anew"
_PATIENCE = 5.0  # seconds
_SNAPSHOTS = 16  # items from one state of the source to the next: a node that resumes takes those in between again


class _Ended:
    """The source has no more items."""


class _Stopped:
    """The flow was stopped while its consumer waited, in another thread."""


@dataclass(frozen=True)
class _Broken:
    """The source has raised: it gives no more items before it is reset."""

    error: BaseException


@dataclass(frozen=True)
class ItemFigures:
    """What a node does now, and has done since its last reset.

    Attributes:
        depth: Items that may be on the way.
        given: Items given.
        ready: Items that could be given now.
        source_seconds: Time that this node has waited for its source.
        starved_seconds: Time that was waited for this node.
    """

    depth: int
    given: int
    ready: int
    source_seconds: float
    starved_seconds: float


@dataclass(frozen=True)
class Start:
    """Where a flow begins.

    Attributes:
        flow: Its number.
        epoch: Number of the epoch.
        given: Items that were given before.
        skip: Items that the source gives once more, and that were given before.
    """

    flow: int
    epoch: int
    given: int
    skip: int


class Flow:
    """Items from one reset of a node to the next. A thread of its own takes them from the source.

    Args:
        submit: Called with each item and its number, in order. :meth:`finish` is to be called with its outcome.
    """

    def __init__(
        self, source: BaseNode[Any], start: Start, submit: Callable[[Flow, int, Any], None], *, depth: int
    ) -> None:
        self.start = start
        self._source = source
        self._submit = submit
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome | _Ended | _Broken | _Stopped] = {}
        self._snapshots: deque[tuple[int, Mapping[str, Any]]] = deque()  # states of the source, by its next item
        self._given = start.given
        self._depth = depth
        self._is_stopped = False
        self._source_seconds = 0.0
        self._starved_seconds = 0.0
        self._thread = threading.Thread(target=self._feed, name="hydra_ext feed", daemon=True)
        self._thread.start()

    # ---- the consumer -----------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """The next item; waits for it.

        Raises:
            StopIteration: There is none.
        """
        begun = time.perf_counter()
        with self._changed:
            while self._given not in self._outcomes:
                self._changed.wait()
            self._starved_seconds += time.perf_counter() - begun
            outcome = self._outcomes[self._given]
            if isinstance(outcome, _Ended):
                raise StopIteration
            if isinstance(outcome, _Stopped):
                raise StateError(_STOPPED)
            if isinstance(outcome, _Broken):
                raise outcome.error.with_traceback(None)
            del self._outcomes[self._given]
            self._given += 1
            while len(self._snapshots) > 1 and self._snapshots[1][0] <= self._given:
                self._snapshots.popleft()
            self._changed.notify_all()
        if not isinstance(outcome, Raised):
            return outcome.value
        error = outcome.error
        del outcome
        try:
            raise error
        finally:
            del error  # its traceback has this frame: together they would keep the node

    def state(self) -> dict[str, Any]:
        """From which a node goes on with the item behind the last one given."""
        with self._changed:
            while not self._snapshots:
                if self._is_stopped:
                    raise StateError(_STOPPED)
                if isinstance(outcome := self._outcomes.get(self._given), _Broken):
                    raise outcome.error
                self._changed.wait()
            number, state = self._snapshots[0]
            return {
                "source": state,
                "skip": self._given - number,
                "given": self._given,
                "epoch": self.start.epoch,
            }

    def is_next(self, number: int) -> bool:
        with self._changed:
            return self._is_stopped or number == self._given

    def resize(self, depth: int) -> None:
        with self._changed:
            self._depth = depth
            self._changed.notify_all()

    def figures(self) -> ItemFigures:
        with self._changed:
            return ItemFigures(
                depth=self._depth,
                given=self._given,
                ready=sum(isinstance(each, Made | Raised) for each in self._outcomes.values()),
                source_seconds=self._source_seconds,
                starved_seconds=self._starved_seconds,
            )

    def ask_to_stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._outcomes.setdefault(self._given, _Stopped())
            self._changed.notify_all()

    def join(self, timeout: float | None) -> None:
        self._thread.join(timeout)

    # ---- items ------------------------------------------------------------------------------------------------------

    def finish(self, number: int, outcome: list[Outcome]) -> None:
        """Takes the outcome of an item out of its list: its thread keeps nothing that the consumer has let go."""
        with self._changed:
            if not self._is_stopped:
                self._outcomes[number] = outcome.pop()
                self._changed.notify_all()

    def _end(self, number: int, reason: _Ended | _Broken) -> None:
        """No item comes from this number on. Those that were given before are taken again, and not waited for."""
        given = self.start.given
        if number < given and isinstance(reason, _Ended):
            reason = _Broken(
                InvalidArgument(
                    f"the state is behind {given} items, and the source has ended after {number}: go on with the data "
                    "that it was taken with"
                )
            )
        with self._changed:
            if not self._is_stopped:
                self._outcomes[max(number, given)] = reason
                self._changed.notify_all()

    def _feed(self) -> None:
        number = first = self.start.given - self.start.skip
        try:
            while self._has_room(number):
                if number == first:
                    self._note(number)
                elif number % _SNAPSHOTS == 0:
                    with suppress(StateError):  # behind an error there may be none: the one before serves on
                        self._note(number)
                begun = time.perf_counter()
                try:
                    item = next(self._source)
                except StageFailed as error:  # of one item: those behind it come
                    if number >= self.start.given:
                        self.finish(number, [Raised(error)])
                else:
                    if number >= self.start.given:
                        self._submit(self, number, item)
                    del item
                self._source_seconds += time.perf_counter() - begun
                number += 1
        except StopIteration:
            self._end(number, _Ended())
        except BaseException as error:  # noqa: BLE001 - raised where the item is taken
            self._end(number, _Broken(error))

    def _has_room(self, number: int) -> bool:
        """Waits until another item may be on the way. Returns False if the flow is to stop."""
        with self._changed:
            while not self._is_stopped and number - self._given >= self._depth:
                self._changed.wait()
            return not self._is_stopped

    def _note(self, number: int) -> None:
        state = copy.deepcopy(self._source.state_dict())  # a source may go on with its own
        with self._changed:
            self._snapshots.append((number, state))
            self._changed.notify_all()


class Ahead(BaseNode[_Item]):
    """
    Args:
        source: Any node.
        depth: Items that may be on the way: taken from the source, and not given yet.

    Raises:
        InvalidArgument: ``depth`` is not a positive number.
    """

    def __init__(self, source: BaseNode[Any], *, depth: int) -> None:
        expect_positive("depth", depth)
        super().__init__()
        self.source = source
        self._depth = depth
        self._flow: Flow | None = None
        self._owner = 0  # the process that has the flow's thread
        self._flows = 0
        self._epoch = -1

    @abstractmethod
    def _submit(self) -> Callable[[Flow, int, Any], None]:
        """What a flow does with an item. It must not refer to this node, which would never be let go."""

    @property
    def depth(self) -> int:
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        expect_positive("depth", depth)
        self._depth = depth
        if (flow := self._flow) is not None:  # another thread may stop it
            flow.resize(depth)

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        super().reset(dict(initial_state) if initial_state is not None else None)
        self.stop()
        self._flows += 1
        if initial_state is None:
            self._epoch += 1
            start = Start(flow=self._flows, epoch=self._epoch, given=0, skip=0)
            self.source.reset(None)
        else:
            given, skip, self._epoch = (int(initial_state[key]) for key in ("given", "skip", "epoch"))
            start = Start(flow=self._flows, epoch=self._epoch, given=given, skip=skip)
            self.source.reset(dict(initial_state["source"]))
        self._flow, self._owner = Flow(self.source, start, self._submit(), depth=self._depth), os.getpid()
        self._flow.resize(self._depth)  # another thread may have changed it meanwhile
        # What ends it refers to neither: an error that a flow has kept may refer, by its traceback, to this node.
        self._finalizer = weakref.finalize(self, _stop_if_there, weakref.ref(self.source), weakref.ref(self._flow))

    def next(self) -> Any:
        return self._running().next()

    def get_state(self) -> dict[str, Any]:
        return self._running().state()

    def _running(self) -> Flow:
        if self._flow is None:  # BaseNode resets before the first item
            raise StateError(_STOPPED)
        if os.getpid() != self._owner:
            raise StateError("this pipeline runs in the process that a fork has made this one from: make another one")
        return self._flow

    def stop(self) -> None:
        """Takes no more items, and waits until the source is not in use. The next reset begins anew."""
        self._end(None)

    def close(self) -> None:
        """As :meth:`stop`, and ends workers. A source that gives nothing is left after some seconds."""
        self._end(_PATIENCE)

    def _end(self, timeout: float | None) -> None:
        if self._flow is not None:
            flow, self._flow = self._flow, None
            self._finalizer.detach()
            _ask_to_stop(self.source, flow)
            for node in _nearest(self.source):
                node._end(timeout)
            flow.join(timeout)

    def ask_to_stop(self) -> None:
        """As :meth:`stop`, and waits for nothing."""
        if self._flow is not None:
            _ask_to_stop(self.source, self._flow)

    def item_figures(self) -> ItemFigures | None:
        """None before the first item was asked for."""
        flow = self._flow  # another thread may stop it
        return None if flow is None else flow.figures()


def expect_same(state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a node goes on as what it was when its state was taken.

    Args:
        state: Has what it was then under ``"shape"``.
        now: What it is.

    Raises:
        InvalidArgument: It was another one.
    """
    then = state.get("shape")
    if then != now:
        raise InvalidArgument(f"the state is of another loader: it had {then}, and this one has {now}")


def expect_positive(name: str, value: object) -> None:
    """
    Raises:
        InvalidArgument: An argument is not a whole number from 1 on.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}={value!r}: give a whole number from 1 on")


def _stop_if_there(source: weakref.ref[BaseNode[Any]], flow: weakref.ref[Flow]) -> None:
    """Nothing, if no thread takes items any more: a thread keeps its flow, which keeps its source."""
    if (running := flow()) is not None and (taken := source()) is not None:
        _ask_to_stop(taken, running)


def _ask_to_stop(source: BaseNode[Any], flow: Flow) -> None:
    """Called wherever the collector runs, at times under a lock of a pool or a flow: so it waits for no thread."""
    flow.ask_to_stop()
    for node in _nearest(source):  # for which the flow may wait
        node.ask_to_stop()


def below(node: BaseNode[Any]) -> list[BaseNode[Any]]:
    """The nodes that a node has: as they are, or in mappings and lists."""
    found: list[BaseNode[Any]] = []
    for value in vars(node).values():
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        found += [each for each in held if isinstance(each, BaseNode)]
    return found


def _nearest(node: BaseNode[Any]) -> list[Ahead[Any]]:
    """The nodes at or below a node that take items ahead, up to the first one on each way."""
    return [node] if isinstance(node, Ahead) else [each for source in below(node) for each in _nearest(source)]
