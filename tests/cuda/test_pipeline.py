"""Ranks with a GPU each: NCCL carries what crosses, and a rank that dies ends the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hydra_ext.errors import InvalidArgument
from hydra_ext.pipeline.choices import choose_device
from hydra_ext.runtime.replicas import Replicas
from support.pipeline import pipeline_gpus, pipelines
from support.pipeline.pipeline_failures import run_to_the_end
from support.pipeline.pipelines import Case
from support.ranks import BOTH, NCCL, run_ranks

TWO = pytest.mark.two_gpus
FOUR = pytest.mark.four_gpus
BACKENDS = [NCCL, BOTH]


def check(case: Case, folder: Path, *, delay: int, backend: str, seed: int | None = None) -> None:
    size = case.stages * case.replicas
    found = run_ranks(pipeline_gpus.train, case, seed, folder=folder, size=size, backend=backend)
    pipelines.same(found, pipelines.recurrence(case, delay, "cuda"), case, delay)


@TWO
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_two_ranks_train_as_plain_pytorch_does(schedule: str, delay: int, backend: str, tmp_path: Path) -> None:
    check(Case(schedule, steps=4), tmp_path, delay=delay, backend=backend, seed=1)


@FOUR
@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_four_ranks_train_as_plain_pytorch_does(schedule: str, delay: int, tmp_path: Path) -> None:
    check(Case(schedule, stages=4, steps=3), tmp_path, delay=delay, backend=NCCL, seed=2)


@TWO
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_replicas_average_on_their_gpus(backend: str, tmp_path: Path) -> None:
    check(Case("1f1b", stages=1, replicas=2, steps=4), tmp_path, delay=0, backend=backend, seed=3)


@TWO
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (1, 2)])
def test_a_pipeline_on_a_side_stream_trains_as_plain_pytorch_does(stages: int, replicas: int, tmp_path: Path) -> None:
    """Threads that send, receive and average begin on the default stream."""
    case = Case("1f1b", stages=stages, replicas=replicas, steps=4)
    found = run_ranks(pipeline_gpus.train_beside, case, 6, folder=tmp_path, size=2, backend=BOTH)
    pipelines.same(found, pipelines.recurrence(case, 0, "cuda"), case, 0)


@FOUR
def test_two_replicas_of_two_stages_train_as_plain_pytorch_does(tmp_path: Path) -> None:
    check(Case("2bw", replicas=2, steps=4), tmp_path, delay=1, backend=NCCL, seed=4)


@TWO
@pytest.mark.parametrize("backend", BACKENDS)
def test_offloaded_replicas_average_on_their_gpus(backend: str, tmp_path: Path) -> None:
    found = run_ranks(pipeline_gpus.train_replica, 5, folder=tmp_path, backend=backend)
    for seen, wanted in zip(found, pipeline_gpus.train_together(2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen["losses"], wanted["losses"], strict=True))
        assert not [name for name, value in seen["state"].items() if not torch.equal(value, wanted["state"][name])]


@TWO
def test_gradients_of_one_dtype_are_summed_by_one_operation(tmp_path: Path) -> None:
    wanted = [[3.0 + 8 * index] * 2 for index in range(6)]
    assert run_ranks(pipeline_gpus.sum_together, folder=tmp_path, backend=NCCL) == [([3, 2, 1], wanted)] * 2


@TWO
def test_a_gpu_without_a_number_is_the_one_that_is_current_now() -> None:
    with torch.cuda.device(1):
        assert choose_device("cuda") == torch.device("cuda", 1)


@FOUR
def test_a_receiver_without_room_stops_no_other_link(tmp_path: Path) -> None:
    found = run_ranks(pipeline_gpus.late_receiver, folder=tmp_path, size=3, backend=NCCL)
    assert found == [[], [[10.0] * 2, [11.0] * 2, [12.0] * 2], [[20.0] * 2, [21.0] * 2, [22.0] * 2]]


@TWO
@pytest.mark.parametrize("rows", [[2], [2, 2, 3, 2]], ids=["one", "of changing sizes"])
def test_a_message_is_complete_when_it_is_taken(rows: list[int], tmp_path: Path) -> None:
    found = run_ranks(pipeline_gpus.carry, rows, folder=tmp_path, backend=NCCL)
    assert found == [[], [torch.arange(3.0 * count).view(count, 3)[:, :2].flatten().tolist() for count in rows]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_for_the_gpu_alone_is_told_to_be_slow(
    backend: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.WARNING):
            Replicas(dist.group.WORLD, torch.device("cuda", 0))
        told = [record.getMessage() for record in caplog.records]
        if backend == NCCL:
            with pytest.raises(InvalidArgument, match="cpu:gloo,cuda:nccl"):
                Replicas(dist.group.WORLD, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert len(told) == (backend == NCCL)
    assert all('init_process_group("cpu:gloo,cuda:nccl")' in text for text in told)


@TWO
@pytest.mark.parametrize("where", ["sends", "receives", "waits"])
def test_a_rank_that_dies_leaves_no_kernel_on_the_gpu_of_another(where: str, tmp_path: Path) -> None:
    """What waits for the whole GPU, as freeing memory does, would wait for that kernel for ever."""
    ended: dict[int, dict[str, Any]] = run_to_the_end(
        pipeline_gpus.die, where, tmp_path, folder=tmp_path, size=2, backend=NCCL
    )
    assert (tmp_path / "failed").exists()
    assert set(ended) == {0}
    assert ended[0]["kind"] == "RankFailed"
    assert "rank 1 has failed" in ended[0]["error"]
    assert ended[0]["left"] == {"threads": [], "groups": 0}
    assert (tmp_path / "synchronized").exists()
