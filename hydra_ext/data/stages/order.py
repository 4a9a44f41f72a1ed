"""Nodes that put items together, or in another order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torchdata.nodes import BaseNode

from hydra_ext.data.places import Place
from hydra_ext.data.stages.ahead import Ahead, Flow, expect_positive, expect_same
from hydra_ext.data.workers.pool import Made
from hydra_ext.errors import StageFailed, StateError

_IN_THE_MIDDLE = "an item has failed in the middle of what a node puts together: take the next item, and the state then"


class Prefetch(Ahead[Any]):
    """Takes items from its source before they are asked for.

    Args:
        source: Any node.
        depth: Items that may wait.
    """

    def _submit(self) -> Callable[[Flow, int, Any], None]:
        return _pass_on


def _pass_on(flow: Flow, number: int, item: Any) -> None:
    flow.finish(number, [Made(item, 0.0)])


class Batch(BaseNode[list[Any]]):
    """Lists of consecutive items.

    An item that fails raises, and is in no list: the items before it are in the next one.

    Args:
        source: Any node.
        size: Items of a list.
        drop_last: Whether a last list with fewer items is left out.

    Raises:
        InvalidArgument: ``size`` is not a positive number.
    """

    def __init__(self, source: BaseNode[Any], size: int, *, drop_last: bool = False) -> None:
        expect_positive("size", size)
        super().__init__()
        self.source = source
        self._size = size
        self._drop_last = drop_last
        self._items: list[Any] = []  # of a list that is not full yet, as an item has failed

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        super().reset(dict(initial_state) if initial_state is not None else None)
        if initial_state is not None:
            expect_same(initial_state, self._shape())
        self._items = []
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> list[Any]:
        _fill(self._items, self.source, self._size)
        items, self._items = self._items, []
        if not items or (self._drop_last and len(items) < self._size):
            raise StopIteration
        return items

    def get_state(self) -> dict[str, Any]:
        """
        Raises:
            StateError: An item has failed in the middle of a list.
        """
        if self._items:
            raise StateError(_IN_THE_MIDDLE)
        return {"source": self.source.state_dict(), "shape": self._shape()}

    def _shape(self) -> dict[str, Any]:
        return {"size": self._size, "drop_last": self._drop_last}


class Shuffle(BaseNode[Any]):
    """Items in a random order, within windows of so many consecutive items.

    The order follows from the seed, the epoch and the window. A node that resumes takes the items of its window again.
    An item that fails raises, and is in no window.

    Args:
        source: Any node.
        window: Items that are held and put in another order.
        seed: Of the order.

    Raises:
        InvalidArgument: ``window`` is not a positive number.
    """

    def __init__(self, source: BaseNode[Any], window: int, *, seed: int = 0) -> None:
        expect_positive("window", window)
        super().__init__()
        self.source = source
        self._window = window
        self._seed = seed
        self._epoch = -1
        self._windows = 0
        self._items: list[Any] = []
        self._given = 0
        self._is_filling = False
        self._state: dict[str, Any] = {}  # of the source, before the window

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        super().reset(dict(initial_state) if initial_state is not None else None)
        self._items, self._given, self._is_filling = [], 0, False
        if initial_state is None:
            self._epoch, self._windows = self._epoch + 1, 0
            self.source.reset(None)
            self._state = self.source.state_dict()
            return
        expect_same(initial_state, self._shape())
        self._epoch, self._windows = int(initial_state["epoch"]), int(initial_state["windows"])
        self._state = initial_state["source"]
        self.source.reset(self._state)
        given = int(initial_state["given"])
        if given:
            self._is_filling = True
            while self._is_filling:
                with suppress(StageFailed):  # it was raised before
                    self._fill()
            self._given = given

    def next(self) -> Any:
        if self._given == len(self._items) and not self._is_filling:
            if self._items:
                self._windows += 1
            self._items, self._given, self._is_filling = [], 0, True
            self._state = copy.deepcopy(self.source.state_dict())
        if self._is_filling:
            self._fill()
        if not self._items:
            raise StopIteration
        self._given += 1
        item, self._items[self._given - 1] = self._items[self._given - 1], None  # it is the consumer's now
        return item

    def _fill(self) -> None:
        _fill(self._items, self.source, self._window)
        self._is_filling = False
        random.Random(Place(self._seed, self._epoch, self._windows).derived()).shuffle(self._items)

    def get_state(self) -> dict[str, Any]:
        """
        Raises:
            StateError: An item has failed in the middle of a window.
        """
        if self._is_filling:
            raise StateError(_IN_THE_MIDDLE)
        return {
            "source": self._state,
            "epoch": self._epoch,
            "windows": self._windows,
            "given": self._given,
            "shape": self._shape(),
        }

    def _shape(self) -> dict[str, Any]:
        return {"window": self._window, "seed": self._seed}


def _fill(items: list[Any], source: BaseNode[Any], size: int) -> None:
    """Appends items until there are so many, or no more come."""
    while len(items) < size:
        try:
            items.append(next(source))
        except StopIteration:
            return
