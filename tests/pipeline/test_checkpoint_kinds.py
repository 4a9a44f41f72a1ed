"""Every kind of pipeline goes on from its checkpoint, which holds the same from each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.checkpoint.checkpoints import manifest_of
from support.pipeline import pipelines
from support.pipeline.pipeline_checkpoints import SAVED, Kind, interrupted, load_and_save, same, state, tensors_in
from support.plain.plain_models import Case
from support.ranks import run_ranks

TIED = Kind(Case("gpt2", schedule="2bw", microbatches=3, steps=5, max_norm=0.5), decays=True)
REPLICAS = Kind(Case("resnet_dropout", replicas=2, microbatches=3, steps=5, optimizer="sgd"))
MORE = (
    Kind(Case("llama", schedule="2bw", microbatches=3, steps=5, optimizer="native-adamw"), (("budget", "256KiB"),)),
    Kind(Case("resnet_dropout", schedule="interleaved", steps=5, optimizer="sgd"), (("stages", 4),)),
    # The age of weights depends on the stage, and cuts that the pipeline chooses on times.
    Kind(Case("llama", schedule="pipedream", cuts=("model.layers.1",), microbatches=1, steps=6, optimizer="sgd")),
    Kind(Case("gpt2_dropout", schedule="2bw", microbatches=3, steps=5, optimizer="native-adamw", recompute=True)),
    Kind(Case("llama", schedule="2bw", steps=5), (("stages", 4),), decays=True),
    Kind(Case("gpt2", replicas=2, schedule="2bw", microbatches=3, steps=5, materialized=True)),
)


def check(kinds: tuple[Kind, ...], folder: Path) -> None:
    ranks = run_ranks(interrupted, kinds, folder / "saved", folder=folder)
    for number, kind in enumerate(kinds):
        for rank, (expected, found) in enumerate(ranks):
            assert same(found[number][:-1], expected[number][:-1]), f"rank {rank}: {kind}"
        for replica in range(kind.case.replicas):  # cuts are chosen by times: a stage may have become another one
            line = ranks[replica :: kind.case.replicas]
            expected, found = ({k: v for rank in line for k, v in rank[i][number][-1].items()} for i in (0, 1))
            assert same(found, expected), f"replica {replica}: {kind}"


def contents(checkpoint: Path) -> dict[str, object]:
    """But for random states, which are each rank's own."""
    content = manifest_of(checkpoint)["content"]
    return {key: value for key, value in content.items() if key != "ranks"}


def test_it_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    check((TIED,), tmp_path)
    name = f"step-0000000{SAVED}"
    tied = tmp_path / "saved" / "0" / name
    assert manifest_of(tied)["ties"] == [["transformer.wte.weight", "lm_head.weight"]]
    for size in (1, 3):
        (tmp_path / f"by {size}").mkdir()
        again = tmp_path / f"by {size}" / "saved"
        if size == 1:
            assert load_and_save(0, TIED, tied, again) == []
        else:
            *known, new = run_ranks(load_and_save, TIED, tied, again, folder=again.parent, size=size)
            assert known == [[], []]
            assert new == [f"{tied} has no random states of rank 2, as fewer ranks saved it: the rank keeps its own"]
        assert same(tensors_in(again / name), tensors_in(tied))
        assert contents(again / name) == contents(tied)


@pytest.mark.full
@pytest.mark.parametrize("kind", MORE, ids=lambda kind: f"{kind.case.name}-{kind.case.schedule}")
def test_more_kinds_go_on(kind: Kind, tmp_path: Path) -> None:
    check((kind,), tmp_path)


@pytest.mark.full
def test_buffers_of_replicas_that_differ_are_those_of_each(tmp_path: Path) -> None:
    check((REPLICAS,), tmp_path)
    replicas = manifest_of(tmp_path / "saved" / "0" / f"step-0000000{SAVED}")["content"]["buffers"]
    assert not replicas[0]
    assert any(buffer.endswith("running_mean") for buffer in replicas[1])


def spoiled_in_the_middle(folder: Path, *, loads: bool) -> list[Any]:
    """In one process: the update before the save is skipped, since a loss is no number."""
    case = pipelines.Case(stages=1, microbatches=2, spoils=(0, 1), max_norm=1.0)
    told: list[Any] = []
    with pipelines.pipeline_of(case, pipelines.make_stages(1)) as pipe:
        for number in range(0 if not loads else 2, 5):
            if number == 2:
                assert (pipe.load(folder) if loads else pipe.save(folder)) is not None
            out = pipe.step(pipelines.data_of(case, number), pipelines.loss_of, max_norm=1.0)
            told.append([out.skipped, str(out.grad_norm), *map(str, out.losses)])
        told.append(state(pipe))
    return told[-4:]


def test_a_skipped_update_is_told_of_after_the_load(tmp_path: Path) -> None:
    uninterrupted, resumed = (spoiled_in_the_middle(tmp_path, loads=loads) for loads in (False, True))
    assert same(resumed, uninterrupted)
    assert [told[0] for told in resumed[:3]] == [True, False, False]
    versions = manifest_of(tmp_path / "step-00000002")["content"]["versions"]
    assert {str(older) for older in versions.values()} == {"[None]"}
