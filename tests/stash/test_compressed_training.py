"""benchmarks/compressed_training.py runs, counts what it says, and says so when training begins differently."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MAIN = "benchmark.main(['--tiny', '--seeds', '2', '--out', {out!r}])"
# Within such a bound nothing of a layer's input can be left out.
NEARLY_EXACT = """
import torch
from dataclasses import replace
torch.set_num_threads(1)
study = benchmark.studies(tiny=True)[0]
policies = {benchmark.PLAIN: None, benchmark.DEFAULT: hydra_ext.Compress(error=1e-7)}
print(*benchmark.judge(benchmark.run_all(replace(study, policies=policies), 2)), sep="\\n")
"""
# What backward takes comes back as zeros, in the first step already.
SPOILED = """
from torch.autograd.graph import saved_tensors_hooks
stash = hydra_ext.stash
class Spoils(saved_tensors_hooks):
    def __init__(self, policy, **_):
        super().__init__(lambda tensor: tensor.detach(), lambda tensor: tensor * 0)
        self.report = stash(policy, device="simulated").report
hydra_ext.stash = Spoils
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])}
    program = f"import hydra_ext, compressed_training as benchmark\n{program}"
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    ended = run(MAIN.format(out=str(folder)))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def cells_of(printed: str, case: str) -> list[list[str]]:
    """Of the rows that are called so, one for each model."""
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith(f"| {case} |")]
    return [[cell.strip() for cell in row] for row in rows]


def test_ratios_are_those_of_the_bytes(printed: str) -> None:
    cnn, gpt2 = cells_of(printed, "Compress()")
    assert all(float(cell) >= 5 for cell in cnn[3:7])  # all, convolutions, linear layers, the rest
    assert cnn[7] == gpt2[7] == "1.00%"
    assert 1 < float(gpt2[3]) < float(gpt2[5])  # linear layers' inputs alone
    for model, ratio in (("CNN", cnn[3]), ("GPT-2", gpt2[3])):
        (saved,) = re.findall(rf"{model}: a step saves (\d+) bytes", printed)
        ((held, times),) = re.findall(rf"{model}, .* the stash has (\d+) bytes, ([0-9.]+) times", printed)
        assert float(times) == pytest.approx(int(saved) / int(held), abs=0.01)
        assert 0.75 * float(ratio) <= float(times) <= 1.1 * float(ratio)


def test_larger_errors_take_fewer_bytes(printed: str) -> None:
    cnn, _ = cells_of(printed, "Compress()")
    (coarser,) = cells_of(printed, "fraction 0.05")
    assert float(coarser[3]) > float(cnn[3])
    assert coarser[7] == "5.00%"


def test_verdicts_are_those_of_the_goals(printed: str) -> None:
    scores = re.findall(r"differs from plain by ([-+0-9.]+), the noise of seeds is ([0-9.]+): (\w+)", printed)
    assert len(scores) == 2
    for difference, noise, verdict in scores:
        assert verdict == ("holds" if abs(float(difference)) <= float(noise) else "MISSED")
    assert re.findall(r"stored ([0-9.]+) times smaller: at least 5 (\w+)", printed)[0][1] == "holds"


def test_a_bound_that_saves_too_little_misses_the_goal() -> None:
    ended = run(NEARLY_EXACT)
    assert ended.returncode == 0, ended.stderr
    ((ratio, verdict),) = re.findall(r"stored ([0-9.]+) times smaller: at least 5 (\w+)", ended.stdout)
    assert float(ratio) < 5
    assert verdict == "MISSED"


def test_curves_have_every_run(printed: str, folder: Path) -> None:
    (path,) = folder.glob("*-compressed-training.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    runs = {tuple(row[:3]) for row in rows[1:]}
    cases = [("CNN", case) for case in ("plain", "Compress()", "fraction 0.05", "bound 0.1")]
    cases += [("GPT-2", "plain"), ("GPT-2", "Compress()")]
    assert runs == {(*case, seed) for case in cases for seed in "01"}
    assert len(rows) == 1 + 10 * len(runs)
    assert len([*folder.glob("*-compressed-training.png")]) == 1


def test_training_that_begins_differently_is_refused(tmp_path: Path) -> None:
    ended = run(SPOILED + MAIN.format(out=str(tmp_path)))
    assert ended.returncode != 0
    assert "CNN, Compress() begins with losses" in ended.stderr
    assert not [*tmp_path.iterdir()]
