"""A pipeline's epochs: what a training loop iterates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torchdata.nodes import BaseNode

from hydra_ext.data.report import LoaderReport, StageReport, TuningReport
from hydra_ext.data.stages.ahead import Ahead, below
from hydra_ext.data.stages.map import Map
from hydra_ext.data.tuning.tuner import Tuning
from hydra_ext.data.tuning.views import Consumer
from hydra_ext.data.waits import waits_for_data
from hydra_ext.data.workers.processes import Workshop
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.policy import parse_bytes

_FORMAT = 1


class Loader:
    """Iterates a pipeline. Each iteration is an epoch.

    Its processes have one memory for their results. It is a context manager, whose end is :meth:`close`.

    Args:
        root: The pipeline's last node, of :mod:`hydra_ext.data` or torchdata.
        memory: Most bytes of shared memory, such as ``"2GiB"``. In a tuned loader, of that and of all worker
            processes.
        length: Gives the number of items of an epoch, if it is known.
        is_tuned: Whether the number of workers of each stage follows from what the training takes and from memory.
            Each stage begins with one.

    Raises:
        InvalidArgument: Two stages have the same name.
    """

    def __init__(
        self,
        root: BaseNode[Any],
        *,
        memory: int | str = "1GiB",
        length: Callable[[], int] | None = None,
        is_tuned: bool = False,
    ) -> None:
        self._root = root
        self._length = length
        limit = parse_bytes(memory)
        self._workshop = Workshop(limit)
        self._ahead = _found(root)
        self.stages: Mapping[str, Map] = {node.name: node for node in self._ahead if isinstance(node, Map)}
        if len(self.stages) < sum(isinstance(node, Map) for node in self._ahead):
            raise InvalidArgument("two stages have the same name: give each a name= of its own")
        for stage in self.stages.values():
            stage.share(self._workshop)
        self._consumer = Consumer()
        stages = list(self.stages.values())
        self._tuning = Tuning(stages, self._workshop, self._consumer, limit) if is_tuned else None
        self._epoch: _Epoch | None = None
        self._last: dict[str, Any] | None = None  # the state before the next epoch
        self._is_closed = False

    def __iter__(self) -> Iterator[Any]:
        """Begins the next epoch, or goes on where a loaded state was taken. An iteration that is under way ends."""
        if self._is_closed:
            raise StateError("this loader has been closed: make another one")
        self._end()
        self._epoch = _Epoch(self._root, self._last, self._consumer, self._tuning)
        self._last = None
        if self._tuning is not None:
            self._tuning.begin()
        return self._epoch

    def __len__(self) -> int:
        """Items of an epoch.

        Raises:
            TypeError: It is not known.
        """
        if self._length is None:
            raise TypeError("the number of items of this pipeline is not known")
        return self._length()

    def _end(self) -> None:
        if self._epoch is not None:
            self._epoch.end()
            self._epoch = None

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: behind the last item given. It holds what JSON holds, if the keys of
        samples and the states of sources do."""
        if self._last is not None:
            return self._last
        if self._is_closed:
            raise StateError("this loader has been closed, and its source could give no state then")
        return {"format": _FORMAT, "root": None if self._epoch is None else self._epoch.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where a state was taken. At an epoch's end that is the next epoch.

        Raises:
            InvalidArgument: It is not a loader's state.
        """
        if state.get("format") != _FORMAT or "root" not in state:
            raise InvalidArgument(f"this is no state of a loader: it has the keys {sorted(map(str, state))}")
        self._end()
        self._last = dict(state)

    def report(self) -> LoaderReport:
        """What the stages do, and have done."""
        return LoaderReport(
            stages=tuple(_report(node) for node in self._ahead),
            shared_bytes=self._workshop.region.used,
            shared_limit=self._workshop.region.limit,
            inline=self._workshop.inline,
            deaths=self._workshop.deaths,
            tuning=None if self._tuning is None else TuningReport(tuple(self.stages), self._tuning.intervals()),
        )

    def close(self) -> None:
        """Ends the workers. Items that were given stay."""
        if self._is_closed:
            return
        if self._tuning is not None:
            self._tuning.end()
        with suppress(Exception):  # state_dict() then says that there is none
            self._last = self.state_dict()
        self._is_closed = True
        self._end()
        self._workshop.close()
        for node in reversed(self._ahead):
            node.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Epoch(Iterator[Any]):
    """One iteration of a loader."""

    def __init__(
        self, root: BaseNode[Any], state: Mapping[str, Any] | None, consumer: Consumer, tuning: Tuning | None
    ) -> None:
        self._root: BaseNode[Any] | None = root
        self._consumer = consumer
        self._tuning = tuning  # it goes on as long as something iterates
        saved = None if state is None else state["root"]
        self._may_be_over = saved is not None  # the state may be that of an epoch's end
        try:
            root.reset(saved)
        except (KeyError, TypeError, IndexError) as error:
            if saved is None:
                raise
            raise InvalidArgument(f"this state is of another pipeline: {type(error).__name__}: {error}") from error

    @waits_for_data
    def __next__(self) -> Any:
        root = self._node()
        if (refused := self._consumer.refused) is not None:
            raise refused()
        begun = time.perf_counter()
        try:
            item = next(root)
        except StopIteration:
            if not self._may_be_over:
                raise
            root.reset(None)
            item = next(root)
        finally:
            self._may_be_over = False
        self._consumer.took(time.perf_counter() - begun)
        return item

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._node().state_dict()
        return state

    def end(self) -> None:
        self._root = None

    def _node(self) -> BaseNode[Any]:
        if self._root is None:
            raise StateError(
                "this iteration has ended: its loader has begun another one, was given a state, or was closed"
            )
        return self._root


def _found(node: BaseNode[Any]) -> list[Ahead[Any]]:
    """The nodes of a pipeline that take items ahead, in the order of the data."""
    found = [each for source in below(node) for each in _found(source)]
    return [*found, node] if isinstance(node, Ahead) else found


def _report(node: Ahead[Any]) -> StageReport:
    if isinstance(node, Map):
        return StageReport(node.name, node.item_figures(), node.worker_figures(), node.skipped)
    return StageReport(type(node).__name__.lower(), node.item_figures(), None, 0)
