"""Every small model of the other tests, with what has a number for its name called again in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from support.models.zoo import Family
from support.models.zoo_more import MORE_FAMILIES
from support.split.split_models import LIBRARY, Subject
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN
from support.stash.recomputed import recomputed_blocks
from support.stash.stashed import assert_empty, assert_same, gradients

WRITES_TO_ITS_INPUTS = "mobile"  # an activation in place is a member of a sequence there


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batches: list[Any]
    loss: Callable[[nn.Module, Any], Any]


def of_family(family: Family) -> Model:
    return Model(lambda: family.make(seed=1), list(family.batches(seed=2, count=3)), family.loss)


def of_subject(subject: Subject) -> Model:
    return Model(subject.make, list(subject.batches(3)), subject.fn)


def total(result: Any) -> Tensor:
    """Of what a loss comes in."""
    if isinstance(result, dict):
        result = result["loss"]
    return result if isinstance(result, Tensor) else result[0]  # type: ignore[no-any-return]


def trained(model: Model, policy: object = None) -> tuple[list[Tensor], int]:
    """Losses, gradients and buffers of some steps, and how many calls were made again."""
    module = model.make()
    stash = hydra_ext.stash(policy or hydra_ext.Keep(), model=module, device="simulated")  # type: ignore[arg-type]
    found: list[Tensor] = []
    torch.manual_seed(3)
    for batch in model.batches:
        found += gradients(module, lambda: total(model.loss(module, batch)), stash if policy else None)  # noqa: B023
        found += [buffer.clone() for buffer in module.buffers()]
        assert_empty(stash.report())
    return found, stash.report().recomputed


FAMILIES = {f"family {name}": family for name, family in MORE_FAMILIES.items()}
SUBJECTS = {f"{subject.name}": subject for subject in (*LIBRARY.values(), *MORE.values(), *OWN.values())}


def compare(model: Model) -> None:
    expected, _ = trained(model)
    found, recomputed = trained(model, recomputed_blocks(hydra_ext.Offload()))
    assert_same(found, expected)
    assert recomputed >= len(model.batches)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_families(family: Family) -> None:
    compare(of_family(family))


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_subjects(name: str) -> None:
    model = of_subject(SUBJECTS[name])
    if name != WRITES_TO_ITS_INPUTS:
        compare(model)
        return
    with pytest.raises(UnsupportedModel, match="writes to its inputs"):
        trained(model, recomputed_blocks(None))
