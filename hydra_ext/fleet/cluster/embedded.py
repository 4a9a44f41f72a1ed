"""Gangs on this machine: one process for each device, forked from a zygote."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ext.errors import FleetInUse, StateError
from hydra_ext.fleet.cluster.interface import Ended, Event, Failure, Node, Order, Progress, Task
from hydra_ext.fleet.cluster.progress import ProgressReader
from hydra_ext.fleet.devices import Device

LOCK = "workers.lock"  # in a fleet's folder
_LOOK = 0.05  # seconds between looks at progress files
_LINGER = 30.0  # seconds that the workers of a fleet that was killed may take to end
_START = 120.0  # seconds that a zygote may take to import torch


@dataclass
class _Gang:
    """A gang that runs.

    Attributes:
        reader: Of its job's progress; None for a search or a trial.
        process: Number of the gang whose process it is in: its own, or that of one that it shares a device with.
        statuses: Exit statuses of the ranks that have ended.
        is_killed: Whether the fleet has killed it.
    """

    order: Order
    reader: ProgressReader | None
    process: int
    statuses: dict[int, int] = field(default_factory=dict)
    is_killed: bool = False


class EmbeddedCluster:
    """This machine as a cluster of one node.

    Args:
        locks: Files that are locked as long as workers live, also after the end of this process.

    Raises:
        FleetInUse: Workers of an earlier fleet have not ended.
    """

    def __init__(self, devices: Sequence[Device], *, locks: Sequence[Path], name: str = "here") -> None:
        self._node = Node(name=name, devices=tuple(devices), cores=len(os.sched_getaffinity(0)))
        self._gangs: dict[int, _Gang] = {}
        self._told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._locked: dict[Path, int] = {}
        try:
            for lock in locks:
                self._locked[lock] = _locked(lock)
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "hydra_ext.fleet.cluster.zygote", *map(str, self._locked.values())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
                pass_fds=list(self._locked.values()),
            )
        except BaseException:  # re-raised: the files have no other owner yet
            self._forget_locks()
            raise
        if len(locks) == 1:
            self._forget_locks()  # the workers have it now, and keep it to their end
        self._listener = threading.Thread(target=self._listen, name="hydra_ext fleet", daemon=True)
        self._listener.start()
        if self._next(_START) is None:
            self.close()
            raise StateError(
                "the process that workers are forked from did not start within two minutes; what it has written to "
                "standard error says why"
            )

    def nodes(self) -> Sequence[Node]:
        return [self._node]

    def now(self) -> float:
        return time.monotonic()

    def start(self, orders: Sequence[Order], node: str, devices: Sequence[int]) -> None:
        order, described = orders[0], [each.describe() for each in orders]
        for each in orders:
            Path(each.folder).mkdir(parents=True, exist_ok=True)
            reader = None
            if each.task is Task.TRAIN:
                reader = ProgressReader(each.progress_file)
                reader.skip_to_end()
            self._gangs[each.gang] = _Gang(each, reader, process=order.gang)
        log = str(Path(order.folder) / "log.txt")
        for rank in range(len(order.devices)) if order.task is not Task.SEARCH else (0,):
            self._ask({"start": order.gang, "rank": rank, "orders": described, "log": log})

    def stop(self, gang: int) -> None:
        found = self._gangs.get(gang)
        if found is None:
            return
        if self._beside(found):
            found.order.stop_file.touch()  # a signal would reach them all
        else:
            self._ask({"signal": int(signal.SIGTERM), "gang": found.process})

    def kill(self, gang: int) -> None:
        if gang in self._gangs:
            process = self._gangs[gang].process
            for each in self._sharing(process):
                each.is_killed = True
            self._ask({"signal": int(signal.SIGKILL), "gang": process})

    def wait(self, seconds: float) -> Sequence[Event]:
        until = time.monotonic() + seconds
        while True:
            told = self._next(min(_LOOK, max(0.0, until - time.monotonic())))
            events = self._progress()
            while told is not None:
                events += self._ended(told)
                told = self._next(0)
            if events or time.monotonic() >= until:
                return events

    def close(self) -> None:
        if self._zygote.stdin is not None:
            with suppress(OSError):
                self._zygote.stdin.close()
        self._zygote.wait()
        self._listener.join()
        self._forget_locks()

    def unlock(self, lock: Path) -> None:
        """Gives one of several locks up before the workers end: what it guards is theirs no more."""
        if lock in self._locked:
            fcntl.flock(self._locked[lock], fcntl.LOCK_UN)  # for all processes that have inherited it
            os.close(self._locked.pop(lock))

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _forget_locks(self) -> None:
        """Closes this process's descriptors. Workers keep the locks, if there are some."""
        while self._locked:
            os.close(self._locked.popitem()[1])

    def _ask(self, asked: Mapping[str, Any]) -> None:
        stdin = self._zygote.stdin
        if stdin is None or self._zygote.poll() is not None:
            raise StateError("the process that workers are forked from has ended: call resume() on the fleet's folder")
        stdin.write(json.dumps(asked).encode() + b"\n")
        stdin.flush()

    def _listen(self) -> None:
        """Runs in a thread of its own: passes on what the zygote tells; None at its end."""
        stdout = self._zygote.stdout
        if stdout is not None:
            for line in stdout:
                self._told.put(json.loads(line))
            stdout.close()
        self._told.put(None)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        try:
            told = self._told.get(timeout=seconds) if seconds else self._told.get_nowait()
        except queue.Empty:
            return None
        if told is None and self._gangs:
            raise StateError("the process that workers are forked from was killed: call resume() on the fleet's folder")
        return told

    def _sharing(self, process: int) -> list[_Gang]:
        """The gangs in a process that have not ended."""
        return [gang for gang in self._gangs.values() if gang.process == process]

    def _beside(self, gang: _Gang) -> list[_Gang]:
        """The gangs that share its process, and have not left it."""
        return [each for each in self._sharing(gang.process) if each is not gang and not each.statuses]

    def _progress(self) -> list[Event]:
        return [event for gang in list(self._gangs.values()) for event in (*self._heard(gang), *self._left(gang))]

    def _heard(self, gang: _Gang) -> list[Event]:
        records = () if gang.reader is None else gang.reader.read()
        return [Progress(gang=gang.order.gang, record=record) for record in records]

    def _left(self, gang: _Gang) -> list[Event]:
        """The end of a gang that shares its process. That of the last one is the end of the process."""
        order = gang.order
        if order.task is not Task.TRAIN or gang.statuses or not order.result_file.exists():
            return []
        gang.statuses[0] = json.loads(order.result_file.read_text())
        return self._end(gang) if self._beside(gang) else []

    def _ended(self, told: Mapping[str, Any]) -> list[Event]:
        """The end of a rank; the first one that fails ends the others, which would wait for it."""
        process = told.get("ended", -1)
        events = [event for gang in self._sharing(process) for event in (*self._heard(gang), *self._left(gang))]
        for gang in self._sharing(process):
            gang.statuses.setdefault(told["rank"], told["status"])
            order = gang.order
            ranks = 1 if order.task is Task.SEARCH else len(order.devices)
            if told["status"] and len(gang.statuses) == 1 < ranks:
                self._ask({"signal": int(signal.SIGKILL), "gang": gang.process})
            if len(gang.statuses) == ranks:
                events += self._end(gang)
        return events

    def _end(self, gang: _Gang) -> list[Event]:
        order, heard = gang.order, self._heard(gang)
        del self._gangs[order.gang]
        for left in (order.stop_file, order.result_file) if order.task is Task.TRAIN else ():
            left.unlink(missing_ok=True)
        return [*heard, Ended(gang=order.gang, failure=failure_of(order, gang.statuses, is_killed=gang.is_killed))]


