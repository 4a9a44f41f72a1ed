"""``run.step`` equals the loop it stands for, bit for bit: families x microbatches x keep or recompute x budgets.

By default a sample in which every pair of choices meets, but for one microbatch and for many, which a few families
have; with the mark ``full`` every pair and every triple, in more steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from hydra_ext import _C
from support.models.zoo import FAMILIES
from support.models.zoo_more import MORE_FAMILIES
from support.pairwise import Row, covering_rows
from support.rounds.rounds import (
    DIVERGENT,
    STEPS,
    Plan,
    Seen,
    activations_of_rounds,
    build_optimizer,
    differences,
    train_loop,
    train_rounds,
)
from support.runtime.offloaded import offloaded, updated_bytes
from support.training import parameter_bytes

EVERY_FAMILY = {**FAMILIES, **MORE_FAMILIES}
ROOM_FOR_ALL = 400
SMALL = ("normed",)  # all its weights are less than the scratch of one convolution
SMALL_IN_BF16 = ("resnet",)  # the same on processors whose units for bfloat16 need more scratch
FEW_STEPS = 3
MANY = 8  # microbatches
BY_DEFAULT = {MANY: ("llama", "mixtral", "unet", "dynamic"), 1: ("gpt2", "t5", "tied_llama", "resnet")}
CHOICES: dict[str, list[Any]] = {
    "family": list(EVERY_FAMILY),
    "m": [3, 1, MANY],
    "recompute": [False, True],
    "percent": [30, ROOM_FOR_ALL],
    "size": ["all", "some"],
    "autocast": [False, True],
    "clip": [False, True],
}


@dataclass(frozen=True)
class Case:
    """``percent``: room for so much of the parameters beside what the microbatches' activations take."""

    family: str
    m: int
    recompute: bool
    percent: int
    size: str
    autocast: bool
    clip: bool

    def __str__(self) -> str:
        words = [self.family, f"m{self.m}", "recompute" if self.recompute else "keep", f"{self.percent}%", self.size]
        return "-".join(words + ["autocast"] * self.autocast + ["clip"] * self.clip)

    @property
    def round_size(self) -> int:
        return self.m if self.size == "all" else -(-self.m // 2)

    def rounds(self) -> list[int]:
        return [min(self.round_size, self.m - first) for first in range(0, self.m, self.round_size)]


def _allowed(row: Row) -> bool:
    return not (row.get("m") == 1 and row.get("size") == "some")


def _allowed_by_default(row: Row) -> bool:
    families = BY_DEFAULT.get(row.get("m", 3))
    return _allowed(row) and (families is None or row.get("family", families[0]) in families)


SAMPLE = [Case(**row) for row in covering_rows(CHOICES, allowed=_allowed_by_default)]
PAIRS, TRIPLES = (
    [Case(**row) for row in covering_rows(CHOICES, strength=strength, allowed=_allowed)] for strength in (2, 3)
)


def check_equal_to_loop(case: Case, steps: int) -> None:
    family, plan = EVERY_FAMILY[case.family], Plan(m=case.m, clip=case.clip, autocast=case.autocast)
    batches = family.batches(1, steps * case.m)
    plain = family.make(0)
    expected = train_loop(plain, family.loss, batches, plan, steps=steps)
    assert all(torch.isfinite(loss) for loss in expected.losses)

    model = family.make(0)
    optimizer = build_optimizer(model, plan)
    choices = {"round_size": case.round_size, "recompute": case.recompute}
    activations = activations_of_rounds(family, plan, batches, **choices)
    room = 2**16 if case.family in SMALL else 3 * max(parameter.nbytes for parameter in model.parameters())
    budget = activations + room + case.percent * parameter_bytes(model) // 100
    with offloaded(model, optimizer, budget=budget) as observed:
        given = (observed.run, model, family.loss, batches, plan)
        seen = train_rounds(*given, steps=steps, after_step=observed.note, **choices)
        assert len(observed.reports) == steps
        assert differences(seen, expected) == []
        _check_reports(case, observed, expected)


def _check_reports(case: Case, observed: Any, expected: Seen) -> None:
    run, reports = observed.run, observed.reports
    last = reports[-1]
    assert last.windows >= 2 * len(reports) * len(case.rounds())
    assert (last.rounds, last.refusals, last.fallbacks) == (len(reports) * len(case.rounds()), 0, 0)
    if case.family in DIVERGENT:
        return
    # A static model: its blocks are passed in the same order however many microbatches there are.
    passes = [len(run.core.pager.recorded(kind)) for kind in (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)]
    for before, after in pairwise(reports[1:]):
        loads = after.loads - before.loads
        assert loads <= len(case.rounds()) * sum(passes), "a block was moved more than once in a pass"
        # The first round's gradients leave once for all its microbatches; what others add is summed on the host.
        leaving = 1 + sum(case.rounds()[1:])
        assert after.gradients_moved_bytes - before.gradients_moved_bytes == leaving * expected.gradient_bytes(2)
        if case.percent != ROOM_FOR_ALL:
            small = case.family in SMALL or (case.autocast and case.family in SMALL_IN_BF16)
            assert after.evictions > before.evictions or small, "there was room for everything"
        else:
            assert after.weights_moved_bytes - before.weights_moved_bytes == updated_bytes(run)


@pytest.mark.every_case
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sample_with_every_pair_of_choices_steps_as_the_loop_does(case: Case) -> None:
    check_equal_to_loop(case, FEW_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("case", list(dict.fromkeys(PAIRS + TRIPLES)), ids=str)
def test_every_triple_of_choices_steps_as_the_loop_does(case: Case) -> None:
    check_equal_to_loop(case, STEPS)
