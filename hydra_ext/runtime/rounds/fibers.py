"""Fibers: threads that take turns, exactly one at a time, with the thread that made them.

A fiber runs one microbatch. Before a module whose blocks are not at hand it *parks*: it hands control back and waits.
Two flags, ``_permitted`` and ``_running``, pass control between the threads. The queues only wake the other side, so an
operation that is repeated after an interrupt does no harm.

Signal handlers run in the main thread. An exception that one raises while the main thread waits for a fiber is also
raised in the fiber, which unwinds from where it is. The main thread raises it once the fiber has parked or ended.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.blocks import Site
from hydra_ext.tracing import not_traced

Result = TypeVar("Result")
SiteVisit = Callable[[tuple[Any, ...], dict[str, Any]], Any]
START = -1  # the place of a fiber before its first site
# A signal that arrives just before its thread begins to wait does not wake it: Python sees it at the next wake.
_SECONDS_TO_A_SIGNAL = 1.0


class _OfThread(threading.local):
    """What a thread has. Attributes of the class are read many times faster than ones that may be missing.

    Attributes:
        fiber: The fiber whose thread it is.
        of_fibers: CPU seconds of the fibers that the thread has joined.
    """

    fiber: Fiber[Any] | None = None
    of_fibers = 0.0


_local = _OfThread()
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Cancelled(BaseException):
    """Unwinds a fiber whose round has ended early. Code must not catch it."""


@not_traced
def current() -> Fiber[Any] | None:
    """The fiber whose thread is the calling one; None for other threads."""
    return _local.fiber


def compute_seconds() -> float:
    """CPU seconds of the calling thread, and of the fibers that it has joined."""
    return time.thread_time() + _local.of_fibers


class WriteListener(Protocol):
    """Notified of every attribute that a fiber sets on a module or reads, and of every call of a site."""

    def note_write(self, index: int, module: nn.Module, name: str, value: Any) -> None: ...
    def note_read(self, index: int, module: nn.Module, name: str) -> None: ...
    def note_visit(self, index: int, place: int) -> None: ...


class SiteCaller(Protocol):
    """Makes the calls of sites in place of the fiber."""

    def call(self, fiber: Fiber[Any], number: int, site: Site, call: SiteVisit, args: Any, kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class ThreadSettings:
    """What a thread takes over of the one that made it.

    Attributes:
        threads: For operators.
        stream: None before CUDA is used.
    """

    threads: int
    stream: torch.cuda.Stream | None

    @classmethod
    def of_this_thread(cls) -> ThreadSettings:
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(torch.get_num_threads(), torch.cuda.current_stream() if on_gpu else None)

    def apply(self) -> None:
        _use_threads(self.threads)
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # and its device


class Fiber(Generic[Result]):
    """One microbatch's thread.

    Attributes:
        index: Index of the microbatch in its round.
        owner: Run whose sites park the fiber.
        attributes: Listener that is notified of accesses to modules.
        caller: Object that makes the calls of sites; None for plain calls.
        place: Number of the site at which the fiber is parked; :data:`START` before the first.
        blocks: Blocks of the sites that the fiber is inside, including the one where it is parked.
        marks: Sequence numbers of autograd nodes, one from each time the fiber continued.
        calls: Calls of sites: the site's blocks, and whether the call records a graph.
        result: Return value of ``work``.
    """

    def __init__(
        self,
        index: int,
        owner: object,
        context: _C.ThreadContext,
        attributes: WriteListener,
        work: Callable[[], Result],
        caller: SiteCaller | None = None,
    ) -> None:
        self.index = index
        self.owner = owner
        self.attributes = attributes
        self.caller = caller
        self.place = START
        self.blocks: frozenset[int] = frozenset()
        self.marks: list[int] = []
        self.calls: list[tuple[frozenset[int], bool]] = []
        self.result: Result | None = None
        self._work: Callable[[], Result] | None = work
        self._context = context
        self._settings = ThreadSettings.of_this_thread()
        self._at_hand: frozenset[int] = frozenset()
        self._claim: dict[str, str] = {}
        self._permitted = False
        self._running = False
        self._cancelled = False
        self._ended = False
        self._errors: list[BaseException] = []
        self._seconds = 0.0  # of the CPU
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._rested: SimpleQueue[None] = SimpleQueue()
        trace = sys.gettrace()
        copied = contextvars.copy_context()
        self._thread = threading.Thread(
            target=copied.run, args=(self._main, trace), name=f"microbatch-{index}", daemon=True
        )

    # ---- the maker's side -------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._ended

    def start(self) -> None:
        self._thread.start()

    def go_on(self, at_hand: frozenset[int]) -> None:
        """Runs the fiber until it parks or ends. ``at_hand`` are the blocks that are pinned.

        Raises:
            BaseException: the exception that ended the fiber, or that a signal handler raised meanwhile.
        """
        self._at_hand = at_hand
        self._permitted = True
        self._wake.put(None)
        self._wait()
        if self._errors and not self._cancelled:
            _raise_from(self._errors)

    def cancel(self) -> None:
        """Ends the fiber, which unwinds from where it is parked. After an interrupt the call has to be repeated."""
        self._cancelled = True
        if self._claim.setdefault("by", "maker") == "maker":
            self._ended = True
        if self._running:  # an interrupt reached the maker outside its wait, so it was not passed on to the fiber
            self._interrupt(KeyboardInterrupt)
        while not self._ended:
            self._permitted = True
            self._wake.put(None)
            self._wait()
        if self._thread.ident is not None:
            self._thread.join()
        self._errors.clear()

    def join(self) -> None:
        self._thread.join()
        _local.of_fibers += self._seconds

    def _wait(self) -> None:
        interrupts: list[BaseException] = []
        while self._permitted or self._running:
            try:
                self._rested.get(timeout=_SECONDS_TO_A_SIGNAL)
            except Empty:
                pass
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupts.append(error)
                self._interrupt(type(error))
        if interrupts:
            _raise_from(interrupts)

    def _interrupt(self, error: type[BaseException]) -> None:
        """Raises ``error`` asynchronously in the fiber, at most once in its life."""
        # A thread that has ended may have left its number to another one.
        if not self._ended and self._claim.setdefault("interrupt", "sent") == "sent":
            self._claim["interrupt"] = "done"
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))

    # ---- the fiber's side -------------------------------------------------------------------------------------------

    def _main(self, trace: Any) -> None:
        if self._claim.setdefault("by", "thread") != "thread":
            return
        try:
            try:
                _local.fiber = self
                self._take_turn()
                sys.settrace(trace)
                self._context.enter()
                self._settings.apply()
                if self._work is not None:
                    self.result = self._work()
            except BaseException as error:  # noqa: BLE001 - raised by go_on()
                self._errors.append(error)
            finally:
                self._end()
        except BaseException as error:  # noqa: BLE001 - an interrupt outside the inner try; there is at most one
            self._errors.append(error)
        finally:
            self._end()

    def _end(self) -> None:
        self._seconds = time.thread_time()
        _local.fiber = None
        self._work = None
        self._ended = True
        self._running = False
        self._permitted = False
        self._rested.put(None)

    @not_traced
    def _take_turn(self) -> None:
        while not self._permitted:
            self._wake.get()
        self._running = True  # before the other flag is cleared: the maker takes two cleared flags for a parked fiber
        self._permitted = False
        if self._cancelled:
            raise Cancelled
        self.marks.append(_next_node())

    @not_traced
    def _park(self, place: int) -> None:
        if self._cancelled:
            raise Cancelled
        self.place = place
        self._running = False
        self._rested.put(None)
        self._take_turn()

    @not_traced
    def call(self, place: int, site: Site, visit: SiteVisit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a site. ``place`` is its number."""
        with self.inside(place, site):
            if self.caller is None:
                return visit(args, kwargs)
            return self.caller.call(self, place, site, visit, args, kwargs)

    @not_traced
    def inside(self, place: int, site: Site) -> Inside:
        """A context for the call of a site. It parks on entering unless the site's blocks are at hand."""
        return Inside(self, place, frozenset(site.blocks))