def _locked(path: Path) -> int:
    """A descriptor that locks a file; every process that inherits it holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + _LINGER
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() > until:
                os.close(descriptor)
                raise FleetInUse(
                    f"workers of a fleet in {path.parent} have not ended {_LINGER:g} s after it: end these processes, "
                    "and call resume() again"
                ) from error
        time.sleep(_LOOK)


def is_locked(path: Path) -> bool:
    """Whether workers live: those of a cluster with this lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask at once
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _environment() -> dict[str, str]:
    """Of the zygote: one thread, so that it may fork, and the folders where this process finds hydra_ext."""
    folders = os.pathsep.join(each for each in sys.path if each)
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": folders}


def failure_of(order: Order, statuses: Mapping[int, int], *, is_killed: bool) -> Failure | None:
    """Why a gang has failed; None if all its ranks have done what they were to do."""
    failed = {rank: status for rank, status in statuses.items() if status}
    if not failed:
        return None
    if is_killed:
        return Failure(message="the fleet has killed it", is_lost=True)
    rank, status = next(iter(failed.items()))  # the first that has ended: others may have failed for want of it
    if status > 0:
        with suppress(OSError, ValueError):
            told = json.loads(order.error_file(rank).read_text())
            order.error_file(rank).unlink()
            return Failure(**told)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    hint = " (perhaps by the system, for lack of host memory)" if status == -signal.SIGKILL else ""
    return Failure(message=f"rank {rank} {how}{hint}", is_lost=status < 0)
