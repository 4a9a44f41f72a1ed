"""A fleet on a Ray cluster of three nodes on this machine, one of which is killed while all jobs run.

A program of its own: Ray leaves a signal handler, variables of the environment, and threads. Prints the nodes and
failures of all stretches as JSON, if every job has the numbers of the job alone.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster

from hydra_ext.errors import InvalidDevice
from hydra_ext.fleet import Fleet
from hydra_ext.fleet.cluster.ray_cluster import RayCluster
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.journal import read_only
from hydra_ext.policy import SimulatedDevice
from support.fleet import drives
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import events

NODE = {"num_cpus": 1, "resources": {"hydra_device": 1}, "object_store_memory": 80 * 2**20}
CARD = Device(name="a card", card=0, simulated=None, budget=2**30)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(**NODE) for _ in range(2)]
        jobs = drives.long_jobs()
        killer = threading.Thread(target=kill_when_all_have_saved, args=(cluster, nodes, folder))
        killer.start()
        fleet = Fleet(folder, devices=[SimulatedDevice()], address=cluster.address, budget="1MiB")
        results = fleet.run(jobs, techniques=["plain"], interval=0.1)
        killer.join()
        assert_as_alone(results, jobs)
        stretches = [[each.node, each.failure] for job in results.values() for each in job.stretches]
        print(json.dumps({"stretches": stretches, "refused": refused(cluster.address)}))
    finally:
        cluster.shutdown()


def kill_when_all_have_saved(cluster: Any, nodes: list[Any], folder: Path) -> None:
    names = [job.name for job in drives.long_jobs()]
    drives.wait_until(lambda: all("saved" in events(folder / name) for name in names))
    starts = {entry["node"] for entry in read_only(folder) if entry["event"] == "start"}
    cluster.remove_node(next(node for node in nodes if node.node_id in starts), allow_graceful=False)


def refused(address: str) -> str:
    try:
        RayCluster(address, CARD).close()
    except InvalidDevice as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
