"""Reference problems of planners, solved: how many objectives are equal, and how long the slowest problem takes.

``--data`` is a folder with ``pipedream/reference.json`` and ``pipedream/profiles``, ``twobw/*.json`` and
``twobw/inputs``, and ``chains/*.json``; folders that are missing are left out. Objectives are equal if they differ by
at most one part in 10^6. For ``unequal_split`` the reference is Piper's plan, and a faster one counts as better.
Profiles without reference values are solved on 16 machines and on 4 * 4.

    python benchmarks/planner.py --data FOLDER [--kind KIND ...]

Prints a table, and each entry that is worse. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_ext.plan import solve

SAME = 1e-6


@dataclass(frozen=True)
class Entry:
    """A problem, and the objective that its reference has; None if nothing fits."""

    name: str
    problem: dict[str, Any]
    reference: float | None


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def pipedream(folder: Path) -> Iterator[Entry]:
    for entry in read(folder / "pipedream/reference.json")["entries"]:
        profile = read(folder / "pipedream/profiles" / f"{entry['profile']}.json")
        name = f"{entry['profile']} on {entry['machines']}"
        yield Entry(name, {**entry, "profile": profile}, entry["own_objective_ms"])


def large_profiles(folder: Path) -> Iterator[Entry]:
    """Those that the published optimizer has too many cuts for."""
    known = {entry["profile"] for entry in read(folder / "pipedream/reference.json")["entries"]}
    for path in sorted((folder / "pipedream/profiles").glob("*.json")):
        for machines, links in [([16], [1e9]), ([16], [1e10]), ([4, 4], [1e10, 1.25e9])]:
            for transfers in (True, False):
                if path.stem not in known:
                    problem = {
                        "profile": read(path),
                        "machines": machines,
                        "bandwidth_bytes_per_s": links,
                        "memory_cap_bytes": None,
                        "straight": False,
                        "hierarchical": len(machines) == 2,
                        "use_fewer_machines": False,
                        "activation_transfers_in_objective": transfers,
                    }
                    yield Entry(f"{path.stem} on {machines}", problem, None)


def splits(folder: Path, reference: str) -> Iterator[Entry]:
    for entry in read(folder / "twobw/piper_equal_split.json")["entries"]:
        model = read(folder / "twobw/inputs" / f"{entry['model']}.json")
        name = f"{entry['model']} on {entry['devices']} of {entry['memory_bytes'] / 2**30:g} GiB"
        yield Entry(name, {**entry, "model": model}, entry.get(reference))


def tables(folder: Path, file: str, reference: Callable[[Any], float | None]) -> Iterator[Entry]:
    for number, entry in enumerate(read(folder / "twobw" / file)["entries"]):
        yield Entry(f"entry {number}", entry["inputs"], reference(entry))


def chains(folder: Path) -> Iterator[Entry]:
    for path in sorted((folder / "chains").glob("*.json")):
        chain = read(path)
        for case in chain["cases"]:
            for kind in ("persistent", "flat"):
                problem = {**chain, "memory_limit": case["memory_limit"], "class": kind}
                yield Entry(f"{path.stem}, {kind}, {case['memory_limit']}", problem, case[f"optimum_{kind}"])


KINDS: dict[str, tuple[str, Callable[[Path], Iterator[Entry]]]] = {  # the folder of each, and its entries
    "pipedream": ("pipedream", pipedream),
    "pipedream, large": ("pipedream", large_profiles),
    "equal_split": ("twobw", lambda folder: splits(folder, "equal_split_time_per_microbatch")),
    "unequal_split": ("twobw", lambda folder: splits(folder, "piper_time_per_microbatch")),
    "width_depth": (
        "twobw",
        lambda folder: tables(
            folder,
            "published_w_d_planner.json",
            lambda entry: (entry["reference"] or {}).get("objective_s_per_microbatch"),
        ),
    ),
    "twobw": (
        "twobw",
        lambda folder: tables(
            folder, "paper_cost_model.json", lambda entry: (entry["optimum"] or {}).get("throughput")
        ),
    ),
    "chain": ("chains", chains),
}


def verdict(kind: str, found: float | None, reference: float | None) -> str:
    if kind in ("unequal_split", "pipedream, large") and reference is None:
        return "no reference"  # Piper's plan is not recorded wherever it is no faster than equal stages
    if found is None or reference is None:
        return "equal" if found is reference else "worse"
    if abs(found - reference) <= SAME * abs(reference):
        return "equal"
    return "better" if (found > reference) == (kind == "twobw") else "worse"


def row(kind: str, entries: Iterator[Entry]) -> tuple[str, list[str]]:
    counts: dict[str, int] = {}
    longest, proved, widest, worse = 0.0, 0, 0.0, []
    for entry in entries:
        begun = time.perf_counter()
        found = solve(kind.partition(",")[0], entry.problem)
        longest = max(longest, time.perf_counter() - begun)
        proved += found.objective is None or found.gap == 0
        widest = max(widest, found.gap or 0)
        judged = verdict(kind, found.objective, entry.reference)
        counts[judged] = counts.get(judged, 0) + 1
        if judged == "worse":
            worse.append(f"{kind}, {entry.name}: {found.objective}, reference {entry.reference}")
    numbers = [sum(counts.values()), *(counts.get(name, 0) for name in ("equal", "better", "no reference", "worse"))]
    return f"| {kind} | {' | '.join(map(str, numbers))} | {proved} | {100 * widest:.2f} % | {longest:.2f} |", worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    print("| kind | entries | equal | better | no reference | worse | proved | worst gap | worst seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed: list[str] = []
    for kind in options.kind:
        folder, entries = KINDS[kind]
        if (options.data / folder).is_dir():
            line, worse = row(kind, entries(options.data))
            print(line, flush=True)
            failed += worse
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
