"""The optimizers inside an offload context: bit for bit what they do outside it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.optim import SGD, AdamW, clip_grad_norm_
from hydra_ext.runtime import engine
from support.updates import same_bits

CHECKS = hydra_ext.Checks(poison_hosts=True)
MAKERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "fp32 master": lambda parameters: AdamW(parameters, lr=1e-3, master="fp32"),
    "bf16 moments": lambda parameters: AdamW(parameters, lr=1e-3, moments=torch.bfloat16),
    "sgd": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
}


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    seen = []
    for step in steps:
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        loss = model(inputs).float().square().mean()
        loss.backward()
        seen += [loss.detach(), clip_grad_norm_(model.parameters(), 0.05)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_optimizer_before_during_and_after_offloading_equals_plain_training(dtype: torch.dtype, maker: str) -> None:
    model = make_model(dtype)
    plain = copy.deepcopy(model)
    optimizer, reference = MAKERS[maker](model.parameters()), MAKERS[maker](plain.parameters())
    expected = train(plain, reference, range(7))
    got = train(model, optimizer, range(2))
    budget = 3 * sum(parameter.nbytes for parameter in model.parameters()) // 4 + 2**16
    with hydra_ext.offload(model, optimizer, budget=budget, checks=CHECKS) as run:
        got += train(model, optimizer, range(2, 5))
        report = run.report()
    assert report.windows == 6
    assert report.faults == 0 or report.loads > 0
    assert not engine.installed()
    got += train(model, optimizer, range(5, 7))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(mine, other)
        assert same_bits(optimizer.master(mine), reference.master(other))


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_fp32_master_is_compared_with_its_weight_only_when_someone_else_wrote_it(
    offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra_ext.optim import masters

    followed = []
    monkeypatch.setattr(masters, "follow", lambda master, parameter: followed.append(parameter))
    model = make_model(torch.bfloat16)
    optimizer = MAKERS["fp32 master"](model.parameters())
    context = hydra_ext.offload(model, optimizer, budget="64MiB", checks=CHECKS) if offloaded else nullcontext()
    with context:
        train(model, optimizer, range(3))
    assert not followed


def test_gradients_in_another_type_than_the_weights_are_taken() -> None:
    model = make_model(torch.float32)
    plain = copy.deepcopy(model)
    optimizer, reference = AdamW(model.parameters()), AdamW(plain.parameters())
    with hydra_ext.offload(model, optimizer, budget="64MiB", grad_dtype=torch.bfloat16, checks=CHECKS) as run:
        train(model, optimizer, range(3))
        assert run.report().windows == 6
    train(plain, reference, range(3))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=5e-3)
