"""A folder of checkpoints: lists them, tells the newest, and removes them.

A checkpoint is a folder ``step-00001234`` (``step-00001234-2`` if that name is taken) with a manifest. A folder that
has the manifest under its unfinished name is being written or removed, or was when its process ended.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.files import Files, closing, is_regular, read_all
from hydra_ext.checkpoint.format.manifest import BadManifest, Manifest
from hydra_ext.errors import CheckpointError, CheckpointsInUse

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-\d{8,19}(-\d{1,9})?")
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)  # a link, a file in a folder's place, a socket


_LOOKS = 10  # attempts to see one consistent state of a folder while another process saves into it


class State(Enum):
    """The state of a folder with a checkpoint's name."""

    WHOLE = "has a manifest that can be read"
    DAMAGED = "has a manifest that cannot be read, or is no folder"
    UNFINISHED = "has our mark: it is being written or removed, or was when its process ended"
    EMPTY = "has no files, as one of ours for a moment before it gets its mark, and after it loses it"
    FOREIGN = "has files, but neither a manifest nor our mark"


@dataclass(frozen=True)
class Found:
    """A folder with a checkpoint's name.

    Attributes:
        manifest: Manifest of a whole checkpoint.
        error: Reason why the checkpoint is damaged.
    """

    name: str
    state: State
    manifest: Manifest | None = None
    error: CheckpointError | None = None


class Folder:
    """An open folder of checkpoints. Methods raise ``OSError`` where the system does.

    Attributes:
        path: Path as the caller gave it.
        descriptor: Descriptor of the open folder.
    """

    def __init__(self, path: Path, files: Files, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._files = files

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against other savers.

        Raises:
            CheckpointsInUse: Another saver has locked the folder.
        """
        if not self._files.lock(self.descriptor):
            raise CheckpointsInUse(
                f"another process is saving into {self.path}: give each job a folder of its own", path=self.path
            )
        try:
            yield
        finally:
            with suppress(OSError):  # closing the folder unlocks it, too
                self._files.unlock(self.descriptor)

    # ---- listing ----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Sorted names of the folders that may be checkpoints."""
        return sorted(name for name in self._files.names(self.descriptor) if _STEP.fullmatch(name))

    def scan(self) -> list[Found]:
        """All folders with a checkpoint's name, with their manifests.

        Raises:
            BlockingIOError: In every attempt a listed folder was removed before it was read.
        """
        for _ in range(_LOOKS):
            found = [self._look(name) for name in self.names()]
            there = [each for each in found if each is not None]
            if len(there) == len(found):
                return there
        raise BlockingIOError(errno.EAGAIN, "checkpoints are removed faster than they can be read")

    def scan_beside_saves(self) -> list[Found]:
        """As :meth:`scan`, for a reader that has not locked the folder.

        If the folder has a whole checkpoint at every moment, the result has one.
        """
        for _ in range(_LOOKS):
            found = self.scan()
            if not found or any(each.state is State.WHOLE for each in found):
                break  # else a saver may have removed the whole ones for one that was not listed yet
        return found

    def is_in_use(self) -> bool:
        """Whether another saver has locked the folder."""
        try:
            return self._files.is_locked(self.descriptor)
        except OSError:  # on a file system without locks no save can run
            return False

    def _look(self, name: str) -> Found | None:
        """The state of one folder; None if it was removed meanwhile."""
        path = self.path / name
        try:
            step = self._files.open_folder_in(name, inside=self.descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            no_folder = CheckpointError(f"{path} is a link or a file, not a folder", file=path)
            return Found(name, State.DAMAGED, error=no_folder)
        with closing(self._files, step):
            try:
                there = self._files.names(step)  # read first: a saver may rename the manifest in between
                manifest = read_manifest(self._files, step, path)
            except CheckpointError as error:
                return Found(name, State.DAMAGED, error=error)
        if manifest is not None:
            return Found(name, State.WHOLE, manifest)
        if manifests.UNFINISHED in there or manifests.NAME in there:
            return Found(name, State.UNFINISHED)
        if there:
            return Found(name, State.FOREIGN)
        return Found(name, State.EMPTY) if name in self.names() else None  # a removed folder looks empty, too

    def free_name(self, step: int, taken: Sequence[str]) -> str:
        name = f"step-{step:08}"
        number = 1
        while name in taken:
            number += 1
            name = f"step-{step:08}-{number}"
        return name

    # ---- removing ---------------------------------------------------------------------------------------------------

    def discard(self, name: str) -> None:
        """Removes our files of a checkpoint, and the folder if it is empty then. Other files stay.

        The first step makes it unfinished, so a removal that is interrupted leaves no damaged checkpoint.
        """
        files = self._files
        with closing(files, files.open_folder_in(name, inside=self.descriptor)) as step:
            there = files.names(step)
            if manifests.NAME in there:
                files.rename(manifests.NAME, manifests.UNFINISHED, inside=step)
                files.sync(step)
            if manifests.NAME in there or manifests.UNFINISHED in there:
                for file in there:
                    if manifests.TENSOR_FILE.fullmatch(file) or file in manifests.TEXT_FILES:
                        files.remove(file, inside=step)
                files.sync(step)  # the mark goes last: without it the other files could not be recognized as ours
                files.remove(manifests.UNFINISHED, inside=step)
        try:
            files.remove_folder(name, inside=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            logger.info("%s holds files that are not a checkpoint's: the folder stays", self.path / name)


def newest_first(found: Sequence[Found]) -> list[Found]:
    """The whole checkpoints, newest first."""
    whole = [each for each in found if each.manifest is not None]
    return sorted(whole, key=lambda each: (_serial(each), each.name), reverse=True)


def _serial(found: Found) -> int:
    return -1 if found.manifest is None else found.manifest.serial


def perhaps_newer(found: Sequence[Found]) -> list[Found]:
    """Damaged checkpoints that the newest manifest does not list as older than itself."""
    newest = next(iter(newest_first(found)), None)
    known = () if newest is None or newest.manifest is None else newest.manifest.older
    return [each for each in found if each.error is not None and each.name not in known]


def read_manifest(files: Files, step: int, path: Path) -> Manifest | None:
    """The manifest of an open checkpoint; None if it has none.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    file = path / manifests.NAME
    try:
        descriptor = files.open(manifests.NAME, inside=step)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        raise CheckpointError(f"{file} is a link or a socket, not a file", file=file) from error
    with closing(files, descriptor):
        status = files.status(descriptor)
        if not is_regular(status) or status.st_size > manifests.LONGEST:
            raise CheckpointError(
                f"{file} cannot be a manifest: it is not a regular file, or longer than {manifests.LONGEST} bytes",
                file=file,
            )
        data = bytearray(status.st_size)
        count = read_all(files, descriptor, memoryview(data), 0)
    try:
        return manifests.parse(data[:count])
    except BadManifest as error:
        raise CheckpointError(f"{file}: {error}", file=file) from error
