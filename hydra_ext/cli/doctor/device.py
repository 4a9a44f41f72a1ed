"""CUDA, pinned memory and the speed of the link. Without CUDA a copy in host memory is measured instead."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra_ext import _guard
from hydra_ext.cli.doctor.report import Check, Facts, Status

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PROBE_BYTES = 64 << 20
_REPEATS = 5
_SLOW_LINK = 4e9  # bytes per second of a PCIe 3.0 x16 link with pageable memory, a third of its best


@dataclass(frozen=True)
class Device:
    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class LinkFacts:
    """Bytes per second of the fastest of several copies. `kind` is "cuda", "simulated" or "none"."""

    kind: str
    to_device_bytes_per_second: float | None = None
    to_host_bytes_per_second: float | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about the device. `pinning` is None without CUDA."""

    torch_has_cuda: bool
    cuda_available: bool
    driver: str | None
    devices: list[Device] = field(default_factory=list)
    pinning: bool | None = None
    link: LinkFacts = field(default_factory=lambda: LinkFacts("none"))


def collect() -> DeviceFacts:
    driver = read_driver(Path("/proc/driver/nvidia/version"))
    try:
        import torch
    except ModuleNotFoundError:
        return DeviceFacts(torch_has_cuda=False, cuda_available=False, driver=driver)
    available = torch.cuda.is_available()
    pinning = _can_pin() if available else None
    return DeviceFacts(
        torch_has_cuda=torch.version.cuda is not None,
        cuda_available=available,
        driver=driver,
        devices=[_device(index) for index in range(torch.cuda.device_count())] if available else [],
        pinning=pinning,
        link=measure_cuda_link(pinned=bool(pinning)) if available else measure_memory_link(),
    )


def section(facts: DeviceFacts) -> Facts:
    content = asdict(facts)
    link = content.pop("link")
    return {**content, "link": link["kind"], **{name: value for name, value in link.items() if name != "kind"}}


def read_driver(path: Path) -> str | None:
    """Version of the NVIDIA driver, from its file in /proc."""
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else None


def measure_memory_link() -> LinkFacts:
    import torch

    source = torch.ones(_PROBE_BYTES, device="cpu", dtype=torch.uint8)
    target = torch.zeros_like(source)
    best = _PROBE_BYTES / min(_timed_copy(target, source) for _ in range(_REPEATS))
    return LinkFacts("simulated", best, best)


def measure_cuda_link(*, pinned: bool) -> LinkFacts:
    import torch

    try:
        host = torch.ones(_PROBE_BYTES, device="cpu", dtype=torch.uint8, pin_memory=pinned)
        device = host.to("cuda")
        to_device = min(_timed_cuda_copy(device, host) for _ in range(_REPEATS))
        to_host = min(_timed_cuda_copy(host, device) for _ in range(_REPEATS))
    except RuntimeError as error:
        logger.debug("the link could not be measured: %s", error)
        return LinkFacts("cuda")
    return LinkFacts("cuda", _PROBE_BYTES / to_device, _PROBE_BYTES / to_host)


def _timed_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


def _timed_cuda_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _can_pin() -> bool:
    import torch

    try:
        return torch.empty(1 << 20, device="cpu", dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError as error:
        logger.debug("memory cannot be pinned: %s", error)
        return False


def _device(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Device(properties.name, properties.total_memory, f"{properties.major}.{properties.minor}")


def checks(facts: DeviceFacts, built_cuda: str | None, memlock_bytes: int | None) -> list[Check]:
    """Checks of the device. `built_cuda` is the build's mode: with "ON" blocks move to a GPU."""
    found = [_cuda(facts, built_cuda)]
    if facts.cuda_available:
        found.append(_pinning(facts, memlock_bytes))
    if facts.link.kind != "none":
        found.append(_link(facts.link))
    return found


def _cuda(facts: DeviceFacts, built_cuda: str | None) -> Check:
    if facts.cuda_available and built_cuda == "ON":
        return Check("cuda", Status.OK, f"{len(facts.devices)} device(s): blocks move between host and GPU")
    if facts.cuda_available:
        detail = "hydra_ext was built without CUDA kernels: the GPU is not used"
        return Check("cuda", Status.WARN, detail, _guard.how_to_get_cuda())
    simulated = "no GPU is used: everything runs on the simulated device, in host memory"
    if facts.driver is None:
        return Check("cuda", Status.WARN, f"no NVIDIA driver; {simulated}", "install the driver, to use a GPU")
    if facts.torch_has_cuda:
        return Check("cuda", Status.WARN, f"torch finds no usable GPU; {simulated}", "see `nvidia-smi`")
    remedy = f"install a torch with CUDA, then run `{_guard.REBUILD}`"
    return Check("cuda", Status.WARN, f"torch has no CUDA; {simulated}", remedy)


def _pinning(facts: DeviceFacts, memlock_bytes: int | None) -> Check:
    if facts.pinning:
        return Check("pinned memory", Status.OK, "host memory can be pinned")
    remedy = "raise the limit on locked memory (`ulimit -l unlimited`)" if memlock_bytes is not None else ""
    return Check("pinned memory", Status.WARN, "host memory cannot be pinned: copies are slower and block", remedy)


def _link(link: LinkFacts) -> Check:
    to_device, to_host = link.to_device_bytes_per_second, link.to_host_bytes_per_second
    if to_device is None or to_host is None:
        return Check("link", Status.WARN, "the link could not be measured", "see whether the GPU's memory is full")
    detail = f"{to_device / 1e9:.1f} GB/s to the device, {to_host / 1e9:.1f} GB/s to the host ({link.kind})"
    if link.kind == "cuda" and min(to_device, to_host) < _SLOW_LINK:
        return Check(
            "link", Status.WARN, detail, "see that the GPU has all lanes of its slot, and that memory is pinned"
        )
    return Check("link", Status.OK, detail)
