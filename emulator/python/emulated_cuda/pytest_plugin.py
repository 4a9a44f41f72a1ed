"""`pytest -p emulated_cuda.pytest_plugin`: the emulated machine under torch, started again for each test.

Longest delays and their seed are options, so that a failure can be run again. A test fails if it leaves a device
failed, or has used a stream or an event of a device that was not its current one. Tests marked `emulated` need this.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import emulated_cuda

emulated_cuda.load()  # before any test module imports torch

_MARKER = "emulated: needs the emulated CUDA machine (-p emulated_cuda.pytest_plugin)"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulated CUDA")
    group.addoption("--delay", type=float, default=0.0, help="the longest delay of a stream's operation, in seconds")
    group.addoption("--delay-seed", type=int, default=0, help="the seed of delays")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_report_header(config: pytest.Config) -> str:
    import torch

    guarded = "guarded" if emulated_cuda.memory_is_guarded() else "not guarded: this processor has no protection keys"
    return f"emulated CUDA: {torch.cuda.device_count()} devices, memory {guarded}, --delay={_delay(config)}"


def _delay(config: pytest.Config) -> float:
    return float(config.getoption("--delay"))


def _fault() -> str:
    """Why a device has failed; empty if none has. Waits for all work."""
    import torch

    for index in range(torch.cuda.device_count()):
        try:
            torch.cuda.synchronize(index)
        except RuntimeError as error:
            return emulated_cuda.fault_message() or str(error)
    return ""


@pytest.fixture(autouse=True)
def _emulated_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    emulated_cuda.reset()
    emulated_cuda.set_delays(_delay(request.config), int(request.config.getoption("--delay-seed")))
    yield
    fault, wrong_device = _fault(), emulated_cuda.wrong_device()
    emulated_cuda.reset()
    if fault:
        pytest.fail(f"a device failed: {fault}")
    if wrong_device:
        pytest.fail("a stream or an event was used while another device than its own was current")
