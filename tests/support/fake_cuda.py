"""A fake GPU without compute: device faces, inputs and buffers are on ``cuda``, and torch infers the other devices.

Under ``FakeTensorMode`` an operation whose tensors are on different devices raises, as it would on a GPU, while the
engine moves real bytes on the simulated device's lanes. It works without gradients only: autograd needs a CUDA build.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hydra_ext
from hydra_ext import _C, Checks, Run
from hydra_ext.runtime.placement import devices

DEVICE = torch.device("cuda", 0)


class FakeCudaPlace(devices.Place):
    """The simulated device's lanes and slots behind faces on ``cuda``."""

    def __init__(self) -> None:
        super().__init__(DEVICE)

    def _alike(self) -> devices.Place:
        return FakeCudaPlace()

    def _make_backend(self) -> _C.DeviceBackend:
        return _C.SimulatedDevice()


@contextmanager
def fake_cuda(model: nn.Module, *, budget: int | None = None) -> Iterator[Run]:
    """Offloads the model to the fake GPU, for evaluation. Asserts that the engine was used and the model restored."""
    _C.testing.pretend_cuda()
    size = sum(parameter.nbytes for parameter in model.parameters()) + sum(b.nbytes for b in model.buffers())
    parameters = list(model.parameters())
    buffers = dict(model.named_buffers())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        hydra_ext.offload(
            model, budget=budget or 2 * size + 2**16, device=FakeCudaPlace(), checks=Checks(poison_hosts=True)
        ) as run,
    ):
        yield run
        assert run.core.gate.opens > 0, "nothing ran on the device"
        assert run.core.pager.pins == 0
        assert run.report().loads > 0
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {n: id(b) for n, b in buffers.items()}
