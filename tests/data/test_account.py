"""Which pages of a process count as its memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy

from hydra_ext.data.tuning.memory import counted, libraries


def test_pages_of_libraries_count_and_those_of_a_mapped_dataset_do_not(tmp_path: Path) -> None:
    nbytes = 16 * 2**20
    (tmp_path / "dataset").write_bytes(bytes(nbytes))
    files, of_libraries, others = pages_of_files(), libraries(os.getpid()), counted(os.getpid()).proportional
    dataset = numpy.memmap(tmp_path / "dataset", dtype=numpy.uint8, mode="r")
    assert int(dataset.sum()) == 0
    assert pages_of_files() > files + nbytes // 2
    assert 2**20 < of_libraries <= files
    assert libraries(os.getpid()) < of_libraries + 2**20
    assert counted(os.getpid()).proportional < others + 2**20


def test_a_process_that_has_ended_has_no_libraries() -> None:
    assert libraries(2**22 + 1) == 0  # no process has such a number


def pages_of_files() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_File:"))
