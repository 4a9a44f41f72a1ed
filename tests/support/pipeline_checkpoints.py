"""What ranks do in tests of pipelines' checkpoints. Oracles are one plain process, and files read without hydra_ext."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from support.plain_models import OPTIMIZERS, SEED, Case, Whole

SAVED = 3  # steps before the save


def pipeline_of(case: Case, model: nn.Module) -> Pipeline:
    return Pipeline(
        model,
        OPTIMIZERS[case.optimizer],
        schedule=case.schedule,
        microbatches=case.microbatches,
        cuts=list(case.cuts) or None,
        replicas=case.replicas,
        recompute=case.recompute,
        seed=SEED,
    )


def steps(pipe: Pipeline, case: Case, model: nn.Module, first: int, last: int) -> list[Tensor]:
    outputs = [
        pipe.step(batches, lambda batch: case.subject.fn(model, batch), max_norm=case.max_norm)
        for batches in case.data()[first:last]
    ]
    return [torch.stack(output.losses) for output in outputs]


def prepare(pipe: Pipeline, case: Case, model: nn.Module) -> None:
    pipe.prepare(case.data()[0][0], lambda batch: case.subject.fn(model, batch))


def state(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def save_and_go_on(rank: int, cases: Sequence[Case], folder: Path) -> list[Any]:
    """Of each case: what the losses of all steps were, and the state after them."""
    results = []
    for number, case in enumerate(cases):
        model = case.subject.make()
        with pipeline_of(case, model) as pipe:
            losses = steps(pipe, case, model, 0, SAVED)
            assert pipe.save(folder / str(number), extra={"rank": rank}).name == f"step-0000000{SAVED}"
            losses += steps(pipe, case, model, SAVED, case.steps)
            results.append((losses, state(pipe)))
    return results


def load_and_go_on(rank: int, cases: Sequence[Case], folders: Sequence[Path]) -> list[Any]:
    """Of each case, for each folder: the same, from the checkpoint on; begun from other numbers."""
    results = []
    for number, case in enumerate(cases):
        for folder in folders:
            model = case.subject.make()
            for tensor in model.state_dict().values():
                tensor.add_(1)
            with pipeline_of(case, model) as pipe:
                prepare(pipe, case, model)
                loaded = pipe.load(folder / str(number))
                assert loaded is not None
                assert (loaded.step, loaded.extra) == (SAVED, {"rank": 0})
                results.append((steps(pipe, case, model, SAVED, case.steps), state(pipe)))
    return results


def check(case: Case, ranks: Sequence[tuple[list[Tensor], dict[str, Tensor]]], first: int) -> None:
    """All ranks' losses, and each rank's part of the state, are those of one plain process."""
    whole = Whole(case, [0, -1], [])
    whole.train(1 if case.schedule == "2bw" else 0)
    expected = {**whole.names, **dict(whole.model.named_buffers())}
    assert set().union(*(weights for _, weights in ranks)) == set(expected)
    for rank, (losses, weights) in enumerate(ranks):
        for step, (found, wanted) in enumerate(zip(losses, whole.losses[first:], strict=True), first):
            assert torch.equal(found, wanted), f"{case}, rank {rank} of {len(ranks)}: losses of step {step}"
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), f"{case}, rank {rank} of {len(ranks)}: {name}"
