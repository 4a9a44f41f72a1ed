"""Quantised weights, and large buffers, on the GPU beyond the budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.state.composites import composites_of
from support.composites import KINDS, quantised, trained_of
from support.gpu import mean_of_squares, offloaded

WIDTH, LAYERS = 1024, 80
BUDGET = 64 * 2**20  # of 80 MiB of packed weights


def on_the_gpu(model: nn.Module) -> nn.Module:
    """The same model with all its tensors there."""
    for composite in composites_of(model):
        there = composite.around({id(inner): inner.cuda() for inner in composite.inner.values()})
        owner, _, name = composite.name.rpartition(".")
        model.get_submodule(owner)._parameters[name] = there  # type: ignore[assignment]
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.is_cuda:
                tensor.data = tensor.data.cuda()
    return model


def trained_there(model: nn.Module, data: list[Tensor]) -> list[Tensor]:
    """Losses and weights. The update is made on the host, as in the offloaded run."""
    adapters = trained_of(on_the_gpu(model))
    hosts = [adapter.detach().cpu().clone().requires_grad_() for adapter in adapters]
    optimizer = torch.optim.SGD(hosts, lr=0.05)
    losses = []
    for batch in data:
        loss = mean_of_squares(model, batch.cuda())
        loss.backward()
        for host, adapter in zip(hosts, adapters, strict=True):
            assert adapter.grad is not None
            host.grad, adapter.grad = adapter.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for host, adapter in zip(hosts, adapters, strict=True):
                adapter.copy_(host)
        losses.append(loss.detach().cpu())
    return [*losses, *hosts]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_have_the_bits_of_the_same_model_on_the_gpu(kind: str) -> None:
    data = [torch.randn(8, WIDTH) for _ in range(2)]
    expected = trained_there(quantised(kind, width=WIDTH, layers=LAYERS), data)
    torch.cuda.empty_cache()
    model = quantised(kind, width=WIDTH, layers=LAYERS)
    optimizer = torch.optim.SGD(trained_of(model), lr=0.05)
    losses = []
    with offloaded(model, optimizer, budget=BUDGET) as run:
        for batch in data:
            loss = mean_of_squares(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        assert run.report().evictions > 0
        assert run.report().faults == 0
    found = [*losses, *trained_of(model)]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