def _raise_from(errors: list[BaseException]) -> None:
    """Raises the first error. Afterwards no frame refers to it, since its traceback would keep graphs alive."""
    try:
        raise errors[0]
    finally:
        errors.clear()


def _use_threads(wanted: int) -> None:
    """Sets the number of OpenMP and MKL threads of the calling thread, on which the last bits of FFTs and sums depend.

    Torch passes the number to MKL when the thread first queries it, which not every operator does.
    """
    given = torch.get_num_threads()
    if given != wanted:
        torch.set_num_threads(wanted)
        # The call also sets the number that later threads begin with. Another thread restores that one.
        restorer = threading.Thread(target=torch.set_num_threads, args=(given,))
        restorer.start()
        restorer.join()


class Inside:
    """The context of :meth:`Fiber.inside`: the call of a site by a fiber."""

    def __init__(self, fiber: Fiber[Any], place: int, blocks: frozenset[int]) -> None:
        self._fiber = fiber
        self._place = place
        self._blocks = blocks
        self._around = fiber.blocks

    @not_traced
    def __enter__(self) -> None:
        fiber = self._fiber
        fiber.blocks = self._around | self._blocks
        if not self._blocks <= fiber._at_hand:
            try:
                fiber._park(self._place)
            except BaseException:  # re-raised: __exit__ is not called then
                fiber.blocks = self._around
                raise
        fiber.calls.append((self._blocks, torch.is_grad_enabled()))
        fiber.attributes.note_visit(fiber.index, self._place)

    @not_traced
    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._fiber.blocks = self._around
