"""`fleet`: says what a fleet is doing, and writes its report."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra_ext.errors import HydraError, JournalError, MissingDependency
from hydra_ext.fleet.cluster.progress import Track
from hydra_ext.fleet.reporting import page
from hydra_ext.fleet.reporting.status import COLUMNS, FleetState, FleetStatus, read

_LOOK = 1.0  # seconds between looks with --watch
_LIVING = (FleetState.MEASURING, FleetState.RUNNING)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    status = verbs.add_parser("status", help="say how far each job is, and when the fleet ends")
    status.add_argument("folder", type=Path, help="of the fleet")
    status.add_argument("--watch", action="store_true", help="go on until the fleet ends")
    status.add_argument("--json", action="store_true", help="print JSON; with --watch, an object a line")
    report = verbs.add_parser("report", help="write what was planned and what happened as a page of HTML")
    report.add_argument("folder", type=Path, help="of the fleet")
    report.add_argument("--html", type=Path, required=True, metavar="FILE", help="the file to write")


def run(options: argparse.Namespace) -> int:
    """Returns 2 if the folder holds no fleet that can be read."""
    try:
        if options.what == "report":
            page.write(options.folder, options.html)
            print(f"the report is in {options.html}")
        else:
            _show(options)
    except JournalError as error:
        print(error, file=sys.stderr)
        return 2
    except HydraError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the way to end --watch
        return 0
    return 0


def _show(options: argparse.Namespace) -> None:
    statuses = _statuses(options.folder, watch=options.watch)
    if options.json:
        for status in statuses:
            print(json.dumps(status.as_dict(), indent=None if options.watch else 2), flush=True)
    elif sys.stdout.isatty():
        _draw(statuses)
    else:
        _print_changes(statuses)


def _statuses(folder: Path, *, watch: bool) -> Iterator[FleetStatus]:
    """One, or with ``watch`` one a second until the fleet does not run."""
    tracks: dict[str, Track] = {}
    status = read(folder, tracks=tracks)
    yield status
    while watch and status.state in _LIVING:
        time.sleep(_LOOK)
        status = read(folder, tracks=tracks)
        yield status


def _print_changes(statuses: Iterator[FleetStatus]) -> None:
    """Prints a table whenever a job's state or steps are others."""
    shown: Any = None
    for status in statuses:
        seen = status.state, [(job.state, job.step) for job in status.jobs]
        if seen != shown:
            print(status, flush=True)
            shown = seen


def _draw(statuses: Iterator[FleetStatus]) -> None:
    console, live, table, text = (_rich(name) for name in ("console", "live", "table", "text"))
    with live.Live(auto_refresh=False) as shown:
        for status in statuses:
            lines = [text.Text(line) for line in (status.summary(), *status.notes())]
            shown.update(console.Group(lines[0], _table(table.Table, status), *lines[1:]), refresh=True)


def _table(make: Callable[..., Any], status: FleetStatus) -> Any:
    table = make(*COLUMNS)
    for job in status.jobs:
        table.add_row(*job.cells())
    return table


def _rich(name: str) -> Any:
    try:
        return importlib.import_module(f"rich.{name}")
    except ImportError as error:
        raise MissingDependency(
            "hydra-ext fleet status needs rich in a terminal, which is not installed: pip install 'hydra-ext[live]', "
            "or take --json"
        ) from error
