"""Finds the newest checkpoint in a folder that another process may be saving into, and opens the files to be read.

A saver removes older checkpoints. A checkpoint whose files are open can still be read to its end. If it is removed
before its files are open, a newer one exists, and is taken instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path

from hydra_ext.checkpoint.folder import Folder, newest_first, perhaps_newer, read_manifest
from hydra_ext.checkpoint.format import checksum
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.files import Files, closing
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.errors import CheckpointError, CheckpointRemoved

logger = logging.getLogger(__name__)

ATTEMPTS = 10  # attempts to open a checkpoint before it is removed
SELF = "."  # name of the checkpoint if the folder is itself one

Everywhere = Callable[[Callable[[], str]], list[str]]
"""Runs a function on every rank, and returns each rank's result. The function must not communicate."""


def alone(work: Callable[[], str]) -> list[str]:
    """:data:`Everywhere` for a single rank."""
    return [work()]


@contextmanager
def newest(
    path: Path,
    files: Files,
    hold: Callable[[Reader], None],
    *,
    strict: bool = True,
    everywhere: Everywhere = alone,
    before_holding: Callable[[], None] = lambda: None,
    rank: int = 0,
) -> Iterator[Reader | None]:
    """Opens the newest checkpoint in a folder, or the folder itself if it is a checkpoint; None if there is none.

    Args:
        hold: Opens the files to be read. Called again if another checkpoint has to be taken.
        strict: Whether a damaged newest checkpoint is an error. If not, the newest one that is whole in every byte is
            taken.
        everywhere: Runs a function on all ranks, which have to call this together. They take the first rank's choice.
        before_holding: Called on all ranks before ``hold``; they may communicate in it.

    Raises:
        CheckpointError: The newest checkpoint is damaged, or without ``strict`` all are. Or the ranks see different
            checkpoints. Or each checkpoint was removed before it was open.
    """
    with ExitStack() as stack:
        yield _Search(path, files, hold, strict, everywhere, before_holding, rank).run(stack)


class _Outcome(Enum):
    TAKEN = "the files to be read are open on all ranks"
    DAMAGED = "the first rank has found a byte that is not as it was written"
    DIFFERENT = "the checkpoint is not the same on all ranks"
    REMOVED = "the checkpoint was removed before its files were open"


class _Search:
    def __init__(
        self,
        path: Path,
        files: Files,
        hold: Callable[[Reader], None],
        strict: bool,
        everywhere: Everywhere,
        before_holding: Callable[[], None],
        rank: int,
    ) -> None:
        self._path = path
        self._files = files
        self._hold = hold
        self._strict = strict
        self._everywhere = everywhere
        self._before_holding = before_holding
        self._first = rank == 0
        # Damaged checkpoints by name and serial number, as a name can be used again.
        self._passed_by: dict[tuple[str, int], CheckpointError] = {}
        self._unreadable: list[CheckpointError] = []  # faults of manifests that may be newer

    def run(self, stack: ExitStack) -> Reader | None:
        attempts = 0
        while True:
            name = self._everywhere(self._name if self._first else str)[0]
            if not name:
                return None
            with ExitStack() as attempt:
                outcome, reader = self._try(name, attempt)
                if outcome is _Outcome.TAKEN:
                    stack.enter_context(attempt.pop_all())
                    return reader
            attempts += outcome is not _Outcome.DAMAGED
            if name == SELF or attempts == ATTEMPTS:
                break
        path = self._path / name
        if outcome is _Outcome.DIFFERENT:
            raise CheckpointError(f"{path} is not the same on all ranks: give a shared folder", file=self._path)
        raise CheckpointRemoved(path)

    def _name(self) -> str:
        """The name of the newest checkpoint that was not passed by; empty if there is none."""
        with readable(self._path), ExitStack() as stack:
            try:
                descriptor = stack.enter_context(closing(self._files, self._files.open_folder(self._path)))
            except FileNotFoundError:
                return ""
            if manifests.NAME in self._files.names(descriptor):
                return SELF
            found = Folder(self._path, self._files, descriptor).scan_beside_saves()
        self._unreadable = [each.error for each in perhaps_newer(found) if each.error is not None]
        damaged = [*self._unreadable, *self._passed_by.values()]
        if damaged and self._strict:
            raise damaged[0]
        for each in newest_first(found):
            if each.manifest is not None and (each.name, each.manifest.serial) not in self._passed_by:
                return each.name
        if damaged:
            raise damaged[0]
        return ""

    def _try(self, name: str, attempt: ExitStack) -> tuple[_Outcome, Reader | None]:
        readers: list[Reader] = []

        def identity() -> str:
            readers.append(attempt.enter_context(opened(self._path, name, self._files)))
            if not self._strict:  # reading every byte takes long, and the checkpoint may be removed meanwhile
                readers[0].hold(manifests.SECTIONS)
            return checksum.of(readers[0].manifest.write())

        def is_whole() -> str:
            return "yes" if self._strict or not self._first or self._is_whole(name, readers[0]) else ""

        def held() -> str:
            self._hold(readers[0])
            return "yes"

        identities = set(self._everywhere(lambda: _unless_removed(identity)))
        if "" in identities:
            return (_Outcome.REMOVED if identities == {""} else _Outcome.DIFFERENT), None
        if len(identities) > 1:
            return _Outcome.DIFFERENT, None
        if not all(self._everywhere(is_whole)):
            return _Outcome.DAMAGED, None
        self._before_holding()
        if not all(self._everywhere(lambda: _unless_removed(held))):
            return _Outcome.REMOVED, None
        return _Outcome.TAKEN, readers[0]

    def _is_whole(self, name: str, reader: Reader) -> bool:
        if name == SELF:  # there is no other checkpoint to take
            return True
        try:
            reader.check(manifests.SECTIONS)
        except CheckpointError as error:
            self._passed_by[name, reader.manifest.serial] = error
            return False
        for fault in [*self._unreadable, *self._passed_by.values()]:
            logger.warning("%s; the checkpoint %s is taken instead", fault, reader.path)
        return True


def _unless_removed(work: Callable[[], str]) -> str:
    """The result of ``work``; empty if the checkpoint was removed."""
    try:
        return work()
    except CheckpointRemoved:
        return ""


@contextmanager
def opened(path: Path, name: str, files: Files) -> Iterator[Reader]:
    """Opens one checkpoint of a folder for reading.

    Raises:
        CheckpointRemoved: The checkpoint does not exist any more.
        CheckpointError: Its manifest is damaged.
    """
    with ExitStack() as stack:
        with readable(path):
            try:
                folder = stack.enter_context(closing(files, files.open_folder(path)))
                if name != SELF:
                    folder = stack.enter_context(closing(files, files.open_folder_in(name, inside=folder)))
            except FileNotFoundError as error:
                raise CheckpointRemoved(path / name) from error
            manifest = read_manifest(files, folder, path / name)
        if manifest is None:
            raise CheckpointRemoved(path / name)
        reader = Reader(path / name, manifest, files, folder)
        stack.callback(reader.close)
        yield reader


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` from inside into a :class:`CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", file=path) from error
