"""The doctor on GPUs: facts from the system's files, and what it concludes from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hydra_ext.cli.doctor import gpu
from hydra_ext.cli.doctor.report import Check, Status

GOOD = gpu.GpuFacts(
    allocator="native",
    expandable_segments=True,
    capabilities=((9, 0),),
    nodes=(1,),
    process_nodes=(1,),
    queues=32,
)


def found(facts: gpu.GpuFacts) -> dict[str, Check]:
    return {check.name: check for check in gpu.checks(facts)}


def test_a_machine_that_is_set_up_well_has_nothing_to_do() -> None:
    checks = found(GOOD)
    assert {check.status for check in checks.values()} == {Status.OK}
    assert not any(check.remedy for check in checks.values())


@pytest.mark.parametrize(
    ("facts", "name", "status", "said"),
    [
        (replace(GOOD, allocator="cudaMallocAsync"), "allocator", Status.FAIL, "cudaMallocAsync"),
        (replace(GOOD, expandable_segments=False), "allocator", Status.WARN, "leave expandable_segments out"),
        (replace(GOOD, capabilities=((9, 0), (7, 5))), "capability", Status.WARN, "7.5"),
        (replace(GOOD, process_nodes=(0, 1)), "NUMA", Status.WARN, "--membind=1"),
        (replace(GOOD, process_nodes=(0,)), "NUMA", Status.WARN, "--cpunodebind=1"),
        (replace(GOOD, nodes=(None,), process_nodes=(0,)), "NUMA", Status.OK, "one node"),
        (replace(GOOD, queues=8), "queues", Status.OK, "CUDA_DEVICE_MAX_CONNECTIONS=32"),
    ],
)
def test_each_fault_is_told_with_what_to_do(facts: gpu.GpuFacts, name: str, status: Status, said: str) -> None:
    check = found(facts)[name]
    assert check.status is status
    assert said in check.detail + check.remedy


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for node, listed in ((0, "0-3,8"), (1, "4-7\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(listed)
    assert gpu.node_of("0000:3b:00.0", tmp_path) == 1
    assert gpu.node_of("0000:ff:00.0", tmp_path) is None
    (device / "numa_node").write_text("-1\n")
    assert gpu.node_of("0000:3b:00.0", tmp_path) is None
    assert gpu.process_nodes({8}, tmp_path) == (0,)
    assert gpu.process_nodes({3, 4}, tmp_path) == (0, 1)
    assert gpu.cpus_in("") == set()
