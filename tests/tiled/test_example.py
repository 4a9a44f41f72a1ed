"""The example runs as it is written, on real photographs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_sample_images

from support.models.unets import EXAMPLE, example


def test_photographs_are_tiled_up_and_mirrored() -> None:
    image = example.photographs(1000, 1400)
    assert image.shape == (1, 3, 1000, 1400)
    assert image.dtype == torch.uint8
    for left, photograph in zip((0, 640), load_sample_images().images, strict=True):
        expected = torch.from_numpy(photograph.copy()).permute(2, 0, 1)
        assert torch.equal(image[0, :, :427, left : left + 640], expected)
    assert torch.equal(image[:, :, 427:854, :1280], image[:, :, :427, :1280].flip(2))
    assert torch.equal(image[:, :, 854:, 1280:], image[:, :, :146, :120])
    assert image.float().std() > 30


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [["--model", "g2"], ["--model", "g1", "--recompute"], ["--model", "g1"]],
)
def test_the_example_agrees_with_a_step_at_once(options: list[str]) -> None:
    size = ["--height", "448", "--width", "640", "--budget", "8MiB", "--steps", "2", "--device", "simulated"]
    command = [sys.executable, str(EXAMPLE), *size, *options, "--check", "--check64"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as everywhere in the tests
    printed = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=True, env=environment).stdout
    losses = [float(found) for found in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert re.search(r"peak [\d.]+ MiB .* of 8\.00 MiB", printed)
    at_once, strips = (float(found) for found in re.findall(r"loss ([\d.]+) \(strips ([\d.]+)", printed)[0])
    assert abs(at_once - strips) < 2e-7
    farther, untiled = (float(found) for found in re.findall(r"are ([\d.e+-]+) of all away", printed))
    assert farther <= 2 * untiled
