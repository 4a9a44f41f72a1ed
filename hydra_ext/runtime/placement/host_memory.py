"""What memory this process may have at most: the machine's, or that of a control group it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 2**60  # version 1 writes a number of pages near 2**63


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes; None where nothing is known.

    The smallest of all limits between the process's group and the hierarchy's root, in version 2 of control groups or
    version 1, and of the machine's memory.

    Args:
        root: of the file system, for tests.
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
            if text.isdigit():  # "max" is none
                yield int(text)
        if each == mount:
            return


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []  # not there, or not for this process
