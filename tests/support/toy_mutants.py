"""A toy package with a few tests, and the results of the mutation runner on it, in a separate process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest  # noqa: F401 - once, before runs are forked

from mutants import reach, survivors
from mutants.drawing import Mutant, sources
from mutants.packages import Packages
from mutants.python_trials import Judge, try_all, wait
from mutants.results import Results
from mutants.trials import Trial

SOURCE = """
def half(n):
    return n // 2

def doubled(n):
    return n * 2

def slow(n):
    return n - 1
"""
FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["-p", "xdist.plugin", "--import-mode=importlib"]\n',
    "hydra_ext/__init__.py": "",
    "hydra_ext/one.py": SOURCE,
    "tests/whole/test_one.py": """
import subprocess
import sys

from hydra_ext.one import doubled, half

def test_half():
    assert half(5) == 2

def test_doubled():
    doubled(2)

def test_process():
    subprocess.run([sys.executable, "-c", "from hydra_ext.one import slow; slow(1)"], check=True)
""",
    "tests/zlast/test_text.py": """
from importlib.util import find_spec
from pathlib import Path

def test_text():
    assert "n * 2" in Path(find_spec("hydra_ext.one").origin).read_text()
""",
}
ODD = {
    "test_in.py": "def test_in():\n open('here', 'w').close()\n while True: pass\n",
    "test_between.py": "open('here', 'w').close()\nwhile True: pass\n",
    "test_dies.py": "import os\ndef test_dies(): os.kill(os.getpid(), 9)\n",
    "test_dead.py": "import os\nos.kill(os.getpid(), 9)\ndef test_it(): pass\n",
}
CHANGES = {"half": "return n // 3", "doubled": "return n + 2", "slow": "return n + 1"}


def main() -> None:
    root, work, found = Path(sys.argv[1]) / "root", Path(sys.argv[1]) / "work", dict[str, Any]()
    _write(root, FILES)
    work.mkdir()
    packages = Packages(root, work)
    traces = work / "reach"
    reach.trace(root, packages.plain, traces, workers=1)
    chosen = {name: _mutant(root, name) for name in CHANGES}
    lines = reach.Reach(traces, root)
    found["reach"] = _reached(lines, chosen)
    results, judge = Results(root / "results.jsonl", root), Judge(root, packages, work, lines)
    try_all(list(chosen.values()), results, judge, packages, lines, 1)
    found["own tests"] = _became(results, chosen)
    engine: Any = None
    survivors.meet_all(root, list(chosen.values()), [], results, judge, packages, engine, 1)
    found["whole suite"] = _became(results, chosen)
    found["endings"] = _endings(root, packages, work)
    found["traced again"] = _traced_again(root, packages, traces)
    moved = {name: _mutant(root, name) for name in CHANGES}
    found["reach after lines were added above"] = _reached(reach.Reach(traces, root), moved)
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(found))


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _mutant(root: Path, function: str) -> Mutant:
    mutants = [mutant for source in sources(root) for mutant in source.all_mutants()]
    (found,) = [m for m in mutants if m.function == function and m.change[1:] == (f"+ {CHANGES[function]}",)]
    return found


def _reached(lines: reach.Reach, mutants: dict[str, Mutant]) -> dict[str, list[str]]:
    return {name: [test.name for test in lines.tests(mutant)] for name, mutant in mutants.items()}


def _became(results: Results, mutants: dict[str, Mutant]) -> dict[str, list[str]]:
    rows = {name: results.get(mutant.key) for name, mutant in mutants.items()}
    return {name: [row.outcome.value, row.by] if row else [] for name, row in rows.items()}


def _endings(root: Path, packages: Packages, work: Path) -> dict[str, dict[str, str]]:
    _write(root / "tests" / "odd", ODD)
    half = {"hydra_ext/one.py": SOURCE.replace("n // 2", "n - 2")}
    runs = {
        "passes": (packages.plain, "whole"),
        "fails": (packages.changed(half), "whole"),
        "hangs in a test": (packages.plain, "odd/test_in.py"),
        "hangs between tests": (packages.plain, "odd/test_between.py"),
        "dies in a test": (packages.plain, "odd/test_dies.py"),
        "dies between tests": (packages.plain, "odd/test_dead.py"),
        "dies at import": (packages.changed({"hydra_ext/__init__.py": ODD["test_dead.py"]}), "whole"),
        "no import": (packages.changed({"hydra_ext/__init__.py": "1 / 0"}), "whole"),
        "no collection": (packages.changed({"hydra_ext/one.py": "1 / 0"}), "whole/test_one.py"),
    }
    found = {}
    for kind, (package, word) in runs.items():
        trial = Trial(package, [word], root=root, folder=work, limit=600.0)
        if "hangs" in kind:
            here = root / "tests" / "here"
            while not here.exists():  # a test can only be seen to hang once it has begun
                assert trial.ending() is None
            here.unlink()
            trial._deadline = 0.0
        found[kind] = wait(trial).failed
    shutil.rmtree(root / "tests" / "odd")
    return found


def _traced_again(root: Path, packages: Packages, traces: Path) -> list[list[str]]:
    found = []
    one, tests = root / "hydra_ext/one.py", root / "tests/whole/test_one.py"
    for path, added in ((one, "# more\n"), (tests, "# more\n")):
        path.write_text(added + path.read_text())
        before = {done: done.stat().st_mtime_ns for done in traces.glob("*/done")}
        reach.trace(root, packages.plain, traces, workers=1)
        after = {done: done.stat().st_mtime_ns for done in traces.glob("*/done")}
        found.append([done.parent.name for done in before if before[done] != after[done]])
    return found


if __name__ == "__main__":
    main()
