"""Random numbers that are not torch's own, and modes that a stage's end cuts through, in several processes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from support.ranks import run_ranks
from support.split.split_models_own import text, text_loss
from support.split.split_side_effects import FrozenBelow, Training, train, train_frozen, train_plainly

CASES = [
    Training(loss, cuts, recompute)
    for loss in ("denoising", "mixing")
    for cuts, recompute in ((None, False), (("layers.2",), False), (None, True))
]


def test_numbers_from_other_generators_are_those_of_a_plain_loop_on_every_rank(tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(train, CASES, folder=tmp_path)):
        for case, result in zip(CASES, results, strict=True):
            assert torch.equal(result["losses"], train_plainly(case)), (rank, case)


def test_the_generators_of_python_and_numpy_are_left_where_they_were(tmp_path: Path) -> None:
    for rank, (result,) in enumerate(run_ranks(train, [Training("mixing")], folder=tmp_path)):
        expected = [random.Random(rank).random(), float(np.random.RandomState(rank).rand())]
        assert result["numbers"] == expected, rank


def test_a_cut_where_gradients_are_off_leaves_them_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FrozenBelow()
    generator = torch.Generator().manual_seed(1)
    expected = torch.stack([text_loss(model, text(generator)) for _ in range(2)]).detach()
    for result in run_ranks(train_frozen, ["layers.1"], folder=tmp_path):
        assert torch.equal(result["losses"], expected)
        assert result["grad mode"]
