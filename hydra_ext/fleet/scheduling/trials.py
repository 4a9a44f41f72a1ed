"""The trial runner: asks every technique about every job, and measures a few steps of those that would do.

Jobs that differ in nothing but numbers of their optimizer and schedule, such as a learning rate, are measured once.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra_ext.errors import InvalidJob, JobDoesNotFit, StateError
from hydra_ext.fleet import references
from hydra_ext.fleet.cluster.interface import Cluster, Ended, Failure, Node, Order, Task
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.techniques import technique_named

logger = logging.getLogger(__name__)

_TRIED = 10  # times the patience for a step: what a search or a trial may take
_LIVES = 3  # processes of one search or trial: another one of this machine may have had its memory, and be gone now
_REFERENCES = ("plain", "offload")  # the first of them that trains on one device has the bits that others must have


@dataclass(frozen=True, kw_only=True)
class Option:
    """A technique on a number of devices, with what was measured.

    Attributes:
        technique: Place of its class.
        name: As in reports.
        devices: Number of devices of one node.
        configuration: What the technique has chosen.
        bound: How far its numbers may be from the plain loop's, in words; empty if it has the same bits.
        step_s: Seconds of a step.
        open_s: Seconds from the start of the processes to the first step.
        save_s: Seconds of a checkpoint.
    """

    technique: str
    name: str
    devices: int
    configuration: Mapping[str, Any]
    bound: str
    step_s: float
    open_s: float
    save_s: float


@dataclass(frozen=True, kw_only=True)
class SharingOption(Option):
    """One with which a job may share its device.

    Attributes:
        loads: Seconds in which a step uses each resource of the device.
    """

    loads: Mapping[str, float]

    def base_for(self, seed: int) -> str:
        """What a job with this seed has in common with those that it makes its steps with; empty if it makes none."""
        base = str(self.configuration.get("base", ""))
        return f"{base}/{seed}" if self.configuration.get("seeded") else base


def _option(described: Mapping[str, Any]) -> Option:
    return SharingOption(**described) if "loads" in described else Option(**described)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of one kind of job.

    Attributes:
        options: What would do.
        refused: Why others would not, by technique and number of devices.
        smallest_budget: The smallest budget that a technique would do with; None if none said so.
    """

    options: Sequence[Option]
    refused: Mapping[str, str]
    smallest_budget: int | None = None

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(described: Mapping[str, Any]) -> Measured:
        return Measured(**{**described, "options": [_option(each) for each in described["options"]]})


def kind_of(job: Mapping[str, Any], node: Node) -> str:
    """What jobs that run alike have in common."""
    return json.dumps([*_likeness(job), node.devices[0].kind()], sort_keys=True)


def is_of_kind(job: Mapping[str, Any], kind: str) -> bool:
    """Whether a job is of a kind, on whatever devices: a machine without them can tell."""
    return bool(json.loads(kind)[:-1] == json.loads(json.dumps(_likeness(job))))


def _likeness(job: Mapping[str, Any]) -> list[Any]:
    rest = {key: job[key] for key in ("model", "data", "loss", "exact", "delayed")}
    return [rest, {key: references.shape_of(job[key]) for key in ("optimizer", "schedule", "max_norm")}]


