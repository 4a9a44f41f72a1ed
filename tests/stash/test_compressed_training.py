"""benchmarks/compressed_training.py runs, counts what it says, and says so when training begins differently."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The whole benchmark, with little to be scored by.
MAIN = """
import small_trainings
small_trainings.PIECES = 2
learnt, unseen = small_trainings.digits()
few = small_trainings.Digits(unseen.images[:100], unseen.classes[:100])
small_trainings.digits = lambda: (learnt, few)
benchmark.main(["--tiny", "--seeds", "2", "--out", {out!r}])
"""
# So few steps that each is a point of the curve, and only the CNN's default.
SHORT = """
from dataclasses import replace
def short(policy):
    (study, _) = benchmark.studies(tiny=True)
    training = replace(study.training, steps=benchmark.POINTS)
    policies = {benchmark.PLAIN: None, benchmark.DEFAULT: policy}
    return replace(study, training=training, policies=policies)
"""
# Within such a bound nothing of a layer's input can be left out.
NEARLY_EXACT = """
print(*benchmark.judge(benchmark.run_all(short(hydra_ext.Compress(error=1e-7)), 2)), sep="\\n")
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
chosen = short(benchmark.DEFAULT_POLICY)
benchmark.studies = lambda *, tiny: [chosen]
benchmark.main(["--seeds", "2", "--out", {spoiled!r}])
"""
NEXT = "\nprint(chr(12))\n"


@dataclass(frozen=True)
class Ended:
    """A process that ran all programs, of which the last one fails.

    Attributes:
        printed: By the whole benchmark.
        nearly_exact: The judgement of a bound that saves too little.
        spoiled: The error of a stash that gives zeros.
        folder: The whole benchmark's results.
        spoiled_folder: Where results would be that are not to be there.
    """

    printed: str
    nearly_exact: str
    spoiled: str
    folder: Path
    spoiled_folder: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder, spoiled = (tmp_path_factory.mktemp(name) for name in ("results", "spoiled"))
    programs = [MAIN.format(out=str(folder)), SHORT + NEARLY_EXACT, SPOILED.format(spoiled=str(spoiled))]
    program = "import torch, hydra_ext, compressed_training as benchmark\ntorch.set_num_threads(1)\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "ignore", "-c", program + NEXT.join(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.stdout.count("\f") == 2, done.stderr
    assert done.returncode != 0
    printed, nearly_exact, _ = done.stdout.split("\f")
    return Ended(printed, nearly_exact, done.stderr, folder, spoiled)


@pytest.fixture(scope="module")
def printed(ended: Ended) -> str:
    return ended.printed


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


def test_a_bound_that_saves_too_little_misses_the_goal(ended: Ended) -> None:
    ((ratio, verdict),) = re.findall(r"stored ([0-9.]+) times smaller: at least 5 (\w+)", ended.nearly_exact)
    assert float(ratio) < 5
    assert verdict == "MISSED"


def test_curves_have_every_run(ended: Ended) -> None:
    (path,) = ended.folder.glob("*-compressed-training.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    runs = {tuple(row[:3]) for row in rows[1:]}
    cases = [("CNN", case) for case in ("plain", "Compress()", "fraction 0.05", "bound 0.1")]
    cases += [("GPT-2", "plain"), ("GPT-2", "Compress()")]
    assert runs == {(*case, seed) for case in cases for seed in "01"}
    assert len(rows) == 1 + 10 * len(runs)
    assert len([*ended.folder.glob("*-compressed-training.png")]) == 1


def test_training_that_begins_differently_is_refused(ended: Ended) -> None:
    assert "CNN, Compress() begins with losses" in ended.spoiled
    assert not [*ended.spoiled_folder.iterdir()]
