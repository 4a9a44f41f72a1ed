"""`plan`: solves a planning problem that a file describes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hydra_ext.errors import PlanError
from hydra_ext.plan import Solution, solve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", required=True, help="kind of the problem, such as unequal_split")
    parser.add_argument("--problem", required=True, metavar="FILE", help="the problem as JSON; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print objective, plan, bound and gap as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0, also where nothing fits, and 2 for a problem that makes no sense."""
    try:
        solution = solve(options.kind, _read(options.problem))
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(_values(solution), allow_nan=False) if options.json else _text(solution))
    return 0


def _read(file: str) -> dict[str, object]:
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise PlanError(f"--problem {file} cannot be read: {error}") from error
    try:
        problem = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--problem {file} is no JSON: {error}") from error
    if not isinstance(problem, dict):
        raise PlanError(f"--problem {file} is a {type(problem).__name__}: give an object, with the problem's entries")
    return problem


def _values(solution: Solution) -> dict[str, object]:
    return {
        "objective": solution.objective,
        "plan": solution.plan,
        "bound": solution.bound,
        "gap": solution.gap,
    }


def _text(solution: Solution) -> str:
    if solution.objective is None or solution.plan is None:
        return "no plan fits into the memory" + ("" if solution.bound is None else f" (bound {solution.bound:g})")
    if solution.gap is None:
        proof = "no bound is known"
    elif solution.gap == 0:
        proof = "proved to be the best"
    else:
        proof = f"at most {100 * solution.gap:.3g} % from the best, whose bound is {solution.bound:g}"
    return "\n".join([f"objective {solution.objective:g}, {proof}", *(json.dumps(part) for part in solution.plan)])