class Trials:
    """
    Args:
        folder: For the trials' files; removed afterwards.
        techniques: Places of the techniques to ask.
        record: Called with what was measured, for the journal.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        techniques: Sequence[str],
        settings: Settings,
        *,
        gangs: Iterator[int],
        record: Callable[..., None],
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._techniques = techniques
        self._settings = settings
        self._gangs = gangs
        self._record = record

    def measure(
        self, jobs: Sequence[Mapping[str, Any]], known: Mapping[str, Measured] | None = None
    ) -> dict[str, Measured]:
        """What is known of each job, by name.

        Args:
            known: What was measured before, by kind.

        Raises:
            InvalidJob: A function of a job raises.
            JobDoesNotFit: No technique would do.
        """
        node, all_known = largest_node(self._cluster), dict(known or {})
        kinds = {job["name"]: kind_of(job, node) for job in jobs}
        new = {kinds[job["name"]]: job for job in reversed(jobs) if kinds[job["name"]] not in all_known}
        if new:
            all_known |= self._measure_kinds(dict(reversed(new.items())), node)
        found = {job["name"]: all_known[kinds[job["name"]]] for job in jobs}
        for name, measured in found.items():
            if not measured.options:
                raise _does_not_fit(name, measured)
        return found

    def _measure_kinds(self, new: Mapping[str, Mapping[str, Any]], node: Node) -> dict[str, Measured]:
        shutil.rmtree(self._folder, ignore_errors=True)  # of trials that were interrupted
        answers = self._asked(new, node)
        trials = [
            (kind, answer, self._order(Task.TRIAL, new[kind], _devices(node, answer), answer=answer))
            for kind in new
            for answer in answers[kind]
            if answer["configuration"] is not None
        ]
        failures = self._run([order for _, _, order in trials])
        found = {}
        for kind, job in new.items():
            tried = [(answer, order) for of_kind, answer, order in trials if of_kind == kind]
            found[kind] = _concluded(answers[kind], tried, failures, exact=bool(job["exact"]), wanted=self._techniques)
            lost = [failure for _, order in tried if (failure := failures[order.gang]) is not None and failure.is_lost]
            if found[kind].options and not lost:  # others are measured again when the fleet resumes
                self._record("measured", kind=kind, measured=found[kind].describe())
        shutil.rmtree(self._folder, ignore_errors=True)
        return found

    def _asked(self, new: Mapping[str, Mapping[str, Any]], node: Node) -> dict[str, list[dict[str, Any]]]:
        """The techniques' answers about each kind of job. Exact jobs need one on one device to compare the others with.

        Raises:
            InvalidJob: A job cannot be built.
        """
        most = len(node.devices)
        asked = [(place, devices) for place in self._techniques for devices in _tried(place, most)]
        more = [(place, 1) for place in _REFERENCES if place not in self._techniques]
        devices = [device.describe() for device in node.devices]
        searches = {
            kind: self._order(Task.SEARCH, job, devices, asked=[*asked, *(more if job["exact"] else ())])
            for kind, job in new.items()
        }
        failures = self._run(list(searches.values()))
        answers: dict[str, list[dict[str, Any]]] = {}
        for kind, order in searches.items():
            failure = failures[order.gang]
            if failure is not None:
                raise InvalidJob(f"job {order.job['name']!r} cannot be built: {failure.message}\n{failure.trace}")
            answers[kind] = _with_references(json.loads(order.result_file.read_text()), self._techniques)
        return answers

    def _order(
        self,
        task: Task,
        job: Mapping[str, Any],
        devices: Sequence[Mapping[str, Any]],
        *,
        asked: Sequence[tuple[str, int]] = (),
        answer: Mapping[str, Any] | None = None,
    ) -> Order:
        return Order(
            gang=next(self._gangs),
            task=task,
            job=job,
            folder=str(self._folder),
            devices=devices,
            settings=self._settings,
            technique="" if answer is None else answer["technique"],
            configuration={"asked": asked} if answer is None else answer["configuration"],
        )

    def _run(self, orders: Sequence[Order]) -> dict[int, Failure | None]:
        """Runs orders side by side, as devices allow. Returns each gang's failure.

        If the node goes away, all that ran there begins again on another one. So does what was killed from outside.

        Raises:
            StateError: There is no node.
        """
        node, by_gang = largest_node(self._cluster), {order.gang: order for order in orders}
        waiting, running, ended = list(orders), dict[int, tuple[list[int], float]](), dict[int, Failure | None]()
        lost = Counter[int]()
        while len(ended) < len(orders):
            if node.name not in self._names():
                node = largest_node(self._cluster)
            for order in [order for order in waiting if _needed(order) > len(node.devices)]:
                waiting.remove(order)
                ended[order.gang] = Failure(message="no node that is left has so many devices", is_lost=True)
            taken = {device for devices, _ in running.values() for device in devices}
            free = [device for device in range(len(node.devices)) if device not in taken]
            while waiting and len(free) >= _needed(waiting[0]):
                order = waiting.pop(0)
                own, free = free[: _needed(order)], free[_needed(order) :]
                running[order.gang] = own, self._cluster.now() + _TRIED * self._settings.patience
                self._cluster.start([order], node.name, own)
            for event in self._cluster.wait(1.0):
                if isinstance(event, Ended) and event.gang in running:
                    _, until = running.pop(event.gang)
                    is_lost, is_there = event.failure is not None and event.failure.is_lost, node.name in self._names()
                    lost[event.gang] += is_lost and is_there
                    if is_lost and (not is_there or (until < float("inf") and lost[event.gang] < _LIVES)):
                        waiting.append(by_gang[event.gang])
                    else:
                        ended[event.gang] = event.failure
            self._kill_late(running)
        return ended

    def _names(self) -> set[str]:
        return {node.name for node in self._cluster.nodes()}

    def _kill_late(self, running: dict[int, tuple[list[int], float]]) -> None:
        now = self._cluster.now()
        for gang, (own, until) in running.items():
            if now > until:
                running[gang] = own, float("inf")
                self._cluster.kill(gang)


def _concluded(
    answers: Sequence[Mapping[str, Any]],
    tried: Sequence[tuple[Mapping[str, Any], Order]],
    failures: Mapping[int, Failure | None],
    *,
    exact: bool,
    wanted: Sequence[str],
) -> Measured:
    refused = {_label(answer): answer["why_not"] for answer in answers if answer["configuration"] is None}
    budgets = [answer["smallest_budget"] for answer in answers]
    options: list[Option] = []
    digests: list[str] = []
    for answer, order in tried:
        failure = failures[order.gang]
        if failure is not None:
            refused[_label(answer)] = failure.message
            budgets.append(failure.smallest_budget)
            continue
        facts = {key: answer[key] for key in ("technique", "name", "devices", "configuration", "bound")}
        trial = json.loads(order.result_file.read_text())
        options.append(
            _option(facts | {key: trial[key] for key in ("step_s", "open_s", "save_s", "loads") if key in trial})
        )
        digests.append(trial["digest"])
    if exact:
        options = _exact_ones(options, digests, refused)
    return Measured(
        options=[option for option in options if option.technique in wanted],
        refused=refused,
        smallest_budget=min((each for each in budgets if each), default=None),
    )


def _exact_ones(options: Sequence[Option], digests: Sequence[str], refused: dict[str, str]) -> list[Option]:
    """Those whose trial gave the bits of the plain loop.

    Args:
        digests: Of the losses and weights of each option's trial.
    """
    pairs = list(zip(options, digests, strict=True))
    alone = {option.technique: digest for option, digest in pairs if option.devices == 1}
    reference = next((alone[place] for place in _REFERENCES if place in alone), None)
    if reference is None and options:
        logger.warning("no technique on one device would do: the numbers of the others could not be compared")
    kept = []
    for option, digest in pairs:
        label = f"{option.name} on {option.devices}"
        if reference is not None and digest != reference:
            refused[label] = "its losses or weights differ from the plain loop's, after the steps that were tried"
            logger.warning("%s gives other numbers than the plain loop, and is not used with exact=True", label)
        else:
            kept.append(option)
    return kept


def largest_node(cluster: Cluster) -> Node:
    """
    Raises:
        StateError: There is no node.
    """
    nodes = cluster.nodes()
    if not nodes:
        raise StateError("no node is left: call resume() when there are some")
    return max(nodes, key=lambda node: len(node.devices))


def _tried(place: str, most: int) -> list[int]:
    """The numbers of devices to try: powers of two, and all of a node."""
    counts = technique_named(place).counts(most)
    return [each for each in counts if each & (each - 1) == 0 or each == most]


def _with_references(answers: Sequence[dict[str, Any]], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """The answers of the techniques that are wanted, and of the references that would do, if none of these is one.

    All of them, as one that would do by its size may still fail. Where only references are wanted there is nothing to
    compare.
    """
    own = [answer for answer in answers if answer["technique"] in wanted]
    doing = [answer for answer in own if answer["configuration"] is not None]
    if any(answer["technique"] in _REFERENCES for answer in doing) or not doing:
        return own
    others = [each for each in answers if each["technique"] not in wanted and each["configuration"] is not None]
    return [*own, *others]


def _devices(node: Node, answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [device.describe() for device in node.devices[: answer["devices"]]]


def _needed(order: Order) -> int:
    return 1 if order.task is Task.SEARCH else len(order.devices)


def _label(answer: Mapping[str, Any]) -> str:
    return f"{answer['name']} on {answer['devices']}"


def _does_not_fit(name: str, measured: Measured) -> JobDoesNotFit:
    reasons = "; ".join(f"{label}: {reason}" for label, reason in measured.refused.items())
    needed = measured.smallest_budget
    remedy = "no budget would do" if needed is None else f"give each device a budget of at least {needed} bytes"
    return JobDoesNotFit(
        f"job {name!r} fits no device: {remedy}. {reasons}",
        job=name,
        smallest_budget=needed,
        reasons=measured.refused,
    )
