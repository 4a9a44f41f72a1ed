"""Every kind of pipeline goes on from its checkpoint, which holds the same whoever saves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import manifest_of
from support.pipeline_checkpoints import SAVED, Kind, interrupted, load_and_save, same, tensors_in
from support.plain_models import Case
from support.ranks import run_ranks

TIED = Kind(Case("gpt2", schedule="2bw", microbatches=3, steps=5, max_norm=0.5), decays=True)
REPLICAS = Kind(Case("resnet_dropout", replicas=2, microbatches=3, steps=5, optimizer="sgd"))
FEW = (
    TIED,
    REPLICAS,
    Kind(Case("llama", schedule="2bw", microbatches=3, steps=5, optimizer="native-adamw"), (("budget", "256KiB"),)),
    Kind(Case("resnet_dropout", schedule="interleaved", steps=5, optimizer="sgd"), (("stages", 4),)),
)
MORE = (
    Kind(Case("llama", schedule="pipedream", microbatches=1, steps=6, optimizer="sgd")),
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
    check(FEW, tmp_path)
    name = f"step-0000000{SAVED}"
    tied = tmp_path / "saved" / "0" / name
    assert manifest_of(tied)["ties"] == [["transformer.wte.weight", "lm_head.weight"]]
    for size in (1, 3):
        (tmp_path / f"by {size}").mkdir()
        again = tmp_path / f"by {size}" / "saved"
        if size == 1:
            load_and_save(0, TIED, tied, again)
        else:
            run_ranks(load_and_save, TIED, tied, again, folder=again.parent, size=size)
        assert same(tensors_in(again / name), tensors_in(tied))
        assert contents(again / name) == contents(tied)
    replicas = manifest_of(tmp_path / "saved" / "1" / name)["content"]["buffers"]
    assert not replicas[0]
    assert any(buffer.endswith("running_mean") for buffer in replicas[1])


@pytest.mark.full
@pytest.mark.parametrize("kind", MORE, ids=lambda kind: f"{kind.case.name}-{kind.case.schedule}")
def test_more_kinds_go_on(kind: Kind, tmp_path: Path) -> None:
    check((kind,), tmp_path)
