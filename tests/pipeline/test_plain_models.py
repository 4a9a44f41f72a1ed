"""Plain, unmodified models over several processes give what they give in one, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.plain.plain_models import SUBJECTS, WIDE, Case, Rank, check, train_all
from support.ranks import run_ranks

ROOMY = 10**8  # poisoned hosts tell whether all that is computed with came to the device

# Each is difficult in another way; the marked tests below have all models.
SAMPLE = {  # by the number of processes
    2: [
        Case("functional", schedule="2bw"),
        Case("mixtral_router", materialized=True),
        Case("denoiser", schedule="2bw", recompute=True),
        Case("gpt2", cuts=("transformer.h.2",)),
        Case("t5_dropout", schedule="2bw", optimizer="sgd"),
        Case("resnet", schedule="2bw", optimizer="sgd", materialized=True),
        Case("branches", schedule="2bw"),
        Case("catches_all"),
    ],
    3: [
        Case("qwen2", 3, schedule="2bw", optimizer="native-adamw", max_norm=0.5),
        Case("in_place", 3, cuts=("layers.1", "layers.3"), materialized=True),
        Case("on_modules", 3, schedule="2bw", microbatches=3),
        Case("whisper", 3, schedule="2bw", optimizer="sgd"),
        Case("resnet_dropout", 3, recompute=True),
        Case("recurrent", 3, schedule="2bw", materialized=True),
    ],
    4: [
        Case("unet", 4, schedule="2bw", cuts=("down.2", "wider.0", "wider.2")),
        Case("bert", 4, materialized=True),
        Case("resnet", 2, schedule="2bw", optimizer="native-adamw", max_norm=0.5, replicas=2),
        Case("translator_dropout", 4),
        Case("repeats", 4, schedule="2bw", microbatches=3),
        Case("gpt2", 2, replicas=2, materialized=True),
    ],
}


FEW = 3  # of each number: the first ones are as different as so few can be


def check_all(cases: Sequence[Case], folder: Path) -> None:
    (size,) = {case.stages * case.replicas for case in cases}
    ranks = run_ranks(train_all, cases, folder=folder, size=size)
    for number, case in enumerate(cases):
        check(case, [Rank(**results[number]) for results in ranks])


@pytest.mark.cases(1)
@pytest.mark.parametrize("processes", SAMPLE)
@pytest.mark.parametrize("part", [slice(FEW), pytest.param(slice(FEW, None), marks=pytest.mark.full)])
def test_stages_in_processes_train_as_one_process_does(part: slice, processes: int, tmp_path: Path) -> None:
    check_all(SAMPLE[processes][part], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("materialized", [False, True])
def test_a_rank_holds_its_stage_and_at_most_a_hundredth_more(materialized: bool, tmp_path: Path) -> None:
    case = Case(WIDE.name, 4, schedule="2bw", materialized=materialized)
    ranks = [Rank(**result) for (result,) in run_ranks(train_all, [case], folder=tmp_path, size=4)]
    check(case, ranks)
    own = [sum(weight.nbytes for weight in rank.weights.values()) for rank in ranks]
    assert sum(own) == sum(parameter.nbytes for parameter in WIDE.make().parameters())
    for rank, held in zip(ranks, own, strict=True):
        assert held <= rank.resident <= 1.01 * held


@pytest.mark.parametrize(
    "name", ["functional", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama_mask", "t5_dropout"))]
)
def test_a_budget_changes_nothing(name: str, tmp_path: Path) -> None:
    check_all([Case(name, schedule="gpipe", budget=ROOMY)], tmp_path)


_NAMES = list(SUBJECTS)
_GROUPS = [_NAMES[start : start + 4] for start in range(0, len(_NAMES), 4)]


@pytest.mark.full
@pytest.mark.parametrize("names", _GROUPS, ids=lambda names: f"{names[0]}-{names[-1]}")
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_every_model_trains_in_processes_as_in_one(
    schedule: str, stages: int, names: list[str], tmp_path: Path
) -> None:
    late = schedule == "2bw"
    clipping = {"optimizer": "native-adamw", "max_norm": 0.5} if late else {}
    check_all([Case(name, stages, schedule, microbatches=4 - late, **clipping) for name in names], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("names", _GROUPS, ids=lambda names: f"{names[0]}-{names[-1]}")
@pytest.mark.parametrize("stages", [2, 4])
def test_every_model_of_which_a_rank_builds_its_own_part_trains_as_a_whole_one(
    stages: int, names: list[str], tmp_path: Path
) -> None:
    # Where weights decide which way "branches" takes, no rank can rehearse it with those of others missing.
    names = [name for name in names if name != "branches"]
    check_all([Case(name, stages, "2bw", materialized=True, recompute=stages == 4) for name in names], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("names", _GROUPS, ids=lambda names: f"{names[0]}-{names[-1]}")
@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_every_model_trains_on_a_budget(schedule: str, names: list[str], tmp_path: Path) -> None:
    check_all([Case(name, 2, schedule, budget=ROOMY) for name in names], tmp_path)
