"""The file operations that checkpoints need, one method each, so that tests can replace the class.

Names are looked up in open folders, never through paths, and links are not followed. The caller's own path is the one
exception.
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
    """The operations of the system. Methods raise the system call's ``OSError``."""

    def open_folder(self, path: Path) -> int:
        """Opens a folder by the caller's own path. Links are followed."""
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
        """Creates a file for writing. No file of the name may exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666, dir_fd=inside)

    def open(self, name: str, *, inside: int) -> int:
        """Opens a file for reading. Opening a pipe without a writer does not wait.

        If the process has too many files open, its soft limit is raised to the hard limit.
        """
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
        """Writes bytes, perhaps not all. Returns how many."""
        return os.write(file, data)

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Reads bytes, perhaps not all that fit. Returns how many; 0 at the end of the file."""
        return os.preadv(file, [into], offset)

    def sync(self, file: int) -> None:
        """Returns once a file's bytes, or a folder's names, will survive a loss of power."""
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
        """Free bytes of the file system that this user may fill."""
        figures = os.fstatvfs(folder)
        return figures.f_bavail * figures.f_frsize

    def lock(self, folder: int) -> bool:
        """Locks a folder until :meth:`unlock` or the end of the process. Returns False if another saver has locked it.

        A shared lock by :meth:`is_locked` in another process ends at once, and is waited for.
        """
        while not _locked(folder, fcntl.LOCK_EX):
            if not _locked(folder, fcntl.LOCK_SH):
                return False
            self.unlock(folder)
        return True

    def is_locked(self, folder: int) -> bool:
        """Whether a saver has locked a folder."""
        if not _locked(folder, fcntl.LOCK_SH):
            return True
        self.unlock(folder)
        return False

    def unlock(self, folder: int) -> None:
        """Unlocks a folder, even if children that were forked meanwhile have it open, too."""
        fcntl.flock(folder, fcntl.LOCK_UN)


def _raise_limit() -> bool:
    """Raises the soft limit of open files to the hard limit. Returns False if it was there already."""
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
    """Closes a folder or a file that was open for reading. An error in closing is ignored, as it loses no bytes."""
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
    """Reads until ``into`` is full or the file ends. Returns the number of bytes read."""
    total = 0
    while total < len(into):
        count = files.read(file, into[total:], offset + total)
        if count == 0:
            break
        total += count
    return total


def is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)
