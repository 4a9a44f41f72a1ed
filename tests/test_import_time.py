"""Importing hydra_ext adds little to importing torch."""

import statistics
import subprocess
import sys

LONGEST_SECONDS = 0.2
RUNS = 5

PROGRAM = """
import time
import torch
begin = time.perf_counter()
import hydra_ext
print(time.perf_counter() - begin)
"""


def test_import_takes_less_than_a_fifth_of_a_second_beyond_torch(tmp_path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    seconds = [float(subprocess.check_output(command, text=True, cwd=tmp_path)) for _ in range(RUNS)]
    assert statistics.median(seconds) < LONGEST_SECONDS, seconds
