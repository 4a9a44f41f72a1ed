"""A pipeline's epochs: what a training loop iterates."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torchdata.nodes import BaseNode

from hydra_ext.data import beginnings
from hydra_ext.data.report import LoaderReport, StageReport, TuningReport
from hydra_ext.data.stages.ahead import Ahead
from hydra_ext.data.stages.map import Map
from hydra_ext.data.tuning.tuner import Tuning
from hydra_ext.data.tuning.views import Consumer
from hydra_ext.data.waits import waits_for_data
from hydra_ext.data.workers.processes import Workshop
from hydra_ext.errors import HydraError, InvalidArgument, StateError
from hydra_ext.policy import parse_bytes

_FORMAT = 2
_GIVE = "give what the state_dict() of such a loader has returned"
_KEYS = {"format", "nodes", "root", "is_over", "beginnings"}


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
        self._nodes = beginnings.nodes_of(root)
        self._ahead = [node for node in self._nodes if isinstance(node, Ahead)]
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
        self._final: tuple[StageReport, ...] = ()  # of the stages, as they were closed

    @waits_for_data
    def __iter__(self) -> Iterator[Any]:
        """Begins the next epoch, or goes on where a loaded state was taken. An iteration that is under way ends.

        Raises:
            InvalidArgument: The loaded state is not one of this pipeline.
        """
        if self._is_closed:
            raise StateError("this loader has been closed: make another one")
        self._end()
        goes_on = self._last is not None and self._went_back(self._last)
        if not goes_on:
            self._root.reset(None)
        self._epoch = _Epoch(self._root, self._consumer, self._tuning, may_be_over=goes_on)
        self._last = None
        if self._tuning is not None:
            self._tuning.begin()
        return self._epoch

    def _went_back(self, state: Mapping[str, Any]) -> bool:
        """Puts the nodes where a state was taken. Returns False if that is between two epochs."""
        saved, is_between = state["root"], state["is_over"] or state["root"] is None
        with _refused():
            if saved is not None:
                self._root.reset(copy.deepcopy(saved))  # a node may go on with its state
        if state["is_over"]:
            self._pass_the_end(saved)
        if is_between:
            for node in self._ahead:
                node.stop()  # its thread uses the others
            with _refused():
                beginnings.put_back(self._nodes, state["beginnings"])
        return not is_between

    def _pass_the_end(self, saved: Mapping[str, Any]) -> None:
        """Asks for an item behind the last one. A source with a state of its own may begin anew only then."""
        try:
            next(self._root)
        except StopIteration:
            return
        self._root.reset(copy.deepcopy(saved))  # it had begun before its state was taken

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
        """Where the iteration is: behind the last item given, or before the first epoch. It holds what JSON holds, if
        the keys of samples and the states of sources do."""
        if self._last is not None:
            return copy.deepcopy(self._last)
        if self._is_closed:
            raise StateError("this loader has been closed, and its source could give no state then")
        epoch = self._epoch
        return {
            "format": _FORMAT,
            "nodes": beginnings.kinds(self._nodes),
            "root": None if epoch is None else epoch.state(),
            "is_over": epoch is not None and epoch.is_over,
            "beginnings": beginnings.taken(self._nodes) if epoch is None or epoch.is_over else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where a state was taken. At an epoch's end that is the next epoch.

        Raises:
            InvalidArgument: It is not a loader's state, or one of another pipeline.
        """
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"a loader's state is a dict, and this is a {type(state).__name__}: {_GIVE}")
        if not state.keys() >= _KEYS or state["format"] != _FORMAT:
            raise InvalidArgument(
                f"this is no state of a loader in the format {_FORMAT}: it has the keys {sorted(map(str, state))}: "
                + _GIVE
            )
        kinds = beginnings.kinds(self._nodes)
        if state["nodes"] != kinds:
            raise InvalidArgument(
                f"this state is of another pipeline: its nodes are {state['nodes']}, and this loader's are {kinds}: "
                "make them as they were when the state was taken"
            )
        self._end()
        self._last = copy.deepcopy(dict(state))

    def report(self) -> LoaderReport:
        """What the stages do, and have done; of a closed loader, what they had done."""
        return LoaderReport(
            stages=self._final if self._is_closed else tuple(map(_report, self._ahead)),
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
        self._final = tuple(_at_rest(_report(node)) for node in self._ahead)
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

    def __init__(self, root: BaseNode[Any], consumer: Consumer, tuning: Tuning | None, *, may_be_over: bool) -> None:
        self._root: BaseNode[Any] | None = root
        self._consumer = consumer
        self._tuning = tuning  # it goes on as long as something iterates
        self._may_be_over = may_be_over  # the state was perhaps taken behind an epoch's last item
        self.is_over = False

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
                self.is_over = True
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


@contextmanager
def _refused() -> Iterator[None]:
    """Raises what nodes raise for states of others as InvalidArgument."""
    try:
        yield
    except HydraError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"this loader cannot go on from its state: {type(error).__name__}: {error}: make its pipeline, and what it "
            "iterates, as they were when the state was taken"
        ) from error


def _report(node: Ahead[Any]) -> StageReport:
    if isinstance(node, Map):
        return StageReport(node.name, node.item_figures(), node.worker_figures(), node.skipped)
    return StageReport(type(node).__name__.lower(), node.item_figures(), None, 0)


def _at_rest(stage: StageReport) -> StageReport:
    """What a stage has done, and does no more."""
    return replace(
        stage,
        items=stage.items and replace(stage.items, ready=0),
        workers=stage.workers and replace(stage.workers, workers=0, busy=0, waiting=0),
    )
