"""A cluster in virtual time: gangs take the seconds that a test gives them, and fail as it says.

Gangs make the loop of hydra_ext.fleet.cluster.training: open, make steps, save at intervals and at the end. The clock
only moves in `wait`. Steps cost nothing by themselves: what gangs have made since is told whenever `wait` returns.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra_ext.fleet.cluster.interface import Ended, Event, Failure, Node, Order, Progress
from hydra_ext.fleet.devices import Device
from hydra_ext.policy import SimulatedDevice

_SPINS = 1000  # waits in a row in which nothing happens and no time passes
_MOST_WAITS = 5000  # of a fleet that ends
_ROUNDING = 1e-6  # of a step
_MOST_STEPS = 1e15


@dataclass(frozen=True)
class Speed:
    """Seconds of a gang. A step takes some time."""

    step: float
    open: float = 0.0
    save: float = 0.0
    exit: float = 0.0  # from the last word of a gang to its end


class Trouble(Enum):
    RAISES = "raises"
    DIES = "dies"
    HANGS = "hangs"
    WONT_DO = "will not do it"
    ENDS = "ends without a word"


@dataclass
class Fault:
    """What befalls a job's gang when it has made so many steps, the first few times or always."""

    job: str
    step: int
    trouble: Trouble
    times: float = 1
    technique: str = ""  # of the gang; any, if empty


@dataclass(frozen=True)
class Stretch:
    """What one gang did."""

    job: str
    technique: str
    node: str
    devices: tuple[int, ...]
    start: float
    end: float
    first: int  # steps at its start
    last: int  # and at its end
    failure: Failure | None


class _Phase(Enum):
    OPENS = "opens"
    STEPS = "steps"
    SAVES = "saves"
    SAVES_LAST = "saves for the last time"
    HANGS = "hangs"
    EXITS = "exits"


@dataclass
class _Gang:
    order: Order
    process: int  # number of the gang whose process it is in
    node: str
    devices: tuple[int, ...]
    speed: Speed
    start: float
    first: int
    step: int  # at the beginning of the phase
    told: int
    phase: _Phase = _Phase.OPENS
    since: float = 0.0  # beginning of the phase
    until: float = 0.0  # its end
    count: int = 0  # steps that it makes in it
    saved_at: float = 0.0
    is_stopped: bool = False

    @property
    def job(self) -> str:
        return str(self.order.job["name"])

    @property
    def steps(self) -> int:
        return int(self.order.job["steps"])

    def made(self, now: float) -> int:
        """Steps made by now."""
        if self.phase is not _Phase.STEPS:
            return self.step
        return self.step + min(self.count, math.floor((now - self.since) / self.speed.step + _ROUNDING))


