"""The process that workers are forked from: it has imported torch and hydra_ext, and does nothing else.

A new worker takes milliseconds this way, where an import of torch takes seconds. It talks in JSON lines:

    -> {"start": 7, "rank": 0, "orders": [{...}], "log": "..."}   <- {"ended": 7, "rank": 0, "status": 0}
    -> {"signal": 15, "gang": 7}

When standard input ends, because the fleet's process has ended in whatever way, it kills all workers and ends. If it is
killed itself, the kernel kills the workers. It has one thread, as a process that forks should, and no CUDA context.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

# What workers need, so that they have it at once. torch's compiler is imported by each optimizer, and takes a second.
_PRELOADED = (
    "hydra_ext.fleet.cluster.worker",
    "hydra_ext.fleet.techniques.offloading",
    "hydra_ext.fleet.techniques.staged",
    "hydra_ext.runtime.saving.snapshot",
    "torch._dynamo",
)
_PR_SET_PDEATHSIG = 1
_CHUNK = 65536


class Zygote:
    """Forks workers as it is told, and tells when they have ended."""

    def __init__(self, asked: int, told: int) -> None:
        self._asked = asked
        self._told = told
        self._text = b""
        self._workers: dict[int, tuple[int, int]] = {}  # gang and rank, by process
        self._wake = (-1, -1)

    def run(self) -> None:
        woken, wake = self._wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._tell({"ready": os.getpid()})
        while True:
            ready, _, _ = select.select([self._asked, woken], [], [])
            if woken in ready:
                with suppress(BlockingIOError):
                    os.read(woken, _CHUNK)
                self._reap()
            if self._asked in ready and not self._listen():
                break
        for process in self._workers:
            _signal(process, signal.SIGKILL)

    def _listen(self) -> bool:
        """Does what was asked. Returns False at the end of the input."""
        read = os.read(self._asked, _CHUNK)
        self._text += read
        while b"\n" in self._text:
            line, _, self._text = self._text.partition(b"\n")
            asked = json.loads(line)
            if "start" in asked:
                self._start(asked)
            else:
                for process, (gang, _) in self._workers.items():
                    if gang == asked["gang"]:
                        _signal(process, asked["signal"])
        return bool(read)

    def _start(self, asked: Mapping[str, Any]) -> None:
        parent = os.getpid()
        # Until the worker handles it: it would end the worker, or be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        process = os.fork()
        if process == 0:
            _work(asked, parent, (self._asked, self._told, *self._wake))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self._workers[process] = asked["start"], asked["rank"]

    def _reap(self) -> None:
        while self._workers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # What the worker has started, such as loaders of data, while its number is still its own.
            _signal(ended.si_pid, signal.SIGKILL)
            process, status = os.waitpid(ended.si_pid, 0)
            gang, rank = self._workers.pop(process)
            self._tell({"ended": gang, "rank": rank, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, told: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the fleet has ended: the input ends, too
            os.write(self._told, json.dumps(told).encode() + b"\n")


def _signal(process: int, number: int) -> None:
    """To a worker and all that it has started: each worker leads a session of its own."""
    try:
        os.killpg(process, number)
    except ProcessLookupError:  # it does not lead its session yet
        with suppress(ProcessLookupError):
            os.kill(process, number)
    except PermissionError:  # all that is left has ended
        pass


def _work(asked: Mapping[str, Any], parent: int, inherited: tuple[int, ...]) -> NoReturn:
    """The life of a worker, after the fork."""
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for end in (1, 2):
            os.dup2(log, end)
        for end in (*inherited, log):
            os.close(end)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

        from hydra_ext.fleet.cluster import worker
        from hydra_ext.fleet.cluster.interface import Order

        status = worker.run([Order.of(each) for each in asked["orders"]], asked["rank"])
    finally:
        with suppress(BaseException):  # a closed stream
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # not the zygote's way out


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the fleet's
    # The pipes get descriptors of their own: what a library prints must not come between the lines.
    asked, told = os.dup(0), os.dup(1)
    # Workers hold the locks, and programs that they start do not.
    for locked in map(int, sys.argv[1:]):
        os.set_inheritable(locked, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for module in _PRELOADED:
        importlib.import_module(module)
    Zygote(asked, told).run()


if __name__ == "__main__":
    main()
