"""The process that workers are forked from. It has imported torch and loaded the stages' functions, and has one thread.

A new worker takes milliseconds, and shares what the functions hold, such as a dataset, with all others. No process with
threads or a CUDA context is ever forked. When the process that trains ends, in whatever way, this one ends too, and the
kernel ends the workers.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import reduction, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from hydra_ext.data import places
from hydra_ext.data.workers import contents
from hydra_ext.data.workers.protocol import Ask, Done, Failed, Hello, Load, Prepare, Room, Start, Take

_PR_SET_PDEATHSIG = 1

_is_here = False


class Server:
    """
    Args:
        connection: To the process that trains.
        region: Descriptor of the shared memory.
        region_bytes: Its size.
    """

    def __init__(self, connection: Connection, region: int, region_bytes: int) -> None:
        self._connection = connection
        self._region = region
        self._region_bytes = region_bytes
        self._functions: dict[int, Any] = {}
        self._broken: dict[int, str] = {}  # why a function could not be loaded
        self._main: Mapping[str, Any] = {}  # where the program's main module is, until it is imported
        self._main_error = ""

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers; connections tell that they ended
        while True:
            try:
                asked = self._connection.recv()
            except (EOFError, OSError):
                return
            if isinstance(asked, Prepare):
                spawn.prepare(dict(asked.process))
                self._main = asked.main
                torch.set_default_dtype(asked.dtype)
            elif isinstance(asked, Load):
                self._load(asked)
            elif isinstance(asked, Start):
                self._start(asked)

    def _load(self, asked: Load) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # programs that it runs while it is loaded have their results
        if asked.needs_main and self._main:
            self._import_main()
        try:
            self._functions[asked.stage] = contents.loaded(asked.function)
        except BaseException:  # noqa: BLE001 - told by every worker of the stage
            self._broken[asked.stage] = self._main_error or traceback.format_exc()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # the collector of a worker does not write to what is shared

    def _import_main(self) -> None:
        main, self._main = self._main, {}
        try:
            spawn.prepare(dict(main))
        except BaseException:  # noqa: BLE001 - told where a function cannot be loaded for it
            self._main_error = traceback.format_exc()

    def _start(self, asked: Start) -> None:
        handle = reduction.recv_handle(self._connection)
        parent = os.getpid()
        if os.fork() == 0:
            self._work(asked.stage, handle, parent)
        os.close(handle)

    def _work(self, stage: int, handle: int, parent: int) -> NoReturn:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._connection.close()
                with suppress(OSError):  # where memory is short, the system ends a worker and not the training
                    Path("/proc/self/oom_score_adj").write_text("500")
                region = mmap.mmap(self._region, self._region_bytes)
                os.close(self._region)
                work(Connection(handle), memoryview(region), self._functions.get(stage), self._broken.get(stage, ""))
        except (EOFError, OSError):  # the process that trains has closed the connection
            pass
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)  # not the server's way out


def work(connection: Connection, region: memoryview, function: Any, broken: str) -> None:
    """The life of a worker: takes items, and gives what the function makes of them."""
    connection.send(Hello(os.getpid(), broken))
    while True:
        task: Take = connection.recv()
        try:
            # Its own copy: what it keeps is not written over, and what it changes is new again when it is tried again.
            own = [bytearray(region[begin : begin + size]) for begin, size in task.buffers]
            item = contents.loaded(task.item, own)
            del own
            with places.at(task.place, seeded=True):
                made = function(item)
            data, buffers = contents.dumped(made)
        except BaseException as error:  # noqa: BLE001 - raised in the process that trains
            connection.send(_failed(error))
            continue
        if buffers:
            connection.send(Ask([buffer.nbytes for buffer in buffers]))
            room: Room = connection.recv()
            if room.is_refused:
                continue
            if room.begin is None:  # the bytes travel with the rest
                data, buffers = contents.whole(made), []
            for buffer, offset in zip(buffers, contents.offsets([each.nbytes for each in buffers])[0], strict=True):
                begin = (room.begin or 0) + offset
                region[begin : begin + buffer.nbytes] = buffer
        connection.send(Done(data))
        del item, made, data, buffers


def _failed(error: BaseException) -> Failed:
    trace = traceback.format_exc()
    try:
        data = contents.whole(error)
        contents.loaded(data)
    except BaseException:  # noqa: BLE001 - its text is told instead
        data = b""
    return Failed(f"{type(error).__name__}: {error}", trace, data)


def is_here() -> bool:
    """Whether this process is a server."""
    return _is_here


def main() -> None:
    global _is_here
    _is_here = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training's
    torch.set_num_threads(1)  # threads do not survive a fork
    connection, region, region_bytes = map(int, sys.argv[1:])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Server(Connection(connection), region, region_bytes).run()
