"""Verbs and their parser.

A verb is a module with `add_arguments(parser)` and `run(options) -> exit code`. Only the chosen verb is imported:
`doctor` has to run where nothing else can be imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast


class Verb(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


class Entry(NamedTuple):
    module: str
    summary: str


VERBS = {
    "doctor": Entry("hydra_ext.cli.doctor", "say what is installed, what will work here and what will not"),
    "demo": Entry("hydra_ext.cli.demo", "train a transformer beyond a device budget, next to plain PyTorch"),
    "schedule": Entry("hydra_ext.cli.schedule", "draw a pipeline schedule, and say what it needs"),
    "plan": Entry("hydra_ext.cli.plan", "say whether a model fits a card, and how fast; or solve a planning problem"),
    "verify": Entry("hydra_ext.cli.verify", "read every checkpoint in a folder, and say which are whole"),
    "fleet": Entry("hydra_ext.cli.fleet", "say what a fleet is doing, or write its report"),
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. `arguments` default to the process's. Without any, prints the help."""
    # argparse does the same from Python 3.14 on.
    prog = "python -m hydra_ext" if Path(sys.argv[0]).name == "__main__.py" else "hydra-ext"
    parser = argparse.ArgumentParser(prog=prog, description="Train models bigger than the GPU.")
    lines = "\n".join(f"  {name:<10} {entry.summary}" for name, entry in VERBS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"verbs:\n{lines}\n\n`{prog} VERB --help` says more."
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB")
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # otherwise a missing verb is reported as "VERB, rest"
    parser.add_argument("--version", action="version", version="", help="say the versions of hydra_ext and its torch")
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser.print_help()
        return 0
    if given[0] == "--version":
        print(_version())
        return 0
    chosen = parser.parse_args(given)

    verb = cast(Verb, importlib.import_module(VERBS[chosen.verb].module))
    verb_parser = argparse.ArgumentParser(
        prog=f"{prog} {chosen.verb}", description=VERBS[chosen.verb].summary.capitalize() + "."
    )
    verb.add_arguments(verb_parser)
    options = verb_parser.parse_args(chosen.rest)
    from hydra_ext.errors import HydraError

    try:
        code = verb.run(options)
        sys.stdout.flush()
    except HydraError as error:  # it says what was asked, and what to do
        sys.stdout.flush()
        print(f"{prog} {chosen.verb}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the buffered rest, written at exit
        return 128 + signal.SIGPIPE
    return code


def _version() -> str:
    from hydra_ext import _build_info

    return f"hydra-ext {_build_info.VERSION}, built for torch {_build_info.TORCH}"
