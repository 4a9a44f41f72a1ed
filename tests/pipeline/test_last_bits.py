"""To the last bit, losses and weights are those of plain PyTorch, however lies in memory what goes between stages."""

from __future__ import annotations

from pathlib import Path

from support.plain import last_bits
from support.plain.last_bits import cases, differing, microbatches
from support.ranks import run_ranks


def test_from_rank_to_rank(tmp_path: Path) -> None:
    for found in run_ranks(last_bits.across_ranks, folder=tmp_path):
        assert {name: what for name, what in found.items() if what} == {}


def test_from_stage_to_stage_of_one_rank() -> None:
    for name, (first, second, x, loss_of) in cases().items():
        assert differing([first, second], x, loss_of, [0, 1], schedule="interleaved") == [], name


def test_what_is_run_again() -> None:
    for name, (model, x, loss_of) in microbatches().items():
        assert differing([model], x, loss_of, [0], schedule="1f1b", recompute=True) == [], name
