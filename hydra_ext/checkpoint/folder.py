"""A folder of checkpoints: which there are, which is the newest, what may be removed.

A checkpoint is a folder ``step-00001234`` (``step-00001234-2`` if that name is taken) with a manifest. One that has
the manifest's unfinished name instead was being written, or removed, when its process ended.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hydra_ext.checkpoint import manifest as manifests
from hydra_ext.checkpoint.files import Files, closing, is_regular, read_all
from hydra_ext.checkpoint.manifest import BadManifest, Manifest
from hydra_ext.errors import CheckpointError, CheckpointsInUse

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-\d{8,19}(-\d{1,9})?")
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)  # a link, a file in a folder's place, a socket


@dataclass(frozen=True)
class Found:
    """A folder with a checkpoint's name.

    Attributes:
        manifest: None if it has none that can be read.
        error: why it cannot; None if there is none to be read.
        unfinished: it was being written, or removed, by us.
    """

    name: str
    manifest: Manifest | None = None
    error: CheckpointError | None = None
    unfinished: bool = False


class Folder:
    """An open folder of checkpoints. Methods raise ``OSError`` where the system does.

    Attributes:
        path: as the caller gave it.
        descriptor: of the open folder.
    """

    def __init__(self, path: Path, files: Files, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._files = files

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Raises:
            CheckpointsInUse: somebody else has locked it.
        """
        if not self._files.lock(self.descriptor):
            raise CheckpointsInUse(
                f"somebody else is saving into {self.path}: give each job a folder of its own", path=self.path
            )
        try:
            yield
        finally:
            with suppress(OSError):  # closing the folder unlocks it, too
                self._files.unlock(self.descriptor)

    # ---- what there is ----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of folders that may be checkpoints, in order."""
        return sorted(name for name in self._files.names(self.descriptor) if _STEP.fullmatch(name))

    def scan(self) -> list[Found]:
        """Each of them, with its manifest."""
        return [found for name in self.names() if (found := self._look(name)) is not None]

    def _look(self, name: str) -> Found | None:
        """None if it has gone meanwhile."""
        try:
            step = self._files.open_folder_in(name, inside=self.descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            path = self.path / name
            return Found(name, error=CheckpointError(f"{path} is a link or a file, and no folder", file=path))
        with closing(self._files, step):
            try:
                manifest = read_manifest(self._files, step, self.path / name)
            except CheckpointError as error:
                return Found(name, error=error)
            unfinished = manifest is None and manifests.UNFINISHED in self._files.names(step)
            return Found(name, manifest, unfinished=unfinished)

    def free_name(self, step: int, taken: Sequence[str]) -> str:
        name = f"step-{step:08}"
        number = 1
        while name in taken:
            number += 1
            name = f"step-{step:08}-{number}"
        return name

    # ---- removing ---------------------------------------------------------------------------------------------------

    def discard(self, name: str) -> None:
        """Removes what is ours of a checkpoint, which is none as soon as that begins; what is not ours stays."""
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
                files.sync(step)  # the mark goes last: without it nobody would know that the rest is ours
                files.remove(manifests.UNFINISHED, inside=step)
        try:
            files.remove_folder(name, inside=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            logger.info("%s holds what is not ours: it stays", self.path / name)


def newest_first(found: Sequence[Found]) -> list[Found]:
    """Those with a manifest."""
    whole = [each for each in found if each.manifest is not None]
    return sorted(whole, key=lambda each: (_serial(each), each.name), reverse=True)


def _serial(found: Found) -> int:
    return -1 if found.manifest is None else found.manifest.serial


def perhaps_newer(found: Sequence[Found]) -> list[Found]:
    """Damaged ones of which no manifest says that they are older than it."""
    newest = next(iter(newest_first(found)), None)
    known = () if newest is None or newest.manifest is None else newest.manifest.older
    return [each for each in found if each.error is not None and each.name not in known]


def read_manifest(files: Files, step: int, path: Path) -> Manifest | None:
    """Of an open checkpoint; None if it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    file = path / manifests.NAME
    try:
        descriptor = files.open(manifests.NAME, inside=step)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        raise CheckpointError(f"{file} is a link, and no file", file=file) from error
    with closing(files, descriptor):
        status = files.status(descriptor)
        if not is_regular(status) or status.st_size > manifests.LONGEST:
            raise CheckpointError(f"{file} is no file of a manifest's size", file=file)
        data = bytearray(status.st_size)
        count = read_all(files, descriptor, memoryview(data), 0)
    try:
        return manifests.parse(data[:count])
    except BadManifest as error:
        raise CheckpointError(f"{file}: {error}", file=file) from error
