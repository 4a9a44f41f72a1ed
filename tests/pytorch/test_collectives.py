"""Collectives on device parameters are refused: they run where they cannot be waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hydra_ext


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Reducing(nn.Module):
    def __init__(self, communicate: object) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.communicate = communicate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.communicate(self.inner.weight)  # type: ignore[operator]
        return self.inner(x)


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda weight: dist.broadcast(weight, 0),
    "all_gather": lambda weight: dist.all_gather([torch.empty(4, 4)], weight),
    "a_view": lambda weight: dist.all_reduce(weight.t()[0]),
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("communicate", COLLECTIVES.values(), ids=COLLECTIVES)
def test_a_collective_on_a_device_parameter_is_refused(communicate: object) -> None:
    model = Reducing(communicate)
    with (
        hydra_ext.offload(model, budget="1MiB") as run,
        pytest.raises(RuntimeError, match=r"hydra_ext: c10d::.*inner.weight"),
    ):
        model(torch.ones(1, 4))
    assert run.core.pager.pins == 0


@pytest.mark.usefixtures("_alone")
def test_a_collective_on_a_copy_of_one_works() -> None:
    model = Reducing(lambda weight: dist.all_reduce(weight.clone()))
    with hydra_ext.offload(model, budget="1MiB") as run:
        model(torch.ones(1, 4))
        assert run.report().windows > 0
