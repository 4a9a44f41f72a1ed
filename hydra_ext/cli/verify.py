"""`verify`: reads every checkpoint in a folder, and says which are whole."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra_ext import _C
from hydra_ext.checkpoint.verifying import Verdict, verify
from hydra_ext.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0 if there is a whole checkpoint and none is damaged, otherwise 1."""
    try:
        verdicts = verify(options.folder)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    good = any(verdict.state == "whole" for verdict in verdicts) and all(
        verdict.state != "damaged" for verdict in verdicts
    )
    if options.json:
        print(json.dumps({"good": good, "checkpoints": [verdict.as_dict() for verdict in verdicts]}, indent=2))
    else:
        print(_text(options.folder, verdicts))
    return 0 if good else 1


def _text(folder: Path, verdicts: Sequence[Verdict]) -> str:
    lines = []
    for verdict in verdicts:
        line = f"{verdict.path.name}  {verdict.state}"
        if verdict.nbytes is not None:
            line += f"  step {verdict.step}, {_C.human_bytes(verdict.nbytes)}"
        lines.append(line + ("  (the newest)" if verdict.newest else ""))
        lines += [f"    {message}" for _, _, message in verdict.faults]
    return "\n".join(lines) if lines else f"there is no checkpoint in {folder}"
