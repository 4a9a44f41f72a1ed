"""A fleet on a Ray cluster of some nodes on this machine, one of which may be killed while jobs run.

A program of its own: Ray leaves a signal handler, variables of the environment, and threads. Prints the nodes and
failures of all stretches as JSON, if every job has the numbers of the job alone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster

from hydra_ext.errors import InvalidDevice
from hydra_ext.fleet import Fleet, history
from hydra_ext.fleet.cluster.ray_cluster import RayCluster
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.journal import read_only
from hydra_ext.fleet.scheduling import packing
from hydra_ext.policy import SimulatedDevice
from support.fleet import drives, trainings
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import events

NODE = {"num_cpus": 1, "resources": {"hydra_device": 1}, "object_store_memory": 80 * 2**20}
LOOK = 0.05
CARD = Device(name="a card", card=0, simulated=None, budget=2**30)


def main(folder: Path, nodes: int, how: str = "alone") -> None:
    """
    Args:
        nodes: Beside the head. With some, one of them is killed.
        how: "shared" for two jobs that share the head's device.
    """
    torch.set_num_threads(1)
    # A node counts as gone after a second and a half.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {**NODE, "include_dashboard": False, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        added = [cluster.add_node(**NODE) for _ in range(nodes)]
        jobs = drives.long_jobs() if added else [trainings.job("alone", steps=4)]
        device, budget, techniques = SimulatedDevice(), "1MiB", ["plain"]
        if how == "shared":
            packing.slowdowns = lambda options: [1.0] * len(options)  # whatever was measured
            jobs, techniques = drives.shared_jobs(), ["shared offload"]
            device, budget = drives.SLOW_LINK, "512KiB"
        killer = threading.Thread(target=kill_one, args=(cluster, added, folder))
        killer.daemon = True  # it ends with the program, also if that fails
        if added:
            killer.start()
        fleet = Fleet(folder, devices=[device], address=cluster.address, budget=budget)
        results = fleet.run(jobs, techniques=techniques, interval=0.1)
        if added:
            killer.join()
        assert_as_alone(results, jobs)
        stretches = [[each.node, each.failure] for job in results.values() for each in job.stretches]
        packs = history.load(folder).plans[0].packs
        print(json.dumps({"stretches": stretches, "packs": packs, "refused": refused(cluster.address)}))
    finally:
        cluster.shutdown()


def kill_one(cluster: Any, nodes: list[Any], folder: Path) -> None:
    """Kills a node once a job there has saved a checkpoint."""
    by_name = {node.node_id: node for node in nodes}
    while True:
        entries = read_only(folder) if (folder / "journal.jsonl").exists() else []
        starts = [entry for entry in entries if entry["event"] == "start" and entry["node"] in by_name]
        saved = [entry for entry in starts if "saved" in events(folder / entry["job"])]
        if saved:
            cluster.remove_node(by_name[saved[0]["node"]], allow_graceful=False)
            return
        time.sleep(LOOK)


def refused(address: str) -> str:
    try:
        RayCluster(address, CARD).close()
    except InvalidDevice as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
