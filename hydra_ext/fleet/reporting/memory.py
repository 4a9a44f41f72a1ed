"""Host memory of a job's processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def resident_bytes(log: Path) -> int | None:
    """Resident bytes of the processes whose standard output is a file; None if there are none here.

    Pages that several processes share, such as torch's code, count for each of them.
    """
    try:
        wanted = log.stat()
    except OSError:
        return None
    found = [_resident(process) for process in _processes() if _writes_to(process, wanted)]
    return sum(found) if found else None


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _writes_to(process: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat((process / "fd" / "1").stat(), wanted)
    except OSError:  # it has ended, or belongs to another user
        return False


def _resident(process: Path) -> int:
    with suppress(OSError):
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
