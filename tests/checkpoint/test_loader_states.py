"""Which of the saved states of loaders belongs to a rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydra_ext.checkpoint.loader_states import SavedLoader, capture, joined


class Counting:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def found(states: list[Any], replicas: int, rank: int, now: tuple[int, int]) -> Any:
    """The state that a rank of ``now`` (ranks, replicas) gets of those that ranks have saved; the reason if none."""
    saved = joined([None if state is None else capture(Counting(state)) for state in states])
    content = {"loaders": saved, "ranks": [{}] * len(states), "buffers": [{}] * replicas}
    reader: Any = SimpleNamespace(path=Path("ckpt"), manifest=SimpleNamespace(content=content))
    loader = Counting("new")
    chosen = SavedLoader(reader, loader, rank=rank, ranks=now[0], replicas=now[1])
    if chosen.differences:
        return chosen.differences[0]
    chosen.restore()
    return loader.state


@pytest.mark.parametrize(
    ("states", "replicas", "rank", "now", "expected"),
    [
        ([1, 2], 2, 1, (2, 2), 2),  # a run of two ranks: each has its own
        ([1, 2, 3, 4], 2, 2, (4, 2), 3),  # two stages in two replicas: also where ranks of a replica differ
        ([1, 2, 1, 2], 2, 3, (6, 2), 2),  # three stages: the replica's
        ([1, 2, 1, 2], 2, 1, (2, 2), 2),  # one stage
        ([1, None, 1, None], 1, 1, (4, 1), 1),  # a rank that had none: its replica's
        ([None, 2], 1, 0, (1, 1), 2),
        ([5], 1, 2, (3, 1), 5),  # of a run, in a pipeline
    ],
)
def test_a_rank_gets_its_own_or_its_replicas(
    states: list[Any], replicas: int, rank: int, now: tuple[int, int], expected: Any
) -> None:
    assert found(states, replicas, rank, now) == expected


@pytest.mark.parametrize(
    ("states", "replicas", "rank", "now"),
    [
        ([1, 2], 2, 0, (1, 1)),
        ([1], 1, 0, (2, 2)),
        ([1, 1], 2, 0, (1, 1)),  # equal states need not be of equal data
        ([1, 2, 3, 2], 2, 0, (2, 2)),  # ranks of one replica that had different ones
        ([1, None], 2, 1, (2, 2)),
    ],
)
def test_a_rank_for_which_there_is_none_hears_so(
    states: list[Any], replicas: int, rank: int, now: tuple[int, int]
) -> None:
    reason = found(states, replicas, rank, now)
    assert reason.startswith(f"loaders were saved by {len(states)} ranks in {replicas} replicas, and none")
    assert f"rank {rank} of {now[0]} in {now[1]}" in reason


def test_equal_states_are_stored_once() -> None:
    states = [capture(Counting(torch.arange(3) + number)) for number in (0, 1, 0)]
    assert joined([*states, None]) == {"states": states[:2], "ranks": [0, 1, 0, None]}
    assert joined([None, None]) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64, torch.bool])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    for saved in (
        torch.arange(6).to(dtype).reshape(2, 3).t(),
        torch.zeros(0, 2, dtype=dtype),
        torch.ones((), dtype=dtype),
    ):
        state = found([{"deep": [saved]}], 1, 0, (1, 1))["deep"][0]
        assert state.dtype == dtype
        assert torch.equal(state, saved)
