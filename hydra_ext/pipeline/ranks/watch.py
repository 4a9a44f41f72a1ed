"""Watches the ranks: all of them learn the first cause of a failure, and a rank that has stopped is found.

Each rank's watch is a thread with a connection of its own to torch.distributed's store. Twice a second, and when this
rank begins another action, it writes a sign of life there, with the rank's position in the schedule. Twice a second it
reads the other ranks' signs, and a failure that one of them has entered. Only the first failure is entered, so that all
ranks name the same cause. If a process ends, the ranks that talk to it notice at once, in
:mod:`hydra_ext.pipeline.ranks.links`.

Ranks meet in the store, too. Collectives of torch.distributed do not learn of failures: a rank would wait for ever for
one that has raised or died before. So ranks begin nothing together before all have met.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hydra_ext.errors import RankFailed

logger = logging.getLogger(__name__)

_PERIOD = 0.5  # seconds between two signs of life, at most
_PAUSE = 0.02  # seconds between two signs of life, at least
_WARN_AFTER = 5.0  # seconds without a sign of life
_LONG_MEETING = 30.0  # seconds after which a rank that waits names the ranks that it waits for
_SHORTEST_LOOK, _LONGEST_LOOK = 0.001, 0.05  # seconds between two looks for ranks that come to a meeting


@dataclass(frozen=True)
class Failure:
    """The first error, which has ended the pipeline.

    Attributes:
        rank: The rank that failed or did not answer.
        where: Its stage and microbatch, as far as they are known.
        what: The error's type and message, in one line.
    """

    rank: int
    where: str
    what: str

    def error(self) -> RankFailed:
        return RankFailed(
            f"rank {self.rank} has failed{' ' + self.where if self.where else ''}: {self.what}. The pipeline has ended "
            "on all ranks: start it again from the last checkpoint",
            rank=self.rank,
        )


@dataclass(frozen=True)
class _Sign:
    """The last sign of life of a rank, when it came, and whether its age was warned of."""

    text: str = ""
    since: float = 0.0
    warned: bool = False


class Watch:
    """This rank's watch, with a thread of its own.

    Args:
        world: Number of ranks.
        name: The pipeline's name in the store, the same on all ranks.
        patience: Seconds without a sign of life after which a rank has failed.
        describe: Describes this rank's position in the schedule. Any thread may call it.

    Attributes:
        failure: The first failure; None until a rank has failed.
        told: Whether the user of this rank has got an error that ends the pipeline.
        changed: Condition that is notified when a message arrives, or a reduction or send ends, or a rank has failed.
        rank: This rank.
        at_failure: Called when the first failure is known, by the thread that learns of it. They must neither raise nor
            wait for other ranks.
    """

    def __init__(self, rank: int, world: int, name: str, *, patience: float, describe: Callable[[], str]) -> None:
        self.failure: Failure | None = None
        self.told = False
        self.changed = threading.Condition()
        self.rank = rank
        self.patience = patience
        self._world = world
        self._describe = describe
        self._ended = threading.Event()
        self._moved = threading.Event()
        self.at_failure: list[Callable[[], None]] = []
        self._seen: dict[int, _Sign] = {}
        self._store: Any = None
        if world > 1:
            # A connection of its own: other users of the store may occupy theirs while they wait.
            store = dist.distributed_c10d.PrefixStore
            self._store = store(f"hydra_ext/{name}", dist.group.WORLD.get_group_store().clone())  # type: ignore[union-attr]
            self._store.set_timeout(timedelta(seconds=patience))
            self._thread = threading.Thread(target=self._run, name="hydra_ext watch", daemon=True)
            self._thread.start()

    def fail(self, failure: Failure) -> Failure:
        """Enters a failure, unless another rank was first. Returns the first failure; never raises."""
        first = failure
        if self._store is not None and self.failure is None:
            try:
                text = json.dumps([failure.rank, failure.where, failure.what])
                first = _parse(self._store.compare_set("failure", "", text)) or failure
            except RuntimeError as error:
                logger.warning("the other ranks could not be told of a failure: %s", error)
        with self.changed:
            actions = [] if self.failure is not None else list(self.at_failure)
            self.failure = known = self.failure or first
            self.changed.notify_all()
        for action in actions:
            action()
        return known

    def fail_with(self, error: BaseException) -> None:
        """Enters an error of this rank, unless it only reports another rank's failure."""
        if not (isinstance(error, RankFailed) and self.failure is not None):
            self.fail(Failure(self.rank, self._describe(), describe_error(error)))

    def check(self) -> None:
        """
        Raises:
            RankFailed: A rank has failed.
        """
        if self.failure is not None:
            self.told = True
            raise self.failure.error()

    def moved(self) -> None:
        """Lets the watch's thread write this rank's new position soon."""
        self._moved.set()

    def last_seen(self, rank: int) -> str:
        """The position of a rank's last sign of life."""
        sign = self._seen.get(rank, _Sign()).text
        key = f"alive/{rank}"
        with suppress(RuntimeError):  # the sign that was seen before is the best known one
            if self._store.check([key]):  # get() would wait for a missing sign, and delay this rank's own signs
                sign = self._store.get(key).decode()
        return sign.partition(" ")[2]

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Waits until ``ready`` returns true. The thread that makes it true has to notify ``changed``.

        Raises:
            RankFailed: A rank has failed, and ``ready`` returns false.
        """
        with self.changed:
            while not ready():
                self.check()
                self.changed.wait(1.0)

    def wait_for_cause(self) -> None:
        """Waits for a failure after an error of the transport.

        Most likely a rank has ended, and the watches notice its silence a little later.

        Raises:
            RankFailed: A rank has failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None, self.patience + _WARN_AFTER)
        self.check()

    def meet(self, where: str, says: Any = None, *, only_first_hears: bool = False) -> list[Any]:
        """Waits for all ranks, and returns what each of them says, by rank.

        There is no timeout for a rank that lives.

        Args:
            where: The meeting's name. Each meeting of a pipeline has another one.
            says: A value for the other ranks, which JSON can hold.
            only_first_hears: Whether only the first rank gets the values. The others get an empty list, which saves
                requests to the store.

        Raises:
            RankFailed: A rank has failed, or has ended its pipeline and will not come.
        """
        if self._store is None:
            return [says]
        keys = [f"met {where}/{rank}" for rank in range(self._world)]
        try:
            self._store.set(keys[self.rank], json.dumps(says))
            self._wait_for_all(keys, where)
            if only_first_hears and self.rank != 0:
                return []
            return [json.loads(word) for word in self._store.multi_get(keys)]
        except RankFailed:
            raise
        except RuntimeError as error:
            raise self._store_failed(error).error() from error

    def forget(self, where: str) -> None:
        """Deletes this rank's value of a meeting that all ranks have left from the store."""
        if self._store is not None:
            with suppress(RuntimeError):  # the next meeting finds a store that does not answer
                self._store.delete_key(f"met {where}/{self.rank}")

    def part(self) -> None:
        """Holds the last meeting and ends this watch. Afterwards no rank needs another one, and each may end.

        Raises:
            RankFailed: As at any meeting.
        """
        self.meet("at the end")
        if self._store is not None:
            # The store may be in the first rank's process, which waits until the others have seen that all have come.
            with suppress(RuntimeError):
                self._store.set(f"parted/{self.rank}", "")
                if self.rank == 0:
                    self._wait_for_all([f"parted/{rank}" for rank in range(self._world)], "at the end")
        self.end()

    def end(self) -> None:
        """Ends the thread: it neither writes signs of life nor looks for the others' from now on."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._moved.set()
        if self._store is not None and threading.current_thread() is not self._thread:
            with suppress(RuntimeError):  # the process that holds the store may have ended already
                self._store.set(f"alive/{self.rank}", "ended")
            self._thread.join(timeout=self.patience)

    def _run(self) -> None:
        count = 0
        next_look = 0.0
        while not self._ended.is_set() and self.failure is None:
            try:
                self._store.set(f"alive/{self.rank}", f"{count} {self._describe()}")
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _PERIOD
                    self._look()
            except RuntimeError as error:
                if not self._ended.is_set():
                    self._store_failed(error)
                return
            count += 1
            self._ended.wait(_PAUSE)
            self._moved.wait(_PERIOD)
            self._moved.clear()

    def _store_failed(self, error: BaseException) -> Failure:
        return self.fail(Failure(0, "", f"the store of torch.distributed does not answer: {_short(error)}"))

    def _wait_for_all(self, keys: Sequence[str], where: str) -> None:
        """Waits until the store has all keys, of which each rank sets one."""
        start = time.monotonic()
        next_look, warn_at, pause = start, start + _LONG_MEETING, _SHORTEST_LOOK
        while not self._store.check(keys):
            self.check()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _PERIOD
                missing = self._missing(keys, where)
                if missing and now >= warn_at:
                    warn_at = float("inf")
                    logger.warning("waiting %s for rank %s since %.0f s", where, ", ".join(missing), now - start)
            with self.changed:
                self.changed.wait(pause)
            pause = min(2 * pause, _LONGEST_LOOK)

    def _missing(self, keys: Sequence[str], where: str) -> list[str]:
        """The ranks that have not come yet, with their positions.

        Raises:
            RankFailed: One of them has ended its pipeline.
        """
        ended = {rank for rank in range(self._world) if self._seen.get(rank, _Sign()).text == "ended"}
        # Checked after the signs were read: a rank sets its key before its last sign, so one that is missing here and
        # has ended will not come.
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        for rank in ended.intersection(missing):
            self.fail(Failure(rank, "", f"it has ended its pipeline, and this rank waits for it {where}"))
            self.check()
        return [f"{rank} ({self._seen.get(rank, _Sign()).text.partition(' ')[2]})" for rank in missing]

    def _look(self) -> None:
        if self._store.check(["failure"]):
            failure = _parse(self._store.get("failure"))
            if failure is not None:
                self.fail(failure)
            return
        now = time.monotonic()
        others = [rank for rank in range(self._world) if rank != self.rank]
        keys = [f"alive/{rank}" for rank in others if self._store.check([f"alive/{rank}"])]
        signs = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        for rank in others:
            sign = signs.get(f"alive/{rank}", b"").decode()
            if self._seen.get(rank, _Sign()).text != sign or rank not in self._seen:
                self._seen[rank] = _Sign(sign, now)
            elif sign != "ended":
                self._silent(rank, sign, now - self._seen[rank].since)

    def _silent(self, rank: int, sign: str, seconds: float) -> None:
        where = sign.partition(" ")[2]
        if seconds > self.patience:
            self.fail(
                Failure(
                    rank,
                    f"(last seen {where})",
                    f"it has given no sign of life for {seconds:.0f} s: it was stopped, or hangs",
                )
            )
        elif seconds > _WARN_AFTER and not self._seen[rank].warned:
            self._seen[rank] = replace(self._seen[rank], warned=True)
            logger.warning("rank %d has given no sign of life for %.0f s; it was last seen %s", rank, seconds, where)


def _parse(text: bytes) -> Failure | None:
    if not text:
        return None
    rank, where, what = json.loads(text)
    return Failure(rank, where, what)


def _short(error: BaseException) -> str:
    text = str(error).partition(". This is typically")[0]  # the transport's advice does not help here
    text = re.sub(r"^\[\S+:\d+\] ", "", text)  # the transport's source file
    return text.splitlines()[0] if text else type(error).__name__


def describe_error(error: BaseException) -> str:
    """An error's type and message in one line, for the other ranks."""
    text = _short(error)
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"
