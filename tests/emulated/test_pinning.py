"""Host memory is pinned once, in buffers that batches of other lengths take too, and lies next to the GPU."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from pathlib import Path

import emulated_cuda
import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C

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


def policy_at(tensor: Tensor) -> str:
    """The kernel's policy for a tensor's first page."""
    regions = [line.split()[:2] for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    begins = [int(begin, 16) for begin, _ in regions]
    return regions[bisect_right(begins, tensor.data_ptr()) - 1][1]


@pytest.mark.parametrize(("told", "expected"), [("0\n", "prefer:0"), ("-1\n", "default"), (None, "default")])
def test_weights_and_gradients_on_the_host_prefer_the_node_of_the_gpu(
    told: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    if told is not None:
        (folder / "numa_node").write_text(told)
    make_arena = partial(_C.make_cuda_arena, sysfs=str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(_C, "make_cuda_arena", make_arena)
    model = nn.Linear(1500, 1500)
    with hydra_ext.offload(model, budget="256MiB", device="cuda"):
        model(torch.ones(1, 1500)).sum().backward()
        assert policy_at(model.weight) == expected
        assert model.weight.grad is not None
        assert policy_at(model.weight.grad) == expected
