"""Figures of single steps: how their time was spent, and which resource limited them.

A step is a call of ``run.step``; in a plain loop it lasts from one ``optimizer.step()`` to the next. Measurements begin
when the first callback is registered, or when a trace begins.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from torch.utils.hooks import RemovableHandle

from hydra_ext import _C
from hydra_ext.runtime.placement.devices import Place

Resource = Literal["compute", "host to device", "device to host", "optimizer", "data"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepFigures:
    """The time and memory of one step. Bytes are bytes, times seconds.

    Attributes:
        step: Number of the step since the context was entered, from 1.
        seconds: Duration.
        tokens: Tokens of its microbatches, as counted by ``on_step(tokens=...)``; None without that argument, and in
            plain loops.
        tokens_per_second: Tokens per second, or None.
        peak_bytes: Most bytes that the device has held in the step; on a GPU, the most that torch's allocator has
            reserved since the context was entered.
        budget_bytes: Most bytes that the device may hold.
        compute_seconds: Rest of ``seconds`` without ``waited_seconds`` and updates that are not deferred. None on a
            GPU, where compute waits on the device and the host cannot measure it.
        to_device_seconds: Time during which bytes moved from host to device.
        to_host_seconds: Time during which bytes moved from device to host.
        update_seconds: Working time of the optimizer, deferred or not.
        waited_seconds: Time that the host waited for weights, gradients, the ends of windows, updates, and data.
        binding: Resource that worked longest, and so limited the step, or "data" if the host has waited for it for
            longer; None if ``compute_seconds`` is.
    """

    step: int
    seconds: float
    tokens: int | None
    tokens_per_second: float | None
    peak_bytes: int
    budget_bytes: int
    compute_seconds: float | None
    to_device_seconds: float
    to_host_seconds: float
    update_seconds: float
    waited_seconds: float
    binding: Resource | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        speed = "" if self.tokens_per_second is None else f"  {self.tokens_per_second:,.0f} tokens/s"
        peak, budget = self.peak_bytes / 2**20, self.budget_bytes / 2**20
        bound = "" if self.binding is None else f"  bound by {self.binding}"
        return f"step {self.step}  {self.seconds:.3f} s{speed}  device {peak:,.1f} of {budget:,.1f} MiB{bound}"


Callback = Callable[[StepFigures], object]
TokenCount = Callable[[Any], int]


class StepObserver(Protocol):
    """Notified of steps, updates and waits for data, with begins and ends in nanoseconds of ``time.monotonic_ns()``."""

    def note_step(self, number: int, begin: int, end: int) -> None: ...
    def note_update(self, begin: int, end: int) -> None: ...
    def note_data(self, begin: int, end: int) -> None: ...


@dataclass(frozen=True)
class _Listener:
    callback: Callback
    tokens: TokenCount | None

    def hear(self, figures: StepFigures, microbatches: Sequence[Any] | None) -> None:
        if self.tokens is not None and microbatches is not None:
            tokens = sum(int(self.tokens(microbatch)) for microbatch in microbatches)
            figures = replace(figures, tokens=tokens, tokens_per_second=tokens / figures.seconds)
        self.callback(figures)


@dataclass(frozen=True)
class _Moment:
    """The values of the counters at one time."""

    nanoseconds: int
    to_device: float
    to_host: float
    deferred: float
    at_once: float
    waited: float
    data: float


@dataclass(frozen=True)
class _UpdateCall:
    """A call of ``optimizer.step()``: its begin in nanoseconds, windows opened before it, and calls of a base class.

    Attributes:
        at_once: Seconds of all calls until now that were not deferred.
    """

    began: int = 0
    windows: int = 0
    depth: int = 0
    at_once: float = 0.0


@dataclass(frozen=True)
class DataReport:
    """The waits of a run for data. Loaders of :mod:`hydra_ext.data` tell of them.

    Attributes:
        waits: Number of items that the thread which entered the context has asked loaders for, inside it.
        seconds: Time until it had them.
        share: Part of the time in the context.
    """

    waits: int
    seconds: float
    share: float

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s waited for, {self.share:.1%} of the time, in {self.waits} waits"


class DataWaits:
    """Counts the waits of the thread that makes this, which is the one that trains."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._begun = time.monotonic_ns()
        self._ended: int | None = None
        self._waits = 0
        self._nanoseconds = 0

    def note(self, begin: int, end: int) -> bool:
        """Counts a wait of the calling thread, in nanoseconds of ``time.monotonic_ns()``, if it is the one."""
        if threading.get_ident() != self._thread:
            return False
        self._waits += 1
        self._nanoseconds += end - begin
        return True

    @property
    def seconds(self) -> float:
        return self._nanoseconds / 1e9

    def end(self) -> None:
        """The time in the context ends."""
        self._ended = time.monotonic_ns()

    def report(self) -> DataReport:
        passed = (self._ended or time.monotonic_ns()) - self._begun
        return DataReport(self._waits, self.seconds, self._nanoseconds / max(passed, 1))


