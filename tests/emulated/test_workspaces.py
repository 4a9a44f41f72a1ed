"""The matrix library's workspaces on the emulated machine: as torch keeps them, by handle and stream."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

pytestmark = pytest.mark.emulated

MIB = 2**20
SIZE = 4 * MIB


@pytest.fixture
def workspaces() -> Callable[[], int]:
    """Gives how many there are, by the memory that they take."""
    torch.backends.cuda.cublas_workspace_size(SIZE)  # the machine's next start undoes it
    before = torch.cuda.memory_allocated()
    return lambda: round((torch.cuda.memory_allocated() - before) / SIZE)


def multiply() -> None:
    ones = torch.ones(4, 4, device="cuda")
    ones @ ones


def multiply_at_once(threads: int) -> None:
    all_there = Barrier(threads)

    def work() -> None:
        multiply()
        all_there.wait()

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


def test_each_thread_that_multiplies_has_a_workspace_and_leaves_it_to_the_next(workspaces: Callable[[], int]) -> None:
    multiply()
    multiply()
    assert workspaces() == 1
    multiply_at_once(3)
    assert workspaces() == 4
    multiply_at_once(3)
    assert workspaces() == 4
    torch._C._cuda_clearCublasWorkspaces()
    assert workspaces() == 0
    multiply()
    assert workspaces() == 1


def test_each_stream_has_a_workspace(workspaces: Callable[[], int]) -> None:
    multiply()
    with torch.cuda.stream(torch.cuda.Stream()):
        multiply()
    assert workspaces() == 2


def test_a_larger_workspace_takes_the_place_of_a_smaller_one(workspaces: Callable[[], int]) -> None:
    multiply()
    torch.backends.cuda.cublas_workspace_size(3 * SIZE)
    multiply()
    assert workspaces() == 3
    torch.backends.cuda.cublas_workspace_size(SIZE)
    multiply()
    assert workspaces() == 3


def test_other_operators_take_none(workspaces: Callable[[], int]) -> None:
    ones = torch.ones(4, 4, device="cuda")
    (ones + ones).sum().item()
    assert workspaces() == 0


@pytest.mark.parametrize(
    ("config", "size"), [(None, 32 * MIB), (":16:8", 128 * 1024), (":4096:2:16:8", 8 * MIB + 128 * 1024)]
)
def test_the_environment_says_the_size(config: str | None, size: int) -> None:
    program = (
        "import emulated_cuda; emulated_cuda.load(); import torch; print(torch.backends.cuda.cublas_workspace_size())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    if config is not None:
        environment["CUBLAS_WORKSPACE_CONFIG"] = config
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(told.stdout) == size