@dataclass
class VirtualCluster:
    """Asserts that no device has two processes, and no job either. Jobs in one process have their own speeds.

    Attributes:
        sizes: Devices of each node at the beginning.
        speeds: Called with a job's name, a technique and a number of devices.
        faults: What goes wrong.
        stretches: Of gangs that have ended.
        saved: Steps of each job's newest checkpoint.
        waits: Number of calls of `wait`.
    """

    sizes: Mapping[str, int]
    speeds: Callable[[str, str, int], Speed]
    faults: Sequence[Fault] = ()
    stretches: list[Stretch] = field(default_factory=list, init=False)
    saved: dict[str, int] = field(default_factory=dict, init=False)
    waits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._clock = 0.0
        self._there = {name: node_of(name, devices) for name, devices in self.sizes.items()}
        self._gangs: dict[int, _Gang] = {}
        self._events: list[Event] = []
        self._script: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._spins = 0
        self._is_woken = False

    # ---- the script -------------------------------------------------------------------------------------------------

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._script, (moment, next(self._numbers), action))

    def lose(self, node: str) -> None:
        """A node goes away, with all that runs there."""
        del self._there[node]
        for number in [number for number, gang in self._gangs.items() if gang.node == node]:
            self._end(number, Failure(message=f"node {node} is gone", is_lost=True))

    def come(self, node: str, devices: int) -> None:
        self._there[node] = node_of(node, devices)

    def pass_time(self, seconds: float) -> None:
        """The fleet itself takes some time, in which gangs go on."""
        until = self._clock + seconds
        while self._happen(until):
            pass

    def kill_job(self, job: str) -> None:
        """Something else than the fleet kills a job's gang."""
        for gang in [gang for gang in self._gangs.values() if gang.job == job]:
            self._end_process(gang.process, "rank 0 was killed by signal 9")

    # ---- the cluster ------------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        return list(self._there.values())

    def now(self) -> float:
        return self._clock

    def start(self, orders: Sequence[Order], node: str, devices: Sequence[int]) -> None:
        assert not any(order.gang in self._gangs for order in orders)
        if node not in self._there:
            lost = Failure(message=f"no node {node}", is_lost=True)
            self._events += [Ended(gang=order.gang, failure=lost) for order in orders]
            return
        assert all(len(order.devices) == len(set(devices)) == len(devices) > 0 for order in orders)
        assert set(devices) <= set(range(len(self._there[node].devices)))
        for gang in self._gangs.values():
            assert gang.node != node or not set(devices) & set(gang.devices), "a device has two gangs"
            assert gang.job not in [order.job["name"] for order in orders], "a job has two gangs"
        for each in orders:
            speed = self.speeds(each.job["name"], each.technique, len(devices))
            step = self.saved.get(each.job["name"], 0)
            gang = _Gang(each, orders[0].gang, node, tuple(devices), speed, self._clock, step, step, step)
            gang.since, gang.until = self._clock, self._clock + speed.open
            self._gangs[each.gang] = gang

    def stop(self, gang: int) -> None:
        found = self._gangs.get(gang)
        if found is None:
            return
        found.is_stopped = True
        if found.phase is _Phase.STEPS:  # to the end of the step under way
            begun = math.ceil((self._clock - found.since) / found.speed.step - _ROUNDING)
            found.count = min(found.count, max(1, begun))
            found.until = found.since + found.count * found.speed.step

    def kill(self, gang: int) -> None:
        if gang in self._gangs:
            self._end_process(self._gangs[gang].process, "the fleet has killed it")

    def wait(self, seconds: float) -> Sequence[Event]:
        assert seconds >= 0
        self.waits += 1
        until, begun = self._clock + seconds, self._clock
        self._is_woken = False
        while not self._events and not self._is_woken and self._happen(until):
            pass
        for number, gang in self._gangs.items():
            self._tell_steps(number, gang)
        events, self._events = self._events, []
        self._spins = self._spins + 1 if not events and self._clock == begun else 0
        assert self._spins < _SPINS, "the fleet looks and looks, and does not wait"
        assert self.waits < _MOST_WAITS, "the fleet does not end"
        return events

    def close(self) -> None:
        for number in list(self._gangs):
            self.kill(number)

    # ---- gangs ------------------------------------------------------------------------------------------------------

    def running(self) -> Iterator[str]:
        """The jobs with gangs."""
        return (gang.job for gang in self._gangs.values())

    def _happen(self, until: float) -> bool:
        """What comes next until a moment. False if nothing does: then it is that moment."""
        following = min((gang.until for gang in self._gangs.values()), default=math.inf)
        scripted = self._script[0][0] if self._script else math.inf
        if min(following, scripted) > until:
            assert until < math.inf, "the fleet waits for ever"
            self._clock = until
            return False
        self._clock = max(self._clock, min(following, scripted))
        if scripted <= following:
            heapq.heappop(self._script)[2]()
            self._is_woken = True  # nodes may have changed
            return True
        for number, gang in list(self._gangs.items()):
            if gang.until <= self._clock and number in self._gangs:  # another one may have ended its process
                self._go_on(number, gang)
        return True

    def _go_on(self, number: int, gang: _Gang) -> None:
        """The end of a phase."""
        if gang.phase is _Phase.OPENS:
            gang.saved_at = self._clock
            self._tell(number, "opened", gang.step)
            self._decide(number, gang)
        elif gang.phase is _Phase.STEPS:
            self._tell_steps(number, gang)
            gang.step += gang.count
            self._decide(number, gang)
        elif gang.phase is _Phase.EXITS:
            self._end(number, None)
        else:
            self.saved[gang.job] = gang.step
            self._tell(number, "saved", gang.step)
            if gang.phase is _Phase.SAVES:
                gang.saved_at = self._clock
                self._make_steps(gang, self._fault(gang))
                return
            if gang.step == gang.steps:
                self._tell(number, "done", gang.step, evaluation=None)
            else:
                self._tell(number, "stopped", gang.step)
            self._enter(gang, _Phase.EXITS, gang.speed.exit)

    def _decide(self, number: int, gang: _Gang) -> None:
        """Between two steps."""
        fault = self._fault(gang)
        if fault is not None and fault.step == gang.step and gang.step < gang.steps:
            fault.times -= 1
            self._befall(number, gang, fault)
        elif gang.step >= gang.steps or gang.is_stopped:
            self._enter(gang, _Phase.SAVES_LAST, gang.speed.save)
        elif self._clock - gang.saved_at > gang.order.settings.interval:
            self._enter(gang, _Phase.SAVES, gang.speed.save)
        else:
            self._make_steps(gang, fault)

    def _fault(self, gang: _Gang) -> Fault | None:
        """The next one."""
        found = [
            fault
            for fault in self.faults
            if fault.job == gang.job and fault.times > 0 and fault.step >= gang.step
            if not fault.technique or fault.technique == gang.order.technique
        ]
        return min(found, key=lambda fault: fault.step, default=None)

    def _befall(self, number: int, gang: _Gang, fault: Fault) -> None:
        if fault.trouble is Trouble.HANGS:
            self._enter(gang, _Phase.HANGS, math.inf)
        elif fault.trouble is Trouble.DIES:
            self._end_process(gang.process, "rank 0 was killed by signal 9")
        elif fault.trouble is Trouble.WONT_DO:
            self._end(number, Failure(message="too large", wont_do=True, smallest_budget=1))
        elif fault.trouble is Trouble.ENDS:
            self._end(number, None)
        else:
            message = f"ValueError: step {gang.step} of {gang.job}"
            self._end(number, Failure(message=message, trace=f"Traceback\n{message}"))

    def _make_steps(self, gang: _Gang, fault: Fault | None) -> None:
        """As many as are made before something else happens: an end, a checkpoint, a fault."""
        count = 1 if gang.is_stopped else gang.steps - gang.step
        if fault is not None and fault.step > gang.step:
            count = min(count, fault.step - gang.step)
        due = (gang.saved_at + gang.order.settings.interval - self._clock) / gang.speed.step
        gang.count = min(count, max(1, math.floor(min(due, _MOST_STEPS)) + 1))
        self._enter(gang, _Phase.STEPS, gang.count * gang.speed.step)

    def _enter(self, gang: _Gang, phase: _Phase, seconds: float) -> None:
        gang.phase, gang.since, gang.until = phase, self._clock, self._clock + seconds

    def _tell_steps(self, number: int, gang: _Gang) -> None:
        made = gang.made(self._clock)
        if made > gang.told:
            gang.told = made
            self._tell(number, "step", made, seconds=gang.speed.step, loss=1.0 / made)

    def _tell(self, number: int, event: str, step: int, **more: Any) -> None:
        self._events.append(Progress(gang=number, record={"event": event, "gang": number, "step": step, **more}))

    def _end_process(self, process: int, message: str) -> None:
        numbers = [number for number, gang in self._gangs.items() if gang.process == process]
        for number in numbers:
            self._tell_steps(number, self._gangs[number])
        for number in numbers:
            self._end(number, Failure(message=message, is_lost=True))

    def _end(self, number: int, failure: Failure | None) -> None:
        gang = self._gangs.pop(number)
        self._tell_steps(number, gang)
        self.stretches.append(
            Stretch(
                gang.job,
                gang.order.technique,
                gang.node,
                gang.devices,
                gang.start,
                self._clock,
                gang.first,
                gang.made(self._clock),
                failure,
            )
        )
        self._events.append(Ended(gang=number, failure=failure))


def node_of(name: str, devices: int) -> Node:
    device = Device(name="simulated", card=None, simulated=SimulatedDevice(), budget=1)
    return Node(name=name, devices=(device,) * devices)
