"""``run.live_line``: a line in a terminal, log lines elsewhere."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest
import torch

import hydra_ext
from hydra_ext import Checks, Run
from hydra_ext.errors import HydraError, MissingDependency
from hydra_ext.runtime.reporting import live
from support.runtime.native import WIDTH, stack

BATCH = torch.ones(4, WIDTH)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """What was written, less colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.fixture
def run() -> Iterator[Run]:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hydra_ext.offload(model, optimizer, budget="1MiB", checks=Checks(poison_hosts=True)) as opened:
        yield opened
        assert opened.report().windows > 0


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        run.step([BATCH], lambda batch: run.model(batch).pow(2).mean())


def terminal_in(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From inside a test: between set-up and call pytest puts its own stdout in place."""
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return stdout


def test_in_a_terminal_the_line_is_written_anew_after_every_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_in(monkeypatch)
    with run.live_line(tokens=lambda batch: batch.numel()):
        for number in (1, 2):
            steps(run, 1)
            assert f"step {number}  " in terminal.text()
    shown = terminal.text()
    assert "tokens/s  device " in shown
    assert "  bound by " in shown
    steps(run, 1)
    assert terminal.text() == shown


def test_elsewhere_nothing_is_printed_and_a_line_is_logged_now_and_then(
    run: Run, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger=live.__name__)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LINES", 1e9)
    with run.live_line():
        steps(run, 3)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LINES", 0.0)
    with run.live_line():
        steps(run, 2)
    steps(run, 1)
    assert [message.split("  ")[0] for message in caplog.messages] == ["step 1", "step 4", "step 5"]
    assert capsys.readouterr() == ("", "")


def test_without_rich_a_terminal_is_told_what_to_install_and_a_log_needs_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with run.live_line():
        steps(run, 1)
    terminal_in(monkeypatch)
    with pytest.raises(MissingDependency, match=r"pip install 'hydra-ext\[live\]'"), run.live_line():
        pytest.fail("entered")
    assert issubclass(MissingDependency, HydraError)
    assert issubclass(MissingDependency, ImportError)
    steps(run, 1)


def test_an_error_inside_comes_out_and_ends_the_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_in(monkeypatch)

    def work() -> None:
        with run.live_line():
            steps(run, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    shown = terminal.text()
    assert "step 1  " in shown
    steps(run, 1)
    assert terminal.text() == shown
