"""Workers in processes of their own: whatever becomes of one, the process that trains goes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction, spawn
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch

from hydra_ext import _C
from hydra_ext.data.workers import contents, server
from hydra_ext.data.workers.pool import Made, Task
from hydra_ext.data.workers.protocol import Ask, Done, Failed, Hello, Load, Prepare, Room, Start, Take
from hydra_ext.errors import InvalidStage, SampleTooLarge, StageFailed, StateError, WorkersDied

_MAIN = (  # Ctrl-C is the training's, also while this imports
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from hydra_ext.data.workers import server; server.main()"
)
_IN_MEMORY = 2**20  # bytes of a function
_LIVES = 3  # workers that one sample may cost
_STARTS = 20  # workers that may die one after the other before they take anything
_LOOK = 0.002  # seconds between looks for room


class _Server:
    """The process that workers are forked from, and the connection to it."""

    def __init__(self, region: _C.SharedRegion) -> None:
        if server.is_here():
            raise StateError(
                "the program's main module begins a pipeline while workers import it: put what it runs under "
                "if __name__ == '__main__':, or what workers need into another module"
            )
        ours, theirs = socket.socketpair()
        given = [theirs.fileno(), region.descriptor]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, *map(str, given), str(region.most)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
            )
        self.connection = Connection(ours.detach())
        data = {key: value for key, value in spawn.get_preparation_data("hydra_ext worker").items() if key != "authkey"}
        main = {key: data.pop(key) for key in list(data) if key.startswith("init_main")}
        self.connection.send(Prepare(data, main, torch.get_default_dtype()))

    def end(self) -> None:
        self.connection.close()
        self.process.kill()  # the kernel ends the workers
        self.process.wait()


@dataclass(frozen=True)
class _Function:
    """A stage's function, pickled, for the servers to come. A large one, which may have a dataset, is kept on disk."""

    stage: int
    data: tempfile.SpooledTemporaryFile[bytes]
    needs_main: bool

    def load(self) -> Load:
        self.data.seek(0)
        return Load(self.stage, self.data.read(), self.needs_main)


