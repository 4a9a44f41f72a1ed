"""Which ranks train together, and how copies of a model become one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hydra_ext
from hydra_ext.errors import InvalidArgument
from support.ranks import run_ranks
from support.replicas.replicated import differences
from support.replicas.replicated_cases import choose, enter, enter_different, grad_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_text.py"


@pytest.mark.parametrize(
    ("difference", "found"),
    [
        ("shape", "rank 1 has a trained parameter '0.weight' of torch.float32[16, 8] with strides [8, 1], in block 0"),
        ("dtype", "rank 1 has a trained parameter '0.weight' of torch.float64[8, 8]"),
        ("trained", "rank 1 has a frozen parameter '0.bias'"),
        ("buffer", "rank 1 has a buffer '1.more' of torch.float32[3]"),
        (
            "blocks",
            "of torch.float32[8, 8] with strides [8, 1], in block 0 ('0') where rank 0 has ",
        ),
    ],
)
def test_models_that_differ_are_refused_on_every_rank_before_anything_is_changed(
    difference: str, found: str, tmp_path: Path
) -> None:
    for message, rank, unchanged in run_ranks(enter_different, difference, folder=tmp_path):
        assert found in message
        assert "where rank 0 has " in message
        assert rank == 1
        assert all(unchanged)


def test_the_copies_begin_as_that_of_rank_0_and_equal_ones_are_not_written_to(tmp_path: Path) -> None:
    first, second = run_ranks(enter, folder=tmp_path)
    assert differences(second[0], first[0]) == []
    written, again = second[1][: len(second[1]) // 2], second[1][len(second[1]) // 2 :]
    assert first[1] == [0] * len(first[1])
    assert written[0] == 1
    assert again == [0] * len(again)
    for rank, (_, _, logged) in enumerate((first, second)):
        lines = [line for line in logged if "ranks" in line]
        assert lines == [f"INFO gradients are averaged over 2 ranks (cpu:gloo,cuda:gloo); this is rank {rank}"] * 2


def test_the_group_is_the_default_one_unless_another_or_none_is_given(tmp_path: Path) -> None:
    for rank, gradients in enumerate(run_ranks(choose, folder=tmp_path)):
        own = rank + 1.0
        assert gradients == [[1.5, 2.0], [1.5, 2.0], [own, 1.0], [own, 1.0]]


def test_gradients_that_are_asked_for_are_the_ranks_own(tmp_path: Path) -> None:
    assert run_ranks(grad_of, folder=tmp_path) == [[[], [1.5]], [[3.0], [1.5]]]


@pytest.mark.parametrize("group", [True, "gloo", 2])
def test_what_is_no_process_group_is_refused(group: object) -> None:
    with pytest.raises(InvalidArgument, match=r"process_group=.*give a torch\.distributed\.ProcessGroup"):
        hydra_ext.offload(nn.Linear(2, 2), budget="1MiB", process_group=group)  # type: ignore[arg-type]


def test_no_sync_changes_nothing_where_nobody_else_trains() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hydra_ext.offload(model, optimizer, budget="1MiB") as run, run.no_sync():
        (model(torch.ones(1, 1)) * 3).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.item() == 3.0
        run.step([1.0], lambda x: model(torch.full((1, 1), x)).sum())
        assert (run.report().ranks, run.report().reduced_bytes) == (1, 0)


def test_torchrun_runs_the_example_with_equal_weights_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = EXAMPLE.read_text().replace("n_layer=8, n_embd=512", "n_layer=2, n_embd=32").replace("80MiB", "8MiB")
    # Past the interpreter's end, where gloo's threads may abort a process, whatever it has trained with.
    ending = """
print('weights', sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)
__import__('os')._exit(0)
"""
    script.write_text(lines + ending)
    apart = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *apart]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    outputs = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    lines_of = [output.splitlines() for output in outputs]
    printed = [line for output in lines_of for line in output if line.startswith("weights")]
    losses = [line for output in lines_of for line in output if line.startswith("step 5:")]
    assert len(printed) == len(losses) == 2
    assert len(set(printed)) == 1
    assert len(set(losses)) == 2  # each rank's own, of its own data
    assert all("ranks    2, gradients averaged" in output for output in outputs)


def test_a_group_of_one_rank_changes_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with hydra_ext.offload(nn.Linear(2, 2), budget="1MiB", process_group=dist.group.WORLD) as run:
            assert run.replicas is None
    finally:
        dist.destroy_process_group()
