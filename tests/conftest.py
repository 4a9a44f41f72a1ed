"""Options of the test run, and what all of it shares."""

import gc
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support import leftovers, sampling
from support.checkpoint import small_disks


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The order of sums is part of what is compared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts() -> None:
    """Shells start what runs in the background with SIGINT ignored: a test that waits for it would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _temporary_files_are_ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a folder of this process: what is left there was left by a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _entering_is_noted() -> None:
    leftovers.watch()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """What a test leaves behind is its error, and not that of the next one."""
    before = leftovers.Now()
    yield
    left = leftovers.left_since(before)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


# Of tests that do not say how many examples they need.
settings.register_profile("whole", settings(), max_examples=300)
settings.register_profile("sampled", settings(), max_examples=50)


def _has_gpus(count: int) -> bool:
    """Ranks of an emulated machine have as many as they need."""
    return "emulated_cuda" in sys.modules or torch.cuda.device_count() >= count


# Markers of tests that a machine may be unable to run, and whether this one is able.
_WHERE_POSSIBLE: dict[str, Callable[[], bool]] = {
    "mounts": small_disks.allowed,
    "googletest_sources": Path("/usr/src/googletest").is_dir,
    "two_gpus": partial(_has_gpus, 2),
    "four_gpus": partial(_has_gpus, 4),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="run a few cases only of each test that has many")
    parser.addoption("--shard", metavar="I/N", help="run only the I-th of N parts of what was chosen (from 1)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("sampled" if config.getoption("--sample") else "whole")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, is_possible in _WHERE_POSSIBLE.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and marker not in config.getoption("-m") and not is_possible():
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in marked]
    if config.getoption("--sample"):
        _keep(sampling.sampled(items), config, items)
    shard = config.getoption("--shard")
    if shard is None:
        return
    index, count = _parse_shard(shard)
    # Every N-th, so that the many cases of one slow test are spread over the parts.
    _keep(items[index - 1 :: count], config, items)


def _keep(chosen: list[pytest.Item], config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Keeps all that is there by now out of later collections of garbage, which examine what tests have made.

    The modules of all tests are hundreds of thousands of objects. To examine them takes a second, and many tests, and
    what they test, collect garbage.
    """
    gc.collect()
    gc.freeze()


def _parse_shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard={text}: I/N with 1 <= I <= N is expected")
    return int(index), int(count)
