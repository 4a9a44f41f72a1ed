"""Host memory is pinned once: a batch of another length takes the buffers of the one before."""

from __future__ import annotations

import emulated_cuda
import pytest
import torch
from torch import nn

import hydra_ext

pytestmark = pytest.mark.emulated


def test_batches_of_other_lengths_pin_no_memory_anew() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]).cuda()
    stash = hydra_ext.stash(hydra_ext.Offload(), model=model, device="cuda")
    pins = []
    for length in (1000, 930, 981, 954, 905, 999, 943):
        before = emulated_cuda.calls("cudaHostRegister")
        with stash:
            loss = model(torch.randn(length, 256, device="cuda")).square().mean()
        stash.report()  # waits until all has left
        loss.backward()
        pins.append(emulated_cuda.calls("cudaHostRegister") - before)
    assert pins[0] > 8
    assert sum(pins[1:]) == 0, pins
