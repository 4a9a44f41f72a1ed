"""Which device a run takes, and what a device that is not there says."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.amp import grad_scaler

from hydra_ext import SimulatedDevice, offload
from hydra_ext.errors import InvalidBudget, InvalidDevice, UnsupportedModel
from hydra_ext.runtime import scaling
from hydra_ext.runtime.placement import devices


@pytest.mark.parametrize("device", [None, "simulated", SimulatedDevice()])
def test_without_a_gpu_the_simulated_device_is_taken(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(devices.choose(device), devices.SimulatedPlace)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["gpu", "cpu", "mps", torch.device("meta"), 7.5])
def test_devices_that_cannot_be_offloaded_to_are_refused(device: object) -> None:
    with pytest.raises(InvalidDevice, match="cuda"):
        devices.choose(device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("torch_cuda", "why", "remedy"),
    [
        ("", "torch 2.13.0+cpu has no CUDA", "install a torch with CUDA"),
        ("13.0", "no nvcc was found that works", "install nvcc of CUDA 13"),
        ("13.0", "HYDRA_CUDA=OFF was asked for", "unset HYDRA_CUDA"),
    ],
)
def test_cuda_in_a_build_without_it_says_how_to_get_it(
    torch_cuda: str, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA", "OFF"), ("TORCH_CUDA", torch_cuda), ("WITHOUT_CUDA", why)):
        monkeypatch.setattr(devices._build_info, name, value)
    with pytest.raises(InvalidDevice, match=f"built without CUDA kernels .{re.escape(why)}.: {remedy}.*--no-build-iso"):
        devices.choose("cuda")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices._build_info, "CUDA", "ON")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidDevice, match="finds 1 CUDA devices"):
        devices.choose("cuda:1")


def test_with_a_gpu_and_a_build_for_it_the_current_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices._build_info, "CUDA", "ON")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices.choose(None).device == torch.device("cuda", 3)


def test_a_module_that_another_library_has_wrapped_is_refused() -> None:
    wrapped = type("Wrapped", (nn.Module,), {"__call__": nn.Module.__call__})
    fake = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp._fully_shard"})
    model = nn.Sequential(nn.Linear(2, 2), type("FSDPLinear", (fake, nn.Linear), {})(2, 2))
    with pytest.raises(UnsupportedModel, match="'1' is a FSDPModule"):
        offload(model, budget="1MiB")
    offload(nn.Sequential(wrapped(), nn.Linear(2, 2)), budget="1MiB")
    with pytest.raises(UnsupportedModel, match="DataParallel"):
        offload(nn.DataParallel(nn.Linear(2, 2)), budget="1MiB")


class Recorder:
    """A scale on a device; notes how it is copied."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.waits: list[tuple[str, bool]] = []

    def to(self, device: torch.device, non_blocking: bool, copy: bool) -> SimpleNamespace:
        self.waits.append((torch.device(device).type, not non_blocking))
        return SimpleNamespace(copied=copy)


def test_the_gradient_scalers_factors_are_waited_for_on_the_host_only_while_asked() -> None:
    plain = grad_scaler._MultiDeviceReplicator.get
    scale = Recorder()
    scaling.read_blocking()
    scaling.read_blocking()
    try:
        factors = grad_scaler._MultiDeviceReplicator.__new__(grad_scaler._MultiDeviceReplicator)
        factors.master, factors._per_device_tensors = scale, {}  # type: ignore[assignment]
        on_host = factors.get(torch.device("cpu"))
        assert factors.get(torch.device("cpu")) is on_host
        factors.get(torch.device("cuda", 1))
        scaling.read_as_before()
        assert grad_scaler._MultiDeviceReplicator.get is not plain
    finally:
        scaling.read_as_before()
    assert scale.waits == [("cpu", True), ("cuda", False)]
    assert grad_scaler._MultiDeviceReplicator.get is plain


def test_an_automatic_budget_is_what_the_gpu_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6_000, 24_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4_000)
    assert devices.CudaPlace(0).free_bytes() == 9_400


def test_an_automatic_budget_needs_a_gpu() -> None:
    with pytest.raises(InvalidBudget, match="simulated device has none"):
        offload(nn.Linear(2, 2), budget="auto", device="simulated")
