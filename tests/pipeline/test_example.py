"""The examples run under torchrun as they are written, and their losses do not depend on how many ranks there are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Losses to the last bit, of smaller models without a weight in two places, whose gradients would be added in another
# order.
TEXT = (
    ("n_layer=8, n_embd=256", "n_layer=4, n_embd=32, tie_word_embeddings=False"),
    ("{out.loss.item():.4f}", "{out.loss.item().hex()}"),
    ("view(20, 16, 64)", "view(20, 16, 64)[:10]"),
)
REMEDIES = (
    ("n_embd=64", "n_embd=32, tie_word_embeddings=False"),
    ("STEPS, WARM_UP, RATE = 120, 24, 3e-3", "STEPS, WARM_UP, RATE = 6, 3, 3e-3"),
    ("{loss:.4f}", "{loss.hex()}"),
)


def run(example: str, changes: Sequence[tuple[str, str]], folder: Path, processes: int) -> list[list[str]]:
    """By rank, the lines that it prints."""
    folder.mkdir()
    program = (EXAMPLES / example).read_text()
    for old, new in changes:
        assert old in program
        program = program.replace(old, new)
    script = folder / "train.py"
    # Past the interpreter's end, where gloo's threads may abort a process, whatever it has trained with.
    script.write_text(program + "\n__import__('sys').stdout.flush()\n__import__('os')._exit(0)\n")
    apart = ["--redirects", "3", "--log-dir", str(folder / "logs")]
    count = ["--nproc-per-node", str(processes)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *count, *apart, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun gives several processes: one order of sums
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False, env=environment)
    errors = "\n".join(path.read_text() for path in sorted((folder / "logs").rglob("stderr.log")))
    assert done.returncode == 0, done.stderr + errors
    outputs = {int(path.parent.name): path.read_text() for path in (folder / "logs").rglob("stdout.log")}
    return [outputs[rank].splitlines() for rank in range(processes)]


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_the_example_gives_the_losses_of_one_process(processes: int, tmp_path: Path) -> None:
    (alone,) = run("pipeline_text.py", TEXT, tmp_path / "alone", 1)
    first, *others = run("pipeline_text.py", TEXT, tmp_path / "together", processes)
    assert [line.split(":")[0] for line in first[:2]] == ["step 5", "step 10"]
    assert first[:2] == alone[:2]
    for report in (first[2:], alone[2:]):
        assert any("approximate" in line for line in report), report
    assert others == [[]] * (processes - 1)


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 3])
def test_remedies_are_compared_with_the_losses_of_one_process(processes: int, tmp_path: Path) -> None:
    (alone,) = run("pipeline_remedies.py", REMEDIES, tmp_path / "alone", 1)
    first, *others = run("pipeline_remedies.py", REMEDIES, tmp_path / "together", processes)
    assert first == alone
    assert len({line.split()[-1] for line in first}) == len(first) == 6  # each trains in its own way
    assert others == [[]] * (processes - 1)