class _Servers:
    """The server that runs now, if any. A new one takes its place if it has died. A forked child leaves it alone."""

    def __init__(self, region: _C.SharedRegion) -> None:
        self._region = region
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._functions: list[_Function] = []
        self._server: _Server | None = None
        self._connections = weakref.WeakSet[Connection]()  # of workers
        self._is_closed = False

    def load(self, function: bytes) -> int:
        """Returns the number of the stage."""
        data = tempfile.SpooledTemporaryFile[bytes](_IN_MEMORY)
        data.write(function)
        needs_main = b"__main__" in function or b"__mp_main__" in function
        with self._lock:
            kept = _Function(len(self._functions), data, needs_main)
            self._functions.append(kept)
            if self._server is not None:
                with suppress(OSError):  # one that has died is replaced when a worker is to start
                    self._server.connection.send(kept.load())
            return kept.stage

    def start(self, stage: int) -> Connection:
        """The connection of a new worker. Raises StateError once closed."""
        with self._lock:
            try:
                return self._start(stage)
            except ConnectionError:  # it has died
                self._end()
                return self._start(stage)

    def _start(self, stage: int) -> Connection:
        if self._is_closed:
            raise StateError("the workers of this pipeline have been closed")
        if self._server is None:
            self._server = _Server(self._region)
            for each in self._functions:
                self._server.connection.send(each.load())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._server.connection.send(Start(stage))
            reduction.send_handle(self._server.connection, theirs.fileno(), self._server.process.pid)
            connection = Connection(ours.detach())
        self._connections.add(connection)
        return connection

    def process(self) -> int | None:
        with self._lock:
            return None if self._server is None else self._server.process.pid

    def _end(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None

    def close(self) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_closed = True
            self._end()
            for function in self._functions:
                function.data.close()
            for connection in list(self._connections):
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ended:
                    ended.shutdown(socket.SHUT_RDWR)  # a child of a worker may have it, too, and live on


class Workshop:
    """Where a pipeline's worker processes come from, and the memory that they share with this process.

    Args:
        memory: Most bytes of shared memory.
    """

    def __init__(self, memory: int) -> None:
        self.region = _C.SharedRegion(memory)
        self._address = self.region.address
        self._servers = _Servers(self.region)
        self._lock = threading.Lock()  # what is free is looked at and taken in one piece
        self.largest = 0  # bytes of one result
        self.workers: dict[int, str] = {}  # stage by process
        self.inline = 0  # results that found no room, and travelled by themselves
        self.deaths = 0  # workers that died
        self.close = weakref.finalize(self, self._servers.close)  # ends all processes; results that were taken stay

    def load(self, name: str, function: Callable[[Any], Any]) -> int:
        """Makes a function ready for workers. Returns the number of its stage.

        Raises:
            InvalidStage: The function cannot be sent to another process.
        """
        try:
            data = contents.whole(function)
        except Exception as error:
            raise InvalidStage(
                f"stage {name!r}: its function cannot be sent to workers: {error}: give a function at the top of a "
                "module, or functools.partial of one, or method='thread'"
            ) from error
        return self._servers.load(data)

    def start(self, stage: int) -> Connection:
        """A worker's connection."""
        return self._servers.start(stage)

    @property
    def processes(self) -> list[int]:
        """The server and its workers."""
        first = self._servers.process()
        return [*([] if first is None else [first]), *self.workers]

    def room(self, name: str, nbytes: int, is_next: Callable[[], bool]) -> _C.SharedBlock | None:
        """Room for a result, or None if it has to travel by itself.

        The next result to be given gets what there is, and never waits. Others leave room for it, and for the one
        before it, which the consumer may use.

        Raises:
            SampleTooLarge: There will never be room for it.
        """
        most = self.region.most
        if nbytes > most:
            raise SampleTooLarge(
                f"stage {name!r} has made a sample of {nbytes} bytes, and workers share {most} bytes with this "
                "process: give a larger memory=, or make smaller samples",
                stage=name,
                needed=nbytes,
                limit=most,
            )
        while True:
            first = is_next()
            with self._lock:
                self.largest = max(self.largest, nbytes)
                if first or self.region.used + nbytes + 2 * self.largest <= self.region.limit:
                    block = self.region.allocate(nbytes)
                    if block is not None or first:
                        self.inline += block is None
                        return block
            time.sleep(_LOOK)

    def placed(self, buffers: Sequence[memoryview]) -> list[tuple[int, int]] | None:
        """Where buffers lie in the region; None if one does not."""
        found = []
        for buffer in buffers:
            begin = numpy.frombuffer(buffer, numpy.uint8).__array_interface__["data"][0] - self._address
            if not 0 <= begin <= self.region.most - buffer.nbytes:
                return None
            found.append((begin, buffer.nbytes))
        return found


class ProcessWorker:
    """One worker process. A new one takes its place if it dies."""

    def __init__(self, workshop: Workshop, name: str, stage: int) -> None:
        self._workshop = workshop
        self._name = name
        self._stage = stage
        self._connection: Connection | None = None
        self._process = 0

    def call(self, task: Task, is_next: Callable[[], bool]) -> Made:
        """
        Raises:
            StageFailed: The function has raised.
            WorkersDied: Several workers have died of this item.
            SampleTooLarge: Its result will never have room.
            InvalidStage: A worker cannot load the function, or the item cannot be sent to it.
        """
        for _ in range(_LIVES):
            connection = self._started()
            try:
                return self._call(connection, task, is_next)
            except (EOFError, ConnectionError):
                self._died()
        raise WorkersDied(
            f"stage {self._name!r}, sample {task.number}: {_LIVES} workers have died of it, perhaps ended by the "
            "system for lack of memory",
            stage=self._name,
            number=task.number,
        )

    def _died(self) -> None:
        self._workshop.deaths += 1
        self.close()

    def _started(self) -> Connection:
        for _ in range(_STARTS):
            try:
                return self._start()
            except (EOFError, ConnectionError):
                self._died()
        raise InvalidStage(f"stage {self._name!r}: {_STARTS} workers, one after the other, have died before they began")

    def _start(self) -> Connection:
        if self._connection is None:
            self._connection = self._workshop.start(self._stage)
            hello: Hello = self._connection.recv()
            self._process = hello.process
            self._workshop.workers[hello.process] = self._name
            if hello.broken:
                self.close()
                raise InvalidStage(
                    f"stage {self._name!r}: workers cannot load its function: {hello.broken.strip().splitlines()[-1]}: "
                    f"give one that another process can import\n\nIn the worker:\n{hello.broken}"
                )
        return self._connection

    def _call(self, connection: Connection, task: Task, is_next: Callable[[], bool]) -> Made:
        begun, waited = time.perf_counter(), 0.0
        data, where = self._sent(task)
        connection.send(Take(task.place, data, where))
        answer: Ask | Done | Failed = connection.recv()
        block, sizes = None, list[int]()
        if isinstance(answer, Ask):
            sizes = list(answer.sizes)
            asked = time.perf_counter()
            try:
                block = self._workshop.room(self._name, contents.offsets(sizes)[1], is_next)
            except BaseException:  # re-raised
                connection.send(Room(is_refused=True))
                raise
            waited = time.perf_counter() - asked
            connection.send(Room(None if block is None else block.begin))
            answer = connection.recv()
        if isinstance(answer, Done):
            value, nbytes = self._made(answer, task, block, sizes)
            return Made(value, time.perf_counter() - begun - waited, nbytes)
        if isinstance(answer, Failed):
            raise self._failure(answer, task)
        raise StateError(f"stage {self._name!r}: internal error: a worker answered with {type(answer).__name__}")

    def _made(self, done: Done, task: Task, block: _C.SharedBlock | None, sizes: Sequence[int]) -> tuple[Any, int]:
        """What was made, and its bytes."""
        buffers, nbytes = list[memoryview](), len(done.data)
        if block is not None:
            memory = memoryview(block)  # type: ignore[arg-type]  # typing knows buffers of C++ from Python 3.12 on
            begins = contents.offsets(sizes)[0]
            buffers = [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            nbytes += memory.nbytes
        try:
            return contents.loaded(done.data, buffers), nbytes
        except Exception as error:
            raise StageFailed(
                f"stage {self._name!r}, sample {task.number}: what its function has made cannot be taken over from "
                f"the worker: {type(error).__name__}: {error}: let it give something that can be pickled",
                stage=self._name,
                number=task.number,
            ) from error

    def _sent(self, task: Task) -> tuple[bytes, list[tuple[int, int]]]:
        try:
            data, buffers = contents.dumped(task.item)
            where = self._workshop.placed(buffers)
            return (contents.whole(task.item), []) if where is None else (data, where)
        except Exception as error:
            raise InvalidStage(
                f"stage {self._name!r}, sample {task.number}: its item cannot be sent to workers: {error}: let the "
                "stage before give something else, or take method='thread'"
            ) from error

    def _failure(self, failed: Failed, task: Task) -> StageFailed:
        error = StageFailed(
            f"stage {self._name!r}, sample {task.number}: {failed.message}\n\nIn the worker:\n{failed.trace}",
            stage=self._name,
            number=task.number,
        )
        if failed.error:
            error.__cause__ = contents.loaded(failed.error)
        return error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._workshop.workers.pop(self._process, None)
