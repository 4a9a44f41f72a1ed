"""What decides how well a GPU serves hydra_ext: its allocator, its kernels, its place in the machine, its queues."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra_ext.cli.doctor.report import Check, Facts, Status

_LEAST_CAPABILITY = (8, 0)
_QUEUES = 8  # that CUDA makes unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise
_ENOUGH_QUEUES = 32


@dataclass(frozen=True)
class GpuFacts:
    """Facts about torch's GPUs. ``nodes`` are the NUMA nodes next to each; None where the machine does not say.

    Segments are expandable where a budget is large, unless the user has switched that off.
    """

    allocator: str
    expandable_segments: bool
    capabilities: tuple[tuple[int, int], ...]
    nodes: tuple[int | None, ...]
    process_nodes: tuple[int, ...]
    queues: int


def collect(sysfs: Path = Path("/sys")) -> GpuFacts:
    import torch

    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return GpuFacts(
        allocator=torch.cuda.memory.get_allocator_backend(),
        expandable_segments=not re.search(r"expandable_segments\s*:\s*false", settings, re.IGNORECASE),
        capabilities=tuple((each.major, each.minor) for each in properties),
        nodes=tuple(node_of(_address(each), sysfs) for each in properties),
        process_nodes=process_nodes(os.sched_getaffinity(0), sysfs),
        queues=int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", _QUEUES)),
    )


def section(facts: GpuFacts) -> Facts:
    return asdict(facts)


def _address(properties: object) -> str:
    """The address of a GPU on the PCI bus, as the system writes it."""
    parts = (getattr(properties, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def node_of(address: str, sysfs: Path) -> int | None:
    """NUMA node of a device on the PCI bus."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def process_nodes(cpus: set[int], sysfs: Path) -> tuple[int, ...]:
    """NUMA nodes whose processors this process may use."""
    nodes = []
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        try:
            listed = (folder / "cpulist").read_text()
        except OSError:
            continue
        if cpus & cpus_in(listed):
            nodes.append(int(folder.name.removeprefix("node")))
    return tuple(sorted(nodes))


def cpus_in(listed: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def checks(facts: GpuFacts) -> list[Check]:
    return [_allocator(facts), _capability(facts.capabilities), _place(facts), _queues(facts.queues)]


def _allocator(facts: GpuFacts) -> Check:
    name = "allocator"
    if facts.allocator != "native":
        detail = f"torch allocates by '{facts.allocator}', which takes no budget: offload refuses it"
        return Check(name, Status.FAIL, detail, "no backend: in PYTORCH_ALLOC_CONF, and no change_current_allocator")
    if facts.expandable_segments:
        return Check(name, Status.OK, "torch's own; offload makes its segments expandable")
    detail = "torch's own, with fixed segments: more of a budget lies in pieces that nothing fits into"
    return Check(name, Status.WARN, detail, "leave expandable_segments out of PYTORCH_ALLOC_CONF")


def _capability(capabilities: Sequence[tuple[int, int]]) -> Check:
    shown = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if all(capability >= _LEAST_CAPABILITY for capability in capabilities):
        return Check("capability", Status.OK, shown)
    return Check(
        "capability",
        Status.WARN,
        f"{shown}: kernels of hydra_ext need 8.0 (A100, RTX 30) or more",
        "use device='simulated', or torch's optimizers and no Compress()",
    )


def _place(facts: GpuFacts) -> Check:
    known = [node for node in facts.nodes if node is not None]
    if not known:
        return Check("NUMA", Status.OK, "the machine has one node, or does not say")
    detail = f"GPUs at nodes {known}, this process at {list(facts.process_nodes)}"
    if set(facts.process_nodes) <= set(known[:1]):
        return Check("NUMA", Status.OK, detail)
    first = known[0]
    remedy = (
        f"start with `numactl --cpunodebind={first} --membind={first}` for the first GPU: weights on the host lie next "
        "to it anyway, the threads that update them do not"
    )
    return Check("NUMA", Status.WARN, detail, remedy)


def _queues(queues: int) -> Check:
    detail = f"{queues} hardware queues"
    if queues >= _ENOUGH_QUEUES:
        return Check("queues", Status.OK, detail)
    return Check(
        "queues", Status.OK, f"{detail}; with NCCL and several ranks set CUDA_DEVICE_MAX_CONNECTIONS={_ENOUGH_QUEUES}"
    )
