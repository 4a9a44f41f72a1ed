"""Ranks in tests of pipelines' checkpoints. Oracles: one plain process, and files read without hydra_ext."""

from __future__ import annotations

import functools
import logging.handlers
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import HydraError
from hydra_ext.pipeline import Pipeline
from support.plain.plain_models import OPTIMIZERS, SEED, Case, Whole

SAVED = 3  # steps before the save


@dataclass(frozen=True)
class Kind:
    """A pipeline of two ranks: a case, and further options.

    Attributes:
        options: Options of the pipeline.
        decays: Whether the learning rate decays after each step.
    """

    case: Case
    options: tuple[tuple[str, Any], ...] = ()
    decays: bool = False


def pipeline_of(case: Case, model: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(
        model,
        OPTIMIZERS[case.optimizer],
        schedule=case.schedule,
        microbatches=case.microbatches,
        cuts=list(case.cuts) or None,
        replicas=case.replicas,
        recompute=case.recompute,
        **{"seed": SEED, **options},
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
    """Returns, for each case, the losses of all steps and the final state. Saves in between."""
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
    """Returns, for each case and folder, the losses after the checkpoint and the final state.

    Each model begins with other numbers, which the load replaces.
    """
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


# ---- the same number of ranks ---------------------------------------------------------------------------------------
def trained(pipe: Pipeline, kind: Kind, model: nn.Module, schedules: Sequence[Any], first: int, last: int) -> list[Any]:
    """Returns losses, norms, the losses of an evaluation after each step, and random numbers drawn after it.

    Each replica has a step's microbatches in another order.
    """
    told = []
    for batches in kind.case.data()[first:last]:
        batches = batches[:: 1 - 2 * pipe.replica]
        fn = functools.partial(kind.case.subject.fn, model)
        output = pipe.step(batches, fn, max_norm=kind.case.max_norm)
        told += [torch.stack(output.losses), None if output.grad_norm is None else output.grad_norm.item()]
        told += [torch.stack(pipe.evaluate(batches[:1], fn).losses), torch.rand(3)]
        for schedule in schedules:
            schedule.step()
    return told


def interrupted(rank: int, kinds: Sequence[Kind], folder: Path) -> list[list[Any]]:
    """Returns the results of the steps after the save, and the state, of each kind.

    They are in two lists: of trainings that went on, and of trainings that loaded the checkpoint.
    """
    results = []
    for number, kind in enumerate(kinds):
        for loads in (False, True):
            model = kind.case.subject.make()
            options = dict(kind.options, seed=SEED + 1) if loads else dict(kind.options)
            with pipeline_of(kind.case, model, **options) as pipe:
                prepare(pipe, kind.case, model)
                schedules = schedules_of(pipe, kind)
                torch.manual_seed(rank)
                trained(pipe, kind, model, schedules, 0, 1 if loads else SAVED)  # the load undoes this step
                if loads:
                    pipe.load(folder / str(number), schedule=schedules)
                else:
                    pipe.save(folder / str(number), schedule=schedules)
                told = trained(pipe, kind, model, schedules, SAVED, kind.case.steps)
                told.append(state(pipe))
                results.append(told)
    return [results[::2], results[1::2]]


def schedules_of(pipe: Pipeline, kind: Kind) -> list[Any]:
    return [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in pipe.optimizers if kind.decays]


def load_and_save(rank: int, kind: Kind, source: Path, target: Path) -> list[str]:
    """Returns the warnings."""
    heard = logging.handlers.BufferingHandler(1000)
    heard.setLevel(logging.WARNING)
    logging.getLogger("hydra_ext").addHandler(heard)
    model = kind.case.subject.make()
    with pipeline_of(kind.case, model, **dict(kind.options)) as pipe:
        prepare(pipe, kind.case, model)
        schedules = schedules_of(pipe, kind)
        assert pipe.load(source, schedule=schedules) is not None
        pipe.save(target, schedule=schedules)
    logging.getLogger("hydra_ext").removeHandler(heard)
    return [record.getMessage() for record in heard.buffer]


def read_as_weights(rank: int, case: Case, checkpoint: Path) -> tuple[str, list[str]]:
    """Returns the error of making the pipeline, and the names of parameters with numbers, which must be right."""
    model = hydra_ext.materialize(case.subject.build, weights=checkpoint).train()
    expected = case.subject.make()
    hydra_ext.load_model(checkpoint.with_name("whole"), expected)
    why = ""
    try:
        with pipeline_of(case, model) as pipe:
            prepare(pipe, case, model)
    except HydraError as error:
        why = f"{type(error).__name__}: {error}"
    theirs = dict(expected.named_parameters())
    there = {name: each for name, each in model.named_parameters() if not each.is_meta and holds_its_own(each)}
    assert all(torch.equal(each, theirs[name]) for name, each in there.items())
    return why, list(there)


def holds_its_own(tensor: Tensor) -> bool:
    """Whether the tensor has memory for all its elements; a stand-in for another stage's parameter has not."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    return bool(found == expected)


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the tensors of all its files, by section and name."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {
        f"{file.name.partition('.')[0].partition('-')[0]} {name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }


# ---- comparisons ----------------------------------------------------------------------------------------------------
@functools.cache
def plain(case: Case) -> Whole:
    whole = Whole(case, [0, -1], [])
    whole.train(1 if case.schedule == "2bw" else 0)
    return whole


def check(case: Case, ranks: Sequence[tuple[list[Tensor], dict[str, Tensor]]], first: int) -> None:
    """Asserts that all ranks' losses, and each rank's part of the state, equal those of one plain process."""
    whole = plain(case)
    expected = {**whole.names, **dict(whole.model.named_buffers())}
    assert set().union(*(weights for _, weights in ranks)) == set(expected)
    for rank, (losses, weights) in enumerate(ranks):
        for step, (found, wanted) in enumerate(zip(losses, whole.losses[first:], strict=True), first):
            assert torch.equal(found, wanted), f"{case}, rank {rank} of {len(ranks)}: losses of step {step}"
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), f"{case}, rank {rank} of {len(ranks)}: {name}"
