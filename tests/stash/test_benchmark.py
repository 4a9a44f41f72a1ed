"""benchmarks/activations.py runs, counts what it says, and does not time what changes the numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = "import activations; activations.main(['--tiny', '--rounds', '2'])"
# What it saves comes back as zeros.
SPOILED = """
from torch.autograd.graph import saved_tensors_hooks
import activations
spoils = lambda setting: saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor * 0)
activations.CANDIDATES.append(activations.Candidate("one more", spoils))
"""
COUNTED = re.compile(r"\(bytes\) (.+?), (.+): ([0-9.]+) MiB, ([0-9.]+)% of keep")


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.fixture(scope="module")
def printed() -> str:
    ended = run(RUN)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_what_leaves_is_not_held(printed: str) -> None:
    shares = {(model, name): float(share) for model, name, _, share in COUNTED.findall(printed)}
    ours = ("Offload", "Offload, 1/8", "conv", "dynamic, 5/8", "Compress", "Compress, 1/2")
    names = (*ours, "save_on_cpu", "streamed copies")
    assert set(shares) == {(model, name) for model in ("VGG-16", "GPT-2") for name in names}
    for (model, name), share in shares.items():
        # Of so little what is on its way is much, unless there is room for none.
        if name in ("Offload", "Offload, 1/8"):
            assert share < 75, shares
        if name == "conv":  # the other model has no convolutions
            assert share < 100 if model == "VGG-16" else share == 100, shares


def test_verdicts_are_those_of_the_goals(printed: str) -> None:
    verdicts = re.findall(r"([0-9.]+)% of keep: at most 50% (\w+)", printed)
    assert len(verdicts) == 4
    for share, verdict in verdicts:
        assert verdict == ("holds" if float(share) <= 50 else "MISSED")


def test_what_changes_gradients_is_not_timed() -> None:
    ended = run(SPOILED + RUN)
    assert ended.returncode != 0
    assert "one more changes the gradients of VGG-16" in ended.stderr
    assert "(time)" not in ended.stdout
