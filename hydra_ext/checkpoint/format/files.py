"""Every operation on files that a checkpoint needs, one method each: tests put another class in their place.

Names are looked up in folders that are open, never through paths, and links are not followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Files:
    """The system's. Every method raises what the system call raises: ``OSError``."""

    def open_folder(self, path: Path) -> int:
        """The caller's own path: links are followed."""
        return os.open(path, _FOLDER)

    def open_folder_in(self, name: str, *, inside: int) -> int:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=inside)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def make_folder_in(self, name: str, *, inside: int) -> None:
        os.mkdir(name, dir_fd=inside)

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def create(self, name: str, *, inside: int) -> int:
        """For writing; there must be none of the name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666, dir_fd=inside)

    def open(self, name: str, *, inside: int) -> int:
        """For reading. Opening a pipe without a writer does not wait. If this process has
        too many files open, its limit is raised to the one that the system sets for it."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(name, flags, dir_fd=inside)
        except OSError as error:
            if error.errno != errno.EMFILE or not _raise_limit():
                raise
        return os.open(name, flags, dir_fd=inside)

    def status(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def write(self, file: int, data: memoryview) -> int:
        """How many bytes were: perhaps not all."""
        return os.write(file, data)

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """How many bytes were: perhaps not all; none at the end."""
        return os.preadv(file, [into], offset)

    def sync(self, file: int) -> None:
        """Returns when a file's bytes, or a folder's names, will survive a loss of power."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, old: str, new: str, *, inside: int) -> None:
        os.rename(old, new, src_dir_fd=inside, dst_dir_fd=inside)

    def remove(self, name: str, *, inside: int) -> None:
        os.unlink(name, dir_fd=inside)

    def remove_folder(self, name: str, *, inside: int) -> None:
        os.rmdir(name, dir_fd=inside)

    def free_bytes(self, folder: int) -> int:
        """That this user may fill."""
        figures = os.fstatvfs(folder)
        return figures.f_bavail * figures.f_frsize

    def lock(self, folder: int) -> bool:
        """Until :meth:`unlock`, or the process's end; False where another saver holds it."""
        while not _locked(folder, fcntl.LOCK_EX):
            if not _locked(folder, fcntl.LOCK_SH):
                return False
            self.unlock(folder)  # another process asks :meth:`is_locked`: that ends at once
        return True

    def is_locked(self, folder: int) -> bool:
        """Whether a saver holds it."""
        if not _locked(folder, fcntl.LOCK_SH):
            return True
        self.unlock(folder)
        return False

    def unlock(self, folder: int) -> None:
        """For children that were forked meanwhile, too."""
        fcntl.flock(folder, fcntl.LOCK_UN)


def _raise_limit() -> bool:
    """Of open files; whether that was possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft != hard


def _locked(folder: int, how: int) -> bool:
    try:
        fcntl.flock(folder, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def closing(files: Files, descriptor: int) -> Iterator[int]:
    """Closes what was open for reading, or a folder: nothing is lost if that fails."""
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            files.close(descriptor)


def write_all(files: Files, file: int, data: memoryview) -> None:
    while data:
        written = files.write(file, data)
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        data = data[written:]


def read_all(files: Files, file: int, into: memoryview, offset: int) -> int:
    """Reads until it is full, or the file ends; how many bytes were read."""
    total = 0
    while total < len(into):
        count = files.read(file, into[total:], offset + total)
        if count == 0:
            break
        total += count
    return total


def is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)
