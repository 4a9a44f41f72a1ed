"""Keeps an eye on the ranks: the first cause of a failure reaches all of them, a rank that has stopped is found.

Each rank's watch is a thread with a connection of its own to torch.distributed's store. Twice a second, and when this
rank is somewhere else, it tells there that this rank lives, and where it is; it looks for the others' signs and for a
failure that one of them has entered. Only the first failure is entered, so that all ranks name the same cause. A
process that ends is noticed by the ranks that talk to it, at once, by :mod:`hydra_ext.pipeline.ranks.links`.

Ranks meet there too. Collectives of torch.distributed hear of no failure: a rank that waits in one for
a rank that raised, or died, before it, waits in vain. So nothing is begun together before all have met.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hydra_ext.errors import RankFailed

logger = logging.getLogger(__name__)

_PERIOD = 0.5  # seconds between two signs of life, at most
_PAUSE = 0.02  # and at least
_WARN_AFTER = 5.0  # seconds without a sign of life
_LONG_MEETING = 30.0  # seconds, after which a rank that waits says for which
_SHORTEST_LOOK, _LONGEST_LOOK = 0.001, 0.05  # seconds between two looks for ranks that come to a meeting


@dataclass(frozen=True)
class Failure:
    """What ended the pipeline first.

    Attributes:
        rank: where it happened, or the one that did not answer.
        where: stage and microbatch, as far as they are known.
        what: the error's type and message.
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


class Watch:
    """This rank's watch.

    Args:
        patience: a rank that gives no sign of life for so many seconds has failed.
        describe: where this rank is; called from any thread.

    Attributes:
        failure: None until something has failed somewhere.
        told: the user of this rank has got an error that ends the pipeline.
        changed: notified when something arrives, and when something has failed.
        rank: this one.
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
        self._seen: dict[int, tuple[str, float]] = {}
        self._warned: set[int] = set()
        self._store: Any = None
        if world > 1:
            # A connection of its own: a store's other users may hold theirs for as long as they wait.
            store = dist.distributed_c10d.PrefixStore
            self._store = store(f"hydra_ext/{name}", dist.group.WORLD.get_group_store().clone())  # type: ignore[union-attr]
            self._store.set_timeout(timedelta(seconds=patience))
            self._thread = threading.Thread(target=self._run, name="hydra_ext watch", daemon=True)
            self._thread.start()

    def fail(self, failure: Failure) -> Failure:
        """Enters a failure, unless another rank was first; returns the one that counts. Never raises."""
        first = failure
        if self._store is not None and self.failure is None:
            try:
                text = json.dumps([failure.rank, failure.where, failure.what])
                first = _parse(self._store.compare_set("failure", "", text)) or failure
            except RuntimeError as error:
                logger.warning("the other ranks could not be told of a failure: %s", error)
        with self.changed:
            if self.failure is None:
                self.failure = first
            self.changed.notify_all()
            return self.failure

    def fail_with(self, error: BaseException) -> None:
        """Enters an error of this rank's, unless it is another rank's failure that has come here."""
        if not (isinstance(error, RankFailed) and self.failure is not None):
            self.fail(Failure(self.rank, self._describe(), describe_error(error)))

    def check(self) -> None:
        """
        Raises:
            RankFailed: a rank has failed.
        """
        if self.failure is not None:
            self.told = True
            raise self.failure.error()

    def moved(self) -> None:
        """This rank is somewhere else now."""
        self._moved.set()

    def last_seen(self, rank: int) -> str:
        """Where a rank was when it last gave a sign of life."""
        sign = self._seen.get(rank, ("", 0.0))[0]
        key = f"alive/{rank}"
        with suppress(RuntimeError):  # what was seen before has to do
            if self._store.check([key]):  # get() would wait for one that never came, and this rank's own signs with it
                sign = self._store.get(key).decode()
        return sign.partition(" ")[2]

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Until it is so. ``changed`` has to be notified then.

        Raises:
            RankFailed: a rank has failed, and it is not so.
        """
        with self.changed:
            while not ready():
                self.check()
                self.changed.wait(1.0)

    def wait_for_cause(self) -> None:
        """After an error of the transport's: most likely a rank has ended, and its silence is noticed a little later.

        Raises:
            RankFailed: so it is.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None, self.patience + _WARN_AFTER)
        self.check()

    def meet(self, where: str, says: Any = None, *, only_first_hears: bool = False) -> list[Any]:
        """Returns when all ranks have come, with what each of them says, by rank: something that JSON can hold.

        A rank that lives is waited for, whatever it does.

        Args:
            where: of each of a pipeline's meetings another text.
            only_first_hears: the others get an empty list, and the store is not asked so often.

        Raises:
            RankFailed: a rank has failed, or has ended its pipeline and will not come.
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
        """The store lets go of what this rank said at a meeting that all ranks have left."""
        if self._store is not None:
            with suppress(RuntimeError):  # one that does not answer is found by the next meeting
                self._store.delete_key(f"met {where}/{self.rank}")

    def part(self) -> None:
        """The last meeting, and the end of this watch: no rank needs the others any more, which may end as they like.

        Raises:
            RankFailed: as at any meeting.
        """
        self.meet("at the end")
        if self._store is not None:
            # The store may be in the first rank's process, which stays until the others have seen that all are here.
            with suppress(RuntimeError):
                self._store.set(f"parted/{self.rank}", "")
                if self.rank == 0:
                    self._wait_for_all([f"parted/{rank}" for rank in range(self._world)], "at the end")
        self.end()

    def end(self) -> None:
        """No signs are given, and none looked for, from now on."""
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
        """Until the store has a rank's key of each rank."""
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
        """Which rank has not come yet, and where it is."""
        ended = {rank for rank in range(self._world) if self._seen.get(rank, ("", 0.0))[0] == "ended"}
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]  # after its last sign
        for rank in ended.intersection(missing):
            self.fail(Failure(rank, "", f"it has ended its pipeline, and this rank waits for it {where}"))
            self.check()
        return [f"{rank} ({self._seen.get(rank, ('', 0.0))[0].partition(' ')[2]})" for rank in missing]

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
            if self._seen.get(rank, ("", 0.0))[0] != sign or rank not in self._seen:
                self._seen[rank] = (sign, now)
                self._warned.discard(rank)
            elif sign != "ended":
                self._silent(rank, sign, now - self._seen[rank][1])

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
        elif seconds > _WARN_AFTER and rank not in self._warned:
            self._warned.add(rank)
            logger.warning("rank %d has given no sign of life for %.0f s; it was last seen %s", rank, seconds, where)


def _parse(text: bytes) -> Failure | None:
    if not text:
        return None
    rank, where, what = json.loads(text)
    return Failure(rank, where, what)


def _short(error: BaseException) -> str:
    text = str(error).partition(". This is typically")[0]  # advice of the transport's that does not help here
    text = re.sub(r"^\[\S+:\d+\] ", "", text)  # its source file
    return text.splitlines()[0] if text else type(error).__name__


def describe_error(error: BaseException) -> str:
    """One line for the others."""
    text = _short(error)
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"
