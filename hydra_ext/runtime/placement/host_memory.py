"""The most memory that this process may use: the machine's, or the limit of one of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 2**60  # version 1 shows "no limit" as a number near 2**63


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process may use; None if no limit is known.

    It is the smallest of the machine's memory and all limits between the process's control group and the root of the
    hierarchy, in version 1 or 2 of control groups.

    Args:
        root: Root of the file system, for tests.
    """
    limits = [found for found in (*_machine(root), *_groups(root)) if 0 < found < _UNLIMITED]
    return min(limits, default=None)


def _machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemTotal" and words and words[0].isdigit():
            yield 1024 * int(words[0])


def _groups(root: Path) -> Iterator[int]:
    """See the kernel's documentation of cgroups, and proc(5): lines are ``hierarchy:controllers:path``."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _up(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _up(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _up(mount: Path, path: str, file: str) -> Iterator[int]:
    group = mount / path.strip("/")
    for each in (group, *group.parents):
        for text in _lines(each / file):
            if text.isdigit():  # "max" means no limit
                yield int(text)
        if each == mount:
            return


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []  # missing, or not readable for this process
