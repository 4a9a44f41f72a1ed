"""``hydra_ext.SharedDevice``: several runs on one device, which take turns at each block.

The idea is Hydra's shard alternator parallelism (arXiv 2110.08633): while one run waits for its link, its update or its
disk, another computes. So together they are limited by the sum of each resource's work, not by the sum of their times.

Each run is a tenant: a function in a thread of its own. Exactly one tenant goes on at a time
({repo}`csrc/base/device_turns.h`), and the random states and switches of the process are exchanged with it. So a run is
alone with the process whenever its code runs, and has the numbers of the run alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from hydra_ext import _C
from hydra_ext.errors import InvalidArgument, InvalidBudget, StateError, TenantsFailed
from hydra_ext.policy import SimulatedDevice, parse_bytes
from hydra_ext.runtime.placement import devices
from hydra_ext.runtime.rounds.fibers import ThreadSettings
from hydra_ext.runtime.rounds.isolation import Surroundings, keep_no_casts, replaced_functions

_SECONDS_TO_A_SIGNAL = 0.2  # Python delivers signals between two waits of the main thread
_SECONDS_TO_START = 2.0  # of a thread whose start was interrupted: whether it was made is not known


@dataclass(frozen=True)
class TenantFigures:
    """What one run did while devices were shared. Times are seconds.

    Attributes:
        compute_seconds: Time in which it had the turn.
        to_device_seconds, to_host_seconds: Time in which its bytes moved.
        update_seconds: Working time of its deferred updates, as of its last step.
        steps: Optimizer steps.
    """

    compute_seconds: float
    to_device_seconds: float
    to_host_seconds: float
    update_seconds: float
    steps: int

    @property
    def loads(self) -> dict[str, float]:
        """Time by resource of the device."""
        return {
            "compute": self.compute_seconds,
            "host to device": self.to_device_seconds,
            "device to host": self.to_host_seconds,
            "optimizer": self.update_seconds,
        }


@dataclass(frozen=True)
class SharedReport:
    """What a shared device did during :meth:`SharedDevice.run`. Times are seconds.

    Attributes:
        seconds: Duration, up to now if it has not ended.
        tenants: Figures of each run, in the order of the functions.
        switches: How often another run went on than the one before.
        bound: Joint bound: the largest sum, over all runs, of the time of one resource. No order of their work is
            faster. Compute counts the code of the runs between two waits.
        share: ``bound / seconds``.
    """

    seconds: float
    tenants: tuple[TenantFigures, ...]
    switches: int

    @property
    def bound(self) -> float:
        return max(self._sums().values())

    @property
    def share(self) -> float:
        return self.bound / self.seconds if self.seconds > 0 else 0.0

    def _sums(self) -> dict[str, float]:
        loads = [each.loads for each in self.tenants]
        return {resource: sum(each[resource] for each in loads) for resource in loads[0]}

    def __str__(self) -> str:
        sums = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in self._sums().items())
        return (
            f"{len(self.tenants)} runs in {self.seconds:.3f} s, {self.share:.1%} of the joint bound "
            f"({self.bound:.3f} s): {sums}; {self.switches} switches"
        )


class SharedDevice(devices.PlaceMaker):
    """One device for several runs: they share its budget, its lanes and the optimizer threads, block by block.

    Each function of :meth:`run` trains or evaluates its own model with ``hydra_ext.offload(..., device=this)``. Only
    one of them goes on at a time. Another one does while it waits for weights, gradients, an update or the disk, and
    when it arrives at a block. Numbers are those of each function alone, with the random state that the process has
    when :meth:`run` is called. Random generators of torch, Python and numpy are exchanged with the turns.

    Autocast keeps no casts there, as with ``cache_enabled=False``: it has one cache for all threads.

    A function must not wait for another one, as by a lock that both take: the turn passes on only in waits of
    hydra_ext. An optimizer of torch's own updates on the host within the turn; those of :mod:`hydra_ext.optim` update
    behind the next forward, while others compute. On a GPU each run has a stream of its own, and kernels of one run
    while copies of another; the turn orders only what the host enqueues.

    Args:
        device: As for :class:`hydra_ext.offload`.
        budget: Device bytes of all runs together: an int, or a text such as ``"8GiB"``; ``"auto"`` on a GPU. A run with
            ``budget="auto"`` gets an equal share of it.

    Raises:
        InvalidBudget: The budget is not a size.
        InvalidDevice: The device does not exist, or this build cannot use it.
    """

    def __init__(
        self,
        device: SimulatedDevice | devices.Place | torch.device | str | None = None,
        *,
        budget: int | str,
    ) -> None:
        self._whole = devices.choose(device)
        self._budget = self._whole.free_bytes() if budget == "auto" else parse_bytes(budget)
        self._sharing: _Sharing | None = None

    @property
    def budget(self) -> int:
        """Device bytes of all runs together."""
        return self._budget

    def run(self, *functions: Callable[[], Any]) -> list[Any]:
        """Calls the functions, each in a thread of its own, and returns their results when all have ended.

        Of the runs that could go on, the one that has computed the least does: it is bound by its link, and the others
        fill its waits. A run stays while the others are behind by less than two milliseconds.

        Args:
            functions: Each makes its contexts itself, and takes no argument. An error in one does not stop the others.

        Raises:
            InvalidArgument: There is no function, or one cannot be called.
            StateError: The device runs functions already.
            TenantsFailed: Several functions have raised. The error of a single one is raised itself.
        """
        if not functions or not all(callable(function) for function in functions):
            raise InvalidArgument("SharedDevice.run: give at least one function, and functions only")
        if self._sharing is not None and not self._sharing.ended:
            raise StateError("SharedDevice.run: this device runs functions already; make another one, or wait")
        self._sharing = sharing = _Sharing(self._whole, self._budget, functions)
        return sharing.run()

    def report(self) -> SharedReport:
        """Figures of the present or last :meth:`run`.

        Raises:
            StateError: There was none.
        """
        if self._sharing is None:
            raise StateError("SharedDevice.report: nothing has run on this device yet")
        return self._sharing.report()

    def place(self) -> devices.Place:
        tenant = _own.tenant
        if tenant is None or tenant.sharing is not self._sharing:
            raise StateError(
                "this device is shared: enter its contexts inside the functions that are given to SharedDevice.run()"
            )
        return tenant.place()


class _Tenant:
    """One function, its thread and its place on the device.

    Attributes:
        number: As the core counts tenants.
        result: Return value of the function.
        error: What it has raised, or None.
        ended: Whether the thread is about to end. Python 3.11's ``Thread.is_alive()`` is wrong once a signal has
            interrupted ``join()``.
    """

    def __init__(self, sharing: _Sharing, function: Callable[[], Any]) -> None:
        self.sharing = sharing
        self.number: int = sharing.turns.admit()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.claims: dict[int, int] = {}  # bytes, by the identity of a place
        self._function: Callable[[], Any] | None = function
        self._done = 0
        self._updates = 0.0  # seconds
        self._told: dict[int, float] = {}  # by the identity of a core
        self._backends: list[_C.DeviceBackend] = []
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._main,), name=f"tenant-{self.number}")

    def _main(self) -> None:
        try:
            if not self.sharing.interrupted:
                self.result = self.sharing.turns.stay(self.number, self._call)
        except BaseException as error:  # noqa: BLE001 - raised by _Sharing.run()
            self.error = error
        finally:
            self.ended = True
            self.sharing.ends.put(None)

    def await_start(self) -> None:
        """Waits for the thread to begin. An interrupt may have ended ``Thread.start()`` before."""
        until = time.monotonic() + _SECONDS_TO_START
        while self.thread.ident is None and time.monotonic() < until:
            time.sleep(0.001)

    @property
    def goes_on(self) -> bool:
        return self.thread.ident is not None and not self.ended

    def _call(self) -> Any:
        function, self._function = self._function, None
        if function is None or self.sharing.interrupted:
            return None
        _own.tenant = self  # as long as the thread lives
        keep_no_casts()
        self.sharing.settings.apply()
        if self.sharing.whole.device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self.sharing.whole.device))  # type: ignore[no-untyped-call]
        return function()

    # ---- its runs ---------------------------------------------------------------------------------------------------

    def place(self) -> devices.Place:
        return devices.shared(self.sharing.whole, self)

    def share(self) -> int:
        return self.sharing.budget // len(self.sharing.tenants)

    def make_backend(self) -> _C.DeviceBackend:
        backend = _C.SharedBackend(self.sharing.backend)
        self._backends.append(backend)
        return backend

    def expect_budget(self, budget: int) -> None:
        given = sum(sum(each.claims.values()) for each in self.sharing.tenants)
        if given + budget > self.sharing.budget:
            raise InvalidBudget(
                f"budget={budget}, but the runs on this device share {self.sharing.budget} bytes, of which "
                f"{given} are given to others: give at most {self.sharing.budget - given} bytes, or 'auto' to all"
            )

    def step_ended(self, core: _C.PagedModel) -> None:
        self._done += 1
        context, seconds = id(core), core.update.seconds
        before = self._told.get(context, 0.0)
        self._updates += seconds - (before if before <= seconds else 0.0)  # the number may be a new context's
        self._told[context] = seconds

    def figures(self) -> TenantFigures:
        return TenantFigures(
            compute_seconds=self.sharing.turns.computed(self.number),
            to_device_seconds=sum(each.to_device_statistics.busy_seconds for each in self._backends),
            to_host_seconds=sum(each.to_host_statistics.busy_seconds for each in self._backends),
            update_seconds=self._updates,
            steps=self._done,
        )


class _OfThread(threading.local):
    tenant: _Tenant | None = None


_own = _OfThread()


class _Sharing:
    """One call of :meth:`SharedDevice.run`."""

    def __init__(
        self,
        whole: devices.Place,
        budget: int,
        functions: Sequence[Callable[[], Any]],
    ) -> None:
        self.whole = whole
        self.budget = budget
        self.backend = whole.make_backend()
        self.settings = ThreadSettings.of_this_thread()
        self._states = _ProcessStates(whole.device)
        self.turns = _C.DeviceTurns(self._states.note, self._states.restore)
        self.tenants = [_Tenant(self, function) for function in functions]
        self.ended = False
        self.interrupted = False
        self.ends: SimpleQueue[None] = SimpleQueue()
        self._began = time.monotonic()
        self._seconds = 0.0

    def run(self) -> list[Any]:
        self._began = time.monotonic()
        try:
            with replaced_functions():
                self._start_and_wait()
        finally:
            self._seconds = time.monotonic() - self._began
            self.ended = True
            self._states.restore_first()
        return self._take_results()

    def _take_results(self) -> list[Any]:
        """What the functions have returned. The report, which stays, does not keep it alive."""
        failed = {number: tenant.error for number, tenant in enumerate(self.tenants) if tenant.error is not None}
        results = [tenant.result for tenant in self.tenants]
        for tenant in self.tenants:
            tenant.error = tenant.result = None
        try:
            if len(failed) == 1:
                raise next(iter(failed.values()))
            if failed:
                told = "; ".join(f"{number}: {type(error).__name__}: {error}" for number, error in failed.items())
                raise TenantsFailed(
                    f"{len(failed)} of the functions that shared a device have failed: {told}", errors=failed
                ) from next(iter(failed.values()))
            return results
        finally:
            failed = {}  # a frame of the traceback must not refer to the error

    def _start_and_wait(self) -> None:
        """A signal may interrupt the main thread anywhere inside. Its error is raised once all have ended."""
        interrupt: BaseException | None = None
        waiting, asked = list(self.tenants), list[_Tenant]()
        while True:
            try:
                if interrupt is not None:
                    waiting.clear()
                    self._interrupt()
                while waiting:
                    asked.append(waiting.pop(0))
                    asked[-1].thread.start()
                self._wait(asked)
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _interrupt(self) -> None:
        if not self.interrupted:
            self.interrupted = True  # those that have not begun do not
            for tenant in self.tenants:
                self.turns.interrupt(tenant.number)

    def _wait(self, asked: Sequence[_Tenant]) -> None:
        """
        Args:
            asked: Those whose threads were asked to start.
        """
        for tenant in asked:
            tenant.await_start()
        while any(tenant.goes_on for tenant in self.tenants):
            with contextlib.suppress(Empty):
                self.ends.get(timeout=_SECONDS_TO_A_SIGNAL)
        for tenant in self.tenants:
            if tenant.thread.ident is not None:
                tenant.thread.join()

    def report(self) -> SharedReport:
        return SharedReport(
            seconds=self._seconds if self.ended else time.monotonic() - self._began,
            tenants=tuple(tenant.figures() for tenant in self.tenants),
            switches=self.turns.switches,
        )


class _ProcessStates:
    """Random states and switches of the process, as each tenant left them.

    The core calls :meth:`note` and :meth:`restore`, and calls them again if an interrupt ends them half-way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = Surroundings(device, host=True)
        self._of: dict[int, Surroundings] = {}

    def note(self, tenant: int) -> None:
        if tenant in self._of:
            self._of[tenant].note()
        else:
            self._of[tenant] = Surroundings(self._device, host=True)

    def restore(self, tenant: int) -> None:
        self._of.get(tenant, self._first).restore()

    def restore_first(self) -> None:
        self._first.restore()
