"""The memory that a process may have: files of the kernel's, as they are on machines of several kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

import hydra_ext
from hydra_ext.runtime.placement import spilling
from hydra_ext.runtime.placement.host_memory import memory_limit
from hydra_ext.runtime.placement.spilling import HostLimit

MACHINE = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree:         500 kB\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        (MACHINE, 1_024_000),
        ({**MACHINE, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 1_024_000),
        ({**MACHINE, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "4096\n"}, 4096),
        (
            {
                **MACHINE,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "8192\n",
                "sys/fs/cgroup/a/memory.max": "4096\n",
            },
            4096,
        ),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
        (
            {
                **MACHINE,
                "proc/self/cgroup": "7:cpu,memory:/box\n3:cpuset:/\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            4096,
        ),
        ({**MACHINE, "proc/self/cgroup": "nonsense\n7:memory\n"}, 1_024_000),
    ],
)
def test_the_smallest_limit_counts(files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit(tmp_path) == limit


def test_a_budget_beyond_it_is_cut_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spilling, "memory_limit", lambda: 4096)
    limit = HostLimit.of("1MiB", tmp_path)
    assert limit is not None
    assert limit.budget == 4096
    assert "host_budget=1048576 is more than the 4.00 KiB" in caplog.text
    caplog.clear()
    assert HostLimit.of(4097, tmp_path) == HostLimit(4096, tmp_path)
    assert "host_budget=4097 is more than the 4.00 KiB" in caplog.text
    caplog.clear()
    assert HostLimit.of(4096, tmp_path) == HostLimit(4096, tmp_path)
    assert not caplog.text
    with pytest.raises(hydra_ext.errors.InvalidBudget, match="host_budget="):
        HostLimit.of("much", tmp_path)


@pytest.mark.parametrize(("seconds", "told"), [(0.01, False), (1.0, True)])
def test_a_slow_disk_is_told_of(seconds: float, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, seconds))
    spilling._warn_of_a_slow_disk(tmp_path, lambda: next(times))
    assert ("took 4.0 MiB/s when it was tried" in caplog.text) == told
    assert not list(tmp_path.iterdir())
