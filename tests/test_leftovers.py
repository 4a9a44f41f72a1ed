"""A test that leaves something behind is named, and no other one fails for it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C
from hydra_ext.runtime import engine
from hydra_ext.runtime.rounds import isolation
from support import leftovers

_kept: list[Any] = []  # what a test of today would keep in a module's variable


@pytest.fixture(autouse=True)
def _kept_ends() -> Iterator[None]:
    yield
    _kept.clear()


def keep(one: Any) -> Any:
    _kept.append(one)
    return one


def enter(context: Any) -> None:
    keep(context).__enter__()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def a_context(way: Callable[[nn.Module], Any]) -> Callable[[Path], None]:
    def leave(_: Path) -> None:
        subject = model()
        enter(hydra_ext.offload(subject, budget="1MiB", device="simulated"))
        keep(way(subject))

    return leave


def a_thread(_: Path) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="left alone")
    thread.start()
    keep(lambda: [go.set(), thread.join()])


def a_folder(_: Path) -> None:
    path = tempfile.mkdtemp(prefix="left-")
    keep(lambda: os.rmdir(path))


def a_file(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    keep(lambda: os.close(descriptor))


def a_process(_: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    keep(process.wait)


LEFT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a context": (a_context(lambda _: None), "engine is wrapped: Run of a Sequential"),
    "its model's class": (a_context(lambda _: None), "the class of a Sequential is swapped"),
    "its account": (a_context(lambda subject: subject(torch.ones(1, 8))), "account with a simulated device"),
    "a stash": (lambda _: enter(hydra_ext.stash(device="simulated")), "a stash is entered"),
    "hooks": (lambda _: enter(torch.autograd.graph.save_on_cpu()), "hooks of saved tensors"),
    "a meter": (lambda _: keep(_C.testing.Meter()).begin(), "account with a simulated device"),
    "functions of a round": (lambda _: enter(isolation.replaced_functions()), "Module.__setattr__ is"),
    "a mode": (lambda _: enter(torch.device("meta")), "a function mode"),
    "a thread": (a_thread, "the thread 'left alone'"),
    "a process": (a_process, "sleep 60"),
    "a temporary file": (a_folder, "/left-"),
    "an open file": (a_file, "open: /"),
    "threads of torch": (lambda _: torch.set_num_threads(2), "torch.get_num_threads() is 2, was 1"),
    "a dtype": (lambda _: torch.set_default_dtype(torch.float64), "float64"),
    "a device": (lambda _: torch.set_default_device("meta"), "torch.get_default_device() is"),
    "no gradients": (lambda _: torch.set_grad_enabled(False), "torch.is_grad_enabled() is False"),
    "determinism": (lambda _: torch.use_deterministic_algorithms(True), "(True, False), was (False, False)"),
    "a handler": (lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN), "the handler of SIGTERM"),
    "a variable": (lambda _: os.environ.update(LEFT="here"), "the environment is {b'LEFT': b'here'}"),
    "a working folder": (os.chdir, "the working folder is"),
}
BY_HAND = (
    "a thread",
    "a process",
    "a temporary file",
    "an open file",
)  # they are named, and ended by those that know how


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_named_and_ended(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE", 0.02)
    leave, said = LEFT[name]
    before = leftovers.Now()
    leave(tmp_path)
    told = leftovers.left_since(before)
    assert any(said in each for each in told), told
    if name in BY_HAND:
        _kept.pop()()
    assert leftovers.left_since(before) == []


def test_a_thread_that_is_about_to_end_is_not_left() -> None:
    before = leftovers.Now()
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    thread.start()
    going.set()
    assert leftovers.left_since(before) == []


INNER = """
    import torch
    from torch import nn
    import hydra_ext

    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def train():
        subject = model()
        with hydra_ext.offload(subject, budget="1MiB", device="simulated") as run:
            subject(torch.ones(1, 8)).sum().backward()
            assert run.report().windows > 0

    def test_before():
        train()

    def test_that_fails_in_the_middle():
        subject = model()
        context = hydra_ext.offload(subject, budget="1MiB", device="simulated")
        context.__enter__()
        context._run.window(hydra_ext._C.PassKind.FORWARD).__enter__()
        subject(torch.ones(1, 8))
        raise RuntimeError("in the middle")

    def test_after():
        assert not hydra_ext.runtime.engine.installed()
        assert not hydra_ext._C.on_simulated_device(torch.ones(1))
        train()
"""


class Reports:
    def __init__(self) -> None:
        self.failed: list[tuple[str, str, str]] = []
        self.passed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed.append((name, report.when, report.longreprtext))
        elif report.when == "call":
            self.passed.append(name)


def test_a_test_that_fails_in_an_open_context_fails_alone(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The fixture is that of this run."""
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert conftest is not None
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(INNER))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    reports = Reports()
    without = ("cacheprovider", "unraisableexception", "threadexception", "faulthandler", "terminal", "xdist")
    options = [f"--rootdir={tmp_path}", f"-c{tmp_path / 'pytest.ini'}", f"--basetemp={tmp_path / 'base'}"]
    options += ["--import-mode=importlib", "--capture=no", *(f"-pno:{name}" for name in without)]
    pytest.main([*options, str(tmp_path)], plugins=[conftest, reports])
    assert reports.passed == ["test_before", "test_after"]
    (call, teardown) = reports.failed
    assert call[:2] == ("test_that_fails_in_the_middle", "call")
    assert teardown[:2] == ("test_that_fails_in_the_middle", "teardown")
    assert "in the middle" in call[2]
    assert "the test left behind" in teardown[2]
    assert "engine is wrapped" in teardown[2]
    assert not engine.installed()
