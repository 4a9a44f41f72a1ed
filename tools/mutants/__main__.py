"""Draws mutants, tries them, and reports the outcomes: see the package's docstring."""

from __future__ import annotations

import argparse
import shutil
import signal
from pathlib import Path

from mutants import drawing, engine_trials, reach, report, survivors, trials
from mutants.packages import Packages
from mutants.python_trials import Judge, try_all
from mutants.results import Results

ROOT = Path(__file__).resolve().parents[2]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mutants", description="Puts small faults into the package, and checks that tests find them."
    )
    parser.add_argument("--count", type=int, default=200, help="number of mutants to draw from the Python package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="number of test or compiler runs at a time")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "mutants", help="folder for all files of the run"
    )
    parser.add_argument("--results", type=Path, help="file of results (default: results.jsonl in the folder)")
    parser.add_argument("--reach", type=Path, help="map of an earlier run (default: the folder's map)")
    parser.add_argument("--report", type=Path, help="Markdown file to write (default: report.md in the folder)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("reach", "python", "engine", "suite"),
        default=["python", "engine", "suite"],
        help="parts to run; reach only makes the map of tests and lines, which the others make if it is missing",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY", help="try only these mutants")
    return parser.parse_args()


def main() -> None:
    # Tests send this signal, and a shell lets its background processes ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = options()
    only = set(chosen.only)
    table = [mutation for mutation in engine_trials.MUTATIONS if not only or mutation.key in only]
    engine_trials.expect_places(ROOT, table)
    folder: Path = chosen.folder.resolve()
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    packages = Packages(ROOT, work)
    traces: Path = chosen.reach or folder / "reach"
    if chosen.reach is None:
        reach.trace(ROOT, packages.plain, traces, workers=chosen.jobs)
    if chosen.parts == ["reach"]:
        return
    lines = reach.Reach(traces, ROOT)
    results = Results(chosen.results or folder / "results.jsonl", ROOT)
    mutants = drawing.draw(ROOT, chosen.seed, chosen.count)
    print(f"seed {chosen.seed}: {len(mutants)} mutants of the Python package drawn", flush=True)
    tried = [mutant for mutant in mutants if not only or mutant.key in only]
    trials.import_once()
    judge = Judge(ROOT, packages, work, lines)
    if "python" in chosen.parts:
        try_all(tried, results, judge, packages, lines, chosen.jobs)
    engine = engine_trials.Engine(ROOT, folder / "engine", jobs=chosen.jobs)
    if "engine" in chosen.parts:
        engine_trials.try_engine(ROOT, table, results, judge, packages, engine)
    if "suite" in chosen.parts:
        survivors.meet_all(ROOT, tried, table, results, judge, packages, engine, chosen.jobs)
    _write_report(chosen, folder, results, mutants)


def _write_report(chosen: argparse.Namespace, folder: Path, results: Results, mutants: list[drawing.Mutant]) -> None:
    path: Path = chosen.report or folder / "report.md"
    python = [result for mutant in mutants if (result := results.get(mutant.key))]
    engine = [result for mutation in engine_trials.MUTATIONS if (result := results.get(mutation.key))]
    print(report.write(path, ROOT, seed=chosen.seed, drawn=len(mutants), python=python, engine=engine))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
