"""The demo, small: equal numbers, a report, and a picture."""

import subprocess
import sys
from pathlib import Path


def test_the_demo_compares_every_step_and_draws_the_memory(tmp_path: Path) -> None:
    picture = tmp_path / "memory.png"
    small = ["--steps", "3", "--layers", "2", "--width", "64", "--budget", "4MiB", "--picture", str(picture)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hydra_ext", "demo", *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert [row[3] for row in rows] == ["yes", "yes", "yes"]
    assert all(row[1] == row[2] for row in rows)
    assert "All losses equal, bit for bit: True. All weights equal after training: True." in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
