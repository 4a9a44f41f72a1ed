"""What a disk gives: transfers of pieces between memory and a file, by several threads, past the system's cache."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from measure import timed

PIECE = 4 * 2**20
THREADS = 4


@dataclass(frozen=True)
class Moved:
    """Bytes between the disk and the host."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written)

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.read - other.read, self.written - other.written)


@dataclass(frozen=True)
class Transfer:
    """Of a piece."""

    writes: bool
    offset: int


def make_buffers() -> list[memoryview]:
    """One for each thread, in huge pages: of scattered ones a disk moves much less in a second."""
    memory = mmap.mmap(-1, (THREADS + 1) * PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PIECE
    view = memoryview(memory)
    buffers = [view[begin + thread * PIECE : begin + (thread + 1) * PIECE] for thread in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(PIECE)  # zeros could be a special case
    return buffers


class Disk:
    """A file, read in its first half and written in its second, from the beginning again where a half ends."""

    def __init__(self, folder: Path, half: int) -> None:
        self._pieces = half // PIECE
        self._buffers = make_buffers()
        self._file, self.bypasses_cache = self._open(folder / "bound")
        os.posix_fallocate(self._file, 0, 2 * self._pieces * PIECE)
        # What is read has to have been written, and the first write of a place takes longer.
        self._move([Transfer(True, piece * PIECE) for piece in range(2 * self._pieces)])

    def _open(self, path: Path) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            return os.open(path, flags, 0o600), False
        try:
            os.pwritev(file, self._buffers[:1], 0)
        except OSError:  # some file systems take the flag, and then refuse each transfer
            os.close(file)
            return os.open(path, flags, 0o600), False
        return file, True

    def close(self) -> None:
        os.close(self._file)

    def seconds(self, amount: Moved) -> float:
        """For so many bytes, reads and writes evenly among each other."""
        reads, writes = (math.ceil(each / PIECE) for each in (amount.read, amount.written))
        order = [((i + 0.5) / reads, Transfer(False, i % self._pieces * PIECE)) for i in range(reads)]
        order += [
            ((i + 0.5) / writes, Transfer(True, (self._pieces + i % self._pieces) * PIECE)) for i in range(writes)
        ]
        order.sort(key=lambda each: each[0])
        seconds = timed(lambda: self._move([transfer for _, transfer in order]))
        return seconds * amount.total / (len(order) * PIECE)

    def _move(self, transfers: list[Transfer]) -> None:
        coming = iter(transfers)
        with ThreadPoolExecutor(THREADS) as pool:
            for each in [pool.submit(self._serve, coming, buffer) for buffer in self._buffers]:
                each.result()

    def _serve(self, coming: Iterator[Transfer], buffer: memoryview) -> None:
        for each in coming:  # no two threads get the same
            moved = (os.pwritev if each.writes else os.preadv)(self._file, [buffer], each.offset)
            if moved != PIECE:
                raise OSError(f"{moved} bytes of a piece of {PIECE} were moved")
