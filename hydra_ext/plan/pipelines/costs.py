"""The seconds and bytes of one choice: by this project's own schedules, their verifier and their simulator."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise

from hydra_ext.errors import InvalidSchedule, PlanDoesNotFit
from hydra_ext.plan.chain import Event, partition_chain
from hydra_ext.plan.pipelines.chains import Chain
from hydra_ext.plan.pipelines.forecast import PlannedStage
from hydra_ext.plan.pipelines.question import Cluster, PipelineChoice
from hydra_ext.schedule import Schedule, make

_BATCHES = 4  # that are simulated; a step's seconds are those of the later ones
_MOST_SIMULATED = 64  # microbatches; with more, seconds grow as they do up to there
_MOST_CUTS = 32  # ways to cut a model that are all tried
_BISECTIONS = 8  # of the smallest memory that a division needs


@dataclass(frozen=True, kw_only=True)
class Lived:
    """A kind of schedule for one number of microbatches.

    Attributes:
        in_flight: For each stage, microbatches between forward and backward.
        weights: For each stage, copies of the weights and of their gradients.
    """

    schedule: Schedule
    in_flight: tuple[int, ...]
    weights: tuple[int, ...]


@lru_cache(maxsize=4096)
def lived(kind: str, stages: int, ranks: int, microbatches: int) -> Lived | None:
    """None if the kind does not allow these numbers."""
    try:
        schedule = make(kind, stages=stages, ranks=ranks, microbatches=microbatches)
    except InvalidSchedule:
        return None
    peaks = schedule.verify().stages
    return Lived(
        schedule=schedule,
        in_flight=tuple(peak.in_flight for peak in peaks),
        weights=tuple(peak.versions + peak.gradients for peak in peaks),
    )


class Judge:
    """Judges the divisions of a chain for one choice.

    Args:
        choice: The choice.
        chain: The chain for its size of microbatches.
        cluster: What the ranks run on.
    """

    def __init__(self, choice: PipelineChoice, chain: Chain, cluster: Cluster) -> None:
        self.choice = choice
        self.chain = chain
        self.cluster = cluster
        self._counts = _simulated(choice)

    @cached_property
    def _runs(self) -> list[Lived] | None:
        choice = self.choice
        found = [lived(choice.schedule, choice.stages, choice.depth, count) for count in self._counts]
        return None if None in found else [run for run in found if run is not None]

    @property
    def is_possible(self) -> bool:
        """Whether the schedule allows the numbers."""
        return self._runs is not None

    # ---- cuts -------------------------------------------------------------------------------------------------------
    def allows(self, cuts: tuple[int, ...]) -> bool:
        """Whether no two stages of one rank use one parameter: the rank's module has one place for it."""
        for each in self.chain.shared:
            stages = {bisect_right(cuts, event) for event in each.events}
            if len({stage % self.choice.depth for stage in stages}) < len(stages):
                return False
        return True

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """Divisions worth judging; the one whose slowest stage is fastest comes first."""
        possible, needed = self.chain.possible_cuts, self.choice.stages - 1
        first = self._fastest
        yield first
        if math.comb(len(possible), needed) <= _MOST_CUTS:
            yield from (cuts for cuts in combinations(possible, needed) if cuts != first)
            return
        yield from {cuts: None for cuts in self._tighter() if cuts != first}

    def _tighter(self) -> Iterator[tuple[int, ...]]:
        """The division that needs the least memory, and one between it and the fastest."""
        low, high = 0, self._held(self._fastest)
        best = None
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            try:
                best = self._partition(middle)
                high = middle
            except PlanDoesNotFit:
                low = middle
        if best is None:
            return
        yield best
        yield self._partition((high + self._held(self._fastest)) // 2)

    @cached_property
    def _fastest(self) -> tuple[int, ...]:
        return self._partition(None)

    def _held(self, cuts: tuple[int, ...]) -> int:
        return max(sum(self._heavy[begin:end]) for begin, end in pairwise((0, *cuts, len(self._heavy))))

    @cached_property
    def _heavy(self) -> list[int]:
        """Bytes that each event adds to its stage, roughly: the partition knows one number for each."""
        runs = self._runs or []
        flying = 1 if self.choice.recompute else max((max(run.in_flight) for run in runs), default=1)
        copies = self.cluster.state_copies + max((max(run.weights) for run in runs), default=2)
        return [
            int(copies * (0 if self.cluster.weights_at_home else event.parameter_bytes))
            + flying * event.activation_bytes
            for event in self.chain.events
        ]

    def _partition(self, memory: int | None) -> tuple[int, ...]:
        again = self.choice.recompute
        found = partition_chain(
            [
                Event(
                    forward_seconds=event.forward_seconds,
                    backward_seconds=event.backward_seconds + (event.forward_seconds if again else 0.0),
                    parameter_bytes=event.parameter_bytes if memory is None else held,
                )
                for event, held in zip(self.chain.events, self._heavy, strict=True)
            ],
            self.chain.boundaries,
            stages=self.choice.stages,
            shared=self.chain.shared if memory is None else (),
            bandwidth=self.cluster.bytes_per_second,
            latency=self.cluster.latency,
            memory=memory,
        )
        return found.cuts

    # ---- bytes ------------------------------------------------------------------------------------------------------
    def stages(self, cuts: tuple[int, ...]) -> tuple[PlannedStage, ...]:
        chain, planned = self.chain, []
        for stage, (begin, end) in enumerate(pairwise((0, *cuts, len(chain.events)))):
            own = chain.events[begin:end]
            forward = sum(event.forward_seconds for event in own) + chain.overheads.passing
            backward = sum(event.backward_seconds for event in own)
            if self.choice.recompute:
                backward += forward + chain.overheads.recomputing
            planned.append(
                PlannedStage(
                    rank=stage % self.choice.depth,
                    begin=begin,
                    names=chain.names[begin:end],
                    forward_seconds=forward,
                    backward_seconds=backward,
                    weight_bytes=chain.weight_bytes(begin, end),
                    nbytes=self._held_bytes(stage, begin, end) + self._passing_bytes(begin, end),
                )
            )
        return tuple(planned)

    def _held_bytes(self, stage: int, begin: int, end: int) -> int:
        """What a stage holds all the time, or for microbatches in flight."""
        chain, cluster = self.chain, self.cluster
        own = chain.events[begin:end]
        if self.choice.recompute:
            kept = (chain.crossing_bytes(begin) if begin else 0) + chain.input_bytes
        else:
            kept = sum(event.activation_bytes for event in own)
        if cluster.weights_at_home:
            weights = 2 * max(event.parameter_bytes for event in own)
        else:
            copies = (self._runs or [])[-1].weights[stage] + cluster.state_copies
            weights = math.ceil(copies * chain.weight_bytes(begin, end))
        return weights + self._peak(stage) * kept

    def _passing_bytes(self, begin: int, end: int) -> int:
        """What a stage holds while it computes, beside that: a rank computes one of its stages at a time."""
        again = sum(event.activation_bytes for event in self.chain.events[begin:end]) if self.choice.recompute else 0
        return again + max(self.chain.working_bytes[begin:end], default=0)

    def _peak(self, stage: int) -> int:
        counts = [run.in_flight[stage] for run in self._runs or []]
        return round(_at(self.choice.microbatches, self._counts, counts))

    def rank_bytes(self, stages: Sequence[PlannedStage]) -> tuple[int, ...]:
        held, passing = [0] * self.choice.depth, [0] * self.choice.depth
        for stage in stages:
            most = self._passing_bytes(stage.begin, stage.begin + len(stage.names))
            held[stage.rank] += stage.nbytes - most
            passing[stage.rank] = max(passing[stage.rank], most)
        return tuple(map(operator.add, held, passing))

    # ---- seconds ----------------------------------------------------------------------------------------------------
    def least_seconds(self, stages: Sequence[PlannedStage]) -> float:
        """No schedule is faster: the ranks' own work."""
        return max(self._computing(stages))

    def _computing(self, stages: Sequence[PlannedStage]) -> list[float]:
        work = [
            self.choice.microbatches * (stage.forward_seconds + stage.backward_seconds)
            + self.cluster.update_seconds * stage.weight_bytes
            for stage in stages
        ]
        ranks = range(self.choice.depth)
        return [sum(each for each, stage in zip(work, stages, strict=True) if stage.rank == rank) for rank in ranks]

    def seconds(self, stages: Sequence[PlannedStage]) -> float:
        """Of a step, when the pipeline is in its rhythm."""
        measured = [self._simulated(run.schedule, stages) for run in self._runs or []]
        return _at(self.choice.microbatches, self._counts, measured)

    def _simulated(self, schedule: Schedule, stages: Sequence[PlannedStage]) -> float:
        hops = [(first, second) for first, second in pairwise(stages)]
        return schedule.simulate(
            batches=_BATCHES,
            forward=[stage.forward_seconds for stage in stages],
            backward=[stage.backward_seconds for stage in stages],
            update=[self.cluster.update_seconds * stage.weight_bytes for stage in stages],
            reduce=[self._reducing(stage) for stage in stages],
            crossing_bytes=[float(self._crossing(first, second)) for first, second in hops],
            bytes_per_second=self.cluster.bytes_per_second,
            latency=[self.cluster.latency if first.rank != second.rank else 0.0 for first, second in hops],
            overlap=self.cluster.overlap,
        ).period

    def _crossing(self, first: PlannedStage, second: PlannedStage) -> int:
        return 0 if first.rank == second.rank else self.chain.crossing_bytes(second.begin)

    def _reducing(self, stage: PlannedStage) -> float:
        """Seconds of the sum over replicas: each byte is sent and received by all but one of them."""
        width = self.choice.width
        if width == 1:
            return 0.0
        return 2 * (width - 1) / width * stage.weight_bytes / self.cluster.bytes_per_second + self.cluster.latency

    def lanes(self, stages: Sequence[PlannedStage], seconds: float) -> dict[str, float]:
        """Seconds of a step in which each thing is busy, on the rank or hop where it is so the longest."""
        computing = max(self._computing(stages))
        messages = [
            self.choice.microbatches * (self._crossing(a, b) / self.cluster.bytes_per_second + self.cluster.latency)
            for a, b in pairwise(stages)
            if a.rank != b.rank
        ]
        return {
            "compute": computing,
            "waiting": max(seconds - computing, 0.0),
            "messages": max(messages, default=0.0),
            "sums of replicas": max(self._reducing(stage) for stage in stages),
        }


def _simulated(choice: PipelineChoice) -> tuple[int, ...]:
    """Numbers of microbatches that are simulated: the step's own, or two from which it is extended."""
    most = max(_MOST_SIMULATED, 4 * choice.stages)
    if choice.microbatches <= most:
        return (choice.microbatches,)
    line = choice.depth
    return (most // 2 // line * line, most // line * line)


def _at(count: int, counts: Sequence[int], values: Iterable[float]) -> float:
    """A value for a number of microbatches, on the line through those that are known."""
    known = list(values)
    if len(known) == 1:
        return known[0]
    slope = (known[1] - known[0]) / (counts[1] - counts[0])
    return known[0] + slope * (count - counts[0])
