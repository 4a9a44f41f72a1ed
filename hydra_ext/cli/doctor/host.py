"""Host memory, its limits, and cores."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from hydra_ext.cli.doctor.report import Check, Facts, Status, human_bytes

# Version 1 of cgroups writes "no limit" as the largest multiple of a page; anything near it means the same.
_NO_LIMIT = 1 << 60
_LITTLE_MEMORY = 2 << 30


@dataclass(frozen=True)
class HostFacts:
    """Facts about the host, sizes in bytes. None means no limit."""

    cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_version: int | None
    cgroup_limit_bytes: int | None
    memlock_limit_bytes: int | None


def collect() -> HostFacts:
    total, available = parse_meminfo(Path("/proc/meminfo").read_text())
    version, limit = cgroup_limit(Path("/sys/fs/cgroup"), _read(Path("/proc/self/cgroup")) or "")
    return HostFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_total_bytes=total,
        memory_available_bytes=available,
        cgroup_version=version,
        cgroup_limit_bytes=limit,
        memlock_limit_bytes=memlock_limit(),
    )


def section(facts: HostFacts) -> Facts:
    return asdict(facts)


def parse_meminfo(text: str) -> tuple[int, int]:
    """Total and available bytes."""
    fields = {line.split(":")[0]: line.split(":")[1].split()[0] for line in text.splitlines() if ":" in line}
    total = int(fields["MemTotal"]) * 1024
    return total, int(fields.get("MemAvailable", fields["MemTotal"])) * 1024


def cgroup_limit(root: Path, membership: str) -> tuple[int | None, int | None]:
    """Version of the cgroups that count memory, and the tightest limit between the root and this process's group.

    `membership` is the text of /proc/self/cgroup. In a container its path may name folders that exist only outside.
    These are skipped; the root has the limit then.
    """
    unified: str | None = None
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return 1, _tightest(root / "memory", path, "memory.limit_in_bytes")
        if not controllers:
            unified = path
    if unified is None:
        return None, None
    return 2, _tightest(root, unified, "memory.max")


def _tightest(root: Path, path: str, name: str) -> int | None:
    relative = PurePosixPath(path.lstrip("/"))
    texts = [_read(root / folder / name) for folder in (relative, *relative.parents)]
    limits = [int(text) for text in texts if text is not None and text.strip().isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def memlock_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def checks(facts: HostFacts) -> list[Check]:
    return [_memory(facts), _cores(facts)]


def _memory(facts: HostFacts) -> Check:
    limits = [facts.memory_available_bytes]
    if facts.cgroup_limit_bytes is not None:
        limits.append(facts.cgroup_limit_bytes)
    usable = min(limits)
    detail = f"{human_bytes(usable)} can be used for parameters, gradients and optimizer state"
    if usable < _LITTLE_MEMORY:
        return Check("host memory", Status.WARN, detail, "free some, or raise the memory limit of the container")
    return Check("host memory", Status.OK, detail)


def _cores(facts: HostFacts) -> Check:
    if facts.cores < 2:
        remedy = "give the process a second core: copies run beside the computation"
        return Check("cores", Status.WARN, "1 core: nothing overlaps", remedy)
    return Check("cores", Status.OK, f"{facts.cores} cores")
