"""Gangs on the nodes of a Ray cluster: a placement group and an actor for each gang, or for those that share a device.

A gang's placement group books its devices on one node. Its actor starts there what :class:`EmbeddedCluster` starts on
this machine, and dies with the fleet's process or its node; its workers die with it. All nodes see the fleet's folder
under one path, and have hydra_ext and the jobs' modules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra_ext.errors import InvalidDevice, MissingDependency
from hydra_ext.fleet.cluster.embedded import EmbeddedCluster
from hydra_ext.fleet.cluster.interface import Ended, Event, Failure, Node, Order, Task
from hydra_ext.fleet.devices import Device

logger = logging.getLogger(__name__)

RESOURCE = "hydra_device"  # what a node calls its simulated devices
_GPU = "GPU"
_GONE = "its node or its host process went away"
_POLL = 0.2  # seconds that an actor waits for news, so that it can be asked to stop meanwhile


class GangHost:
    """The actor of one gang, or of several that share a device, on their node."""

    def __init__(self, described: Sequence[Mapping[str, Any]]) -> None:
        orders = [Order.of(each) for each in described]
        for each in orders:
            Path(each.folder).mkdir(parents=True, exist_ok=True)
        trains = orders[0].task is Task.TRAIN
        # By gang: those that have not ended.
        self._locks = {
            each.gang: Path(each.folder) / ("workers.lock" if trains else f"gang-{each.gang}.lock") for each in orders
        }
        self._cluster = EmbeddedCluster(
            [Device.of(dict(each)) for each in orders[0].devices],
            locks=list(self._locks.values()),
        )
        self._cluster.start(orders, "here", range(len(orders[0].devices)))

    def news(self) -> list[Event]:
        """What has happened, after a short wait."""
        events = list(self._cluster.wait(_POLL))
        for event in events:
            if isinstance(event, Ended):
                self._cluster.unlock(self._locks.pop(event.gang))  # its job may go on elsewhere
        if not self._locks:
            self._cluster.close()
        return events

    def stop(self, gang: int) -> None:
        self._cluster.stop(gang)


@dataclass
class _Gang:
    """A gang, or several that share a device, which run or wait for their devices.

    Attributes:
        numbers: Those of them that have not ended.
        node: Where they run, or will run.
        host: Their actor.
        group: Their placement group.
        news: What the actor was asked last.
    """

    numbers: list[int]
    node: str
    host: Any
    group: Any
    news: Any


class RayCluster:
    """The nodes of a Ray cluster.

    Args:
        address: Of the cluster, as ``ray.init`` takes it.
        device: What each of a node's devices is like.

    Raises:
        MissingDependency: Ray is not installed.
        InvalidDevice: No node has devices.
    """

    def __init__(self, address: str, device: Device) -> None:
        self._ray = _imported()
        self._device = device
        self._resource = _GPU if device.simulated is None else RESOURCE
        self._gangs: dict[int, _Gang] = {}  # by the number of each
        self._lost: list[Ended] = []
        self._was_connected = bool(self._ray.is_initialized())
        if not self._was_connected:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        if not self.nodes():
            self.close()
            raise InvalidDevice(
                f"no node of the Ray cluster at {address} has the resource {self._resource!r}: start nodes with "
                + ("GPUs" if device.simulated is None else f"--resources='{{\"{RESOURCE}\": 2}}'")
            )

    def nodes(self) -> Sequence[Node]:
        found = []
        for node in self._ray.nodes():
            count = int(node["Resources"].get(self._resource, 0)) if node["Alive"] else 0
            if count:
                devices = tuple(replace(self._device, card=i if self._resource == _GPU else None) for i in range(count))
                found.append(Node(name=node["NodeID"], devices=devices, cores=int(node["Resources"].get("CPU", 1))))
        return sorted(found, key=lambda node: node.name)

    def now(self) -> float:
        return time.monotonic()

    def start(self, orders: Sequence[Order], node: str, devices: Sequence[int]) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray chooses the cards, and shows a gang no others: they have numbers from 0 on there.
        own = [{**each, "card": None if each["card"] is None else rank} for rank, each in enumerate(orders[0].devices)]
        count = len(devices)
        group = placement_group(
            [{self._resource: count}], strategy="STRICT_PACK", bundle_label_selector=[{"ray.io/node-id": node}]
        )
        asked = {"num_gpus": count} if self._resource == _GPU else {"resources": {self._resource: count}}
        host = (
            self._ray.remote(GangHost)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                **asked,
            )
            .remote([replace(order, devices=own).describe() for order in orders])
        )
        numbers = [order.gang for order in orders]
        self._gangs |= dict.fromkeys(numbers, _Gang(numbers, node, host, group, host.news.remote()))

    def stop(self, gang: int) -> None:
        if gang in self._gangs:
            self._gangs[gang].host.stop.remote(gang)

    def kill(self, gang: int) -> None:
        if gang in self._gangs:
            self._lose(self._gangs[gang], "the fleet has killed it")

    def wait(self, seconds: float) -> Sequence[Event]:
        self._lose_gangs_of_gone_nodes()
        events: list[Event] = [*self._lost]
        self._lost.clear()
        asked = {gang.news: gang for gang in self._gangs.values()}
        if events or not asked:
            if not events:
                time.sleep(min(seconds, _POLL))
            return events
        ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=min(seconds, _POLL))
        for reference in ready:
            events += self._news(asked[reference])
        return events

    def _news(self, gang: _Gang) -> Iterator[Event]:
        try:
            events = self._ray.get(gang.news)
        except self._ray.exceptions.RayError as error:
            logger.warning("gangs %s are lost: %s", gang.numbers, error)
            is_lost = isinstance(error, self._ray.exceptions.RayActorError)
            self._lose(gang, _GONE if is_lost else str(error), is_lost=is_lost)
            return
        yield from events
        for event in events:
            if isinstance(event, Ended):
                gang.numbers.remove(event.gang)
                del self._gangs[event.gang]
        if gang.numbers:
            gang.news = gang.host.news.remote()
        else:
            self._release(gang)

    def _lose_gangs_of_gone_nodes(self) -> None:
        """A gang that waits for a node which has gone would wait for ever."""
        there = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        for gang in self._all():
            if gang.node not in there:
                self._lose(gang, _GONE)

    def _all(self) -> list[_Gang]:
        return [gang for number, gang in self._gangs.items() if number == gang.numbers[0]]

    def _lose(self, gang: _Gang, message: str, *, is_lost: bool = True) -> None:
        """Ends the gangs of an actor, which is told with the next events."""
        self._release(gang)
        failure = Failure(message=message, is_lost=is_lost)
        self._lost += [Ended(gang=number, failure=failure) for number in gang.numbers]

    def _release(self, gang: _Gang) -> None:
        from ray.util.placement_group import remove_placement_group

        for number in gang.numbers:
            del self._gangs[number]
        self._ray.kill(gang.host)
        remove_placement_group(gang.group)

    def close(self) -> None:
        for gang in self._all():
            self._release(gang)
        if not self._was_connected:
            self._ray.shutdown()


def probed(address: str, budget: int | str) -> Device:
    """A card of the cluster, with its budget.

    Raises:
        MissingDependency: Ray is not installed.
    """
    ray = _imported()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    found: Device = ray.get(ray.remote(_first_card).options(num_gpus=1).remote(budget))
    return found


def _first_card(budget: int | str) -> Device:
    from hydra_ext.fleet.devices import choose

    return choose(["cuda:0"], budget)[0]


def _imported() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingDependency("address= needs Ray: pip install 'hydra-ext[ray]'") from error
    return ray
