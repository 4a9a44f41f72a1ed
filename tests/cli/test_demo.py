"""The demo, small: equal numbers, a report, and a picture."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest


def demo(folder: Path, *more: str) -> tuple[str, bytes]:
    picture = folder / "memory.png"
    small = ["--steps", "3", "--layers", "2", "--width", "64", "--budget", "4MiB", "--picture", str(picture), *more]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hydra_ext", "demo", *small],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, picture.read_bytes()


def size_of(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def test_the_demo_compares_every_step_and_draws_the_memory(tmp_path: Path) -> None:
    printed, picture = demo(tmp_path)
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert [row[3] for row in rows] == ["yes", "yes", "yes"]
    assert all(row[1] == row[2] for row in rows)
    assert "All losses equal, bit for bit: True. All weights equal after training: True." in printed
    assert size_of(picture) == (1200, 1080)


@pytest.mark.full
def test_what_became_of_saved_tensors_is_drawn_below(tmp_path: Path) -> None:
    printed, picture = demo(tmp_path, "--activations", "compress")
    assert size_of(picture) == (1200, 1080)
    assert "times smaller; errors of their gradients at most 1.00%" in printed
    printed, picture = demo(tmp_path, "--activations", "offload")
    assert size_of(picture) == (1200, 1080)
    assert "All losses equal, bit for bit: True. All weights equal after training: True." in printed
