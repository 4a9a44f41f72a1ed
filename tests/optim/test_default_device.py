"""Neither torch's default device nor its default dtype reaches the state of native optimizers, or a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hydra_ext
from support.benches import ROOMY, assert_same
from support.runtime.native import BATCHES, OPTIMIZERS, stack, state


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def others() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)


def usual() -> None:
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_under_another_default_device(name: str, tight: bool) -> None:
    plain, model = stack(), stack()
    theirs, own = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for batch in BATCHES[:3]:
        plain(batch).pow(2).mean().backward()
        hydra_ext.optim.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
    others()
    with hydra_ext.offload(model, own, budget=2**17 if tight else ROOMY):
        for batch in BATCHES[:3]:
            model(batch).pow(2).mean().backward()
            hydra_ext.optim.clip_grad_norm_(model.parameters(), 0.1)
            own.step()
            own.zero_grad()
    usual()
    assert_same(state(plain, theirs), state(model, own))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_a_run_under_another_default_device(name: str) -> None:
    plain, model = stack(), stack()
    theirs, own = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    with hydra_ext.offload(plain, theirs, budget=ROOMY) as run:
        run.step([*BATCHES[:2]], lambda batch: plain(batch).pow(2).mean(), max_norm=0.1)
    others()
    with hydra_ext.offload(model, own, budget=ROOMY) as run:
        run.step([*BATCHES[:2]], lambda batch: model(batch).pow(2).mean(), max_norm=0.1)
    usual()
    assert_same(state(plain, theirs), state(model, own))