class StepMeter:
    """Measures the steps of one run.

    Attributes:
        steps: Number of steps that have ended.
        updates: Number of calls of ``optimizer.step()`` that have ended.
        peak_bytes: Most bytes that the device has held in the last step; on a GPU as in :class:`StepFigures`.
        inside: Whether a call of ``run.step`` is under way.
        data: Waits for data.
        observer: Trace that is notified, or None.
    """

    def __init__(self, core: _C.PagedModel, place: Place, *, budget: int) -> None:
        self._core = core
        self._place = place
        self._budget = budget
        self._listeners: OrderedDict[int, _Listener] = OrderedDict()
        self._begin: _Moment | None = None
        self.inside = False
        self._update = _UpdateCall()
        self.data = DataWaits()
        self.steps = 0
        self.updates = 0
        self.peak_bytes = 0
        self.observer: StepObserver | None = None

    def on_step(self, callback: Callback, tokens: TokenCount | None) -> RemovableHandle:
        """Registers a callback that is called after each step, beginning with the one under way."""
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = _Listener(callback, tokens)
        if self._begin is None:
            self.begin()
        return handle

    # ---- called by the run ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step, if a callback or an observer wants its figures."""
        self._begin = None
        self._core.memory.ledger.take_peak()
        if self._listeners or self.observer is not None:
            self._begin = self._now()

    def measured(self, microbatches: Sequence[Any], work: Callable[[], Result], *, is_whole: bool) -> Result:
        """Runs and measures ``work``, a whole step, or the part of one that the caller's ``optimizer.step()`` ends."""
        self.inside = True
        if is_whole:
            self.begin()
        try:
            result = work()
        except BaseException:  # re-raised; a step that failed is not counted
            self.begin()
            raise
        finally:
            self.inside = False
        if is_whole:
            self._end(microbatches)
        return result

    def update_begins(self) -> None:
        """Called before ``optimizer.step()``, several times if ``step()`` calls that of its base class."""
        windows = self._core.gate.opens
        if self._update.depth == 0 or windows != self._update.windows:  # an update from before a window has failed
            self._update = replace(self._update, began=time.monotonic_ns(), windows=windows, depth=0)
        self._update = replace(self._update, depth=self._update.depth + 1)

    def update_ended(self, *, deferred: bool) -> None:
        """Called after ``optimizer.step()``. If ``deferred``, the update has only been prepared."""
        self._update = replace(self._update, depth=self._update.depth - 1)
        if self._update.depth > 0:
            return
        self.updates += 1
        if not deferred:
            end = time.monotonic_ns()
            self._update = replace(self._update, at_once=self._update.at_once + (end - self._update.began) / 1e9)
            if self.observer is not None:
                self.observer.note_update(self._update.began, end)
        if not self.inside:
            self._end(None)

    def waited_for_data(self, begin: int, end: int) -> None:
        """Called by a loader, in the thread that has waited."""
        if self.data.note(begin, end) and self.observer is not None:
            self.observer.note_data(begin, end)

    # ---- the figures ------------------------------------------------------------------------------------------------

    def _end(self, microbatches: Sequence[Any] | None) -> None:
        self.steps += 1
        reserved, peak = self._place.peak_bytes(), self._core.memory.ledger.take_peak()
        self.peak_bytes = peak if reserved is None else reserved
        begin = self._begin
        if begin is None:
            return
        try:
            end = self._now()
            if self.observer is not None:
                self.observer.note_step(self.steps, begin.nanoseconds, end.nanoseconds)
            if self._listeners:
                figures = self._between(begin, end)
                for listener in list(self._listeners.values()):
                    listener.hear(figures, microbatches)
        finally:
            self.begin()  # the time of callbacks belongs to no step

    def _now(self) -> _Moment:
        core = self._core
        pager, backend = core.pager.statistics, core.memory.backend
        waited = pager.hook_wait_seconds + pager.fault_wait_seconds + pager.drain_wait_seconds
        return _Moment(
            nanoseconds=time.monotonic_ns(),
            to_device=backend.to_device_statistics.busy_seconds,
            to_host=backend.to_host_statistics.busy_seconds,
            deferred=core.update.seconds,
            at_once=self._update.at_once,
            waited=waited + core.gradients.statistics.wait_seconds + core.update.wait_seconds + self.data.seconds,
            data=self.data.seconds,
        )

    def _between(self, begin: _Moment, end: _Moment) -> StepFigures:
        seconds = (end.nanoseconds - begin.nanoseconds) / 1e9
        waited = end.waited - begin.waited
        at_once = end.at_once - begin.at_once
        busy: dict[Resource, float] = {
            "compute": max(seconds - waited - at_once, 0.0),
            "host to device": end.to_device - begin.to_device,
            "device to host": end.to_host - begin.to_host,
            "optimizer": end.deferred - begin.deferred + at_once,
            "data": end.data - begin.data,
        }
        synchronous = self._place.device.type == "cpu"
        longest = max(busy, key=lambda resource: busy[resource])
        return StepFigures(
            step=self.steps,
            seconds=seconds,
            tokens=None,
            tokens_per_second=None,
            peak_bytes=self.peak_bytes,
            budget_bytes=self._budget,
            compute_seconds=busy["compute"] if synchronous else None,
            to_device_seconds=busy["host to device"],
            to_host_seconds=busy["device to host"],
            update_seconds=busy["optimizer"],
            waited_seconds=waited,
            binding=longest if synchronous else None,
        )
