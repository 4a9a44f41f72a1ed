"""Schedules for tests, and a runner of their actions that behaves like a transport of queues."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from hydra_ext.schedule import Action, ActionKind, Schedule, make

F, B, R = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE
BU, U = ActionKind.BEGIN_UPDATE, ActionKind.UPDATE
SF, RF = ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION
SB, RB = ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT

BEING_WRITTEN = -1  # in place of a version

Shape = tuple[str, int, int, int]
"""Kind, stages, ranks, microbatches."""


def square_shapes(depths: Sequence[int], microbatches: Sequence[int]) -> list[Shape]:
    """Returns shapes with one stage for each rank."""
    kinds = [("pipedream", d, d, 1) for d in depths]
    kinds += [(kind, d, d, m) for kind in ("gpipe", "1f1b", "2bw") for d in depths for m in microbatches]
    return [shape for shape in kinds if possible(shape)]


def wrapped_shapes(ranks: Sequence[int], chunks: Sequence[int], microbatches: Sequence[int]) -> list[Shape]:
    """Returns shapes with several stages for each rank."""
    kinds = ("gpipe", "2bw", "interleaved")
    shapes = [(kind, v * r, r, m) for kind in kinds for r in ranks for v in chunks for m in microbatches]
    return [shape for shape in shapes if possible(shape)]


def possible(shape: Shape) -> bool:
    kind, _, ranks, microbatches = shape
    return kind != "2bw" or microbatches >= ranks - 1


def made(shape: Shape) -> Schedule:
    kind, stages, ranks, microbatches = shape
    return make(kind, stages=stages, ranks=ranks, microbatches=microbatches)


class Blocked(Exception):
    """No rank can continue."""


class Transport:
    """Runs every rank in its own order.

    Each direction of each hop is one queue, like a socket: the n-th receive gets the n-th value sent. Buffers of
    weights form a ring, as in the runtime: once an update begins, the oldest is written over. Each stage has one sum of
    gradients, which a reduction takes."""

    def __init__(self, schedule: Schedule, ranks: Sequence[Sequence[Action]], *, rendezvous: bool = False) -> None:
        self.schedule = schedule
        self.rendezvous = rendezvous
        self.actions = ranks
        self.sent: dict[tuple[ActionKind, int], list[tuple[int, int]]] = defaultdict(list)
        self.posted: dict[tuple[ActionKind, int], list[tuple[int, int]]] = defaultdict(list)
        self.done: Counter[Action] = Counter()
        self.in_flight = [0] * schedule.stages
        self.most_in_flight = [0] * schedule.stages
        self.held = [deque([0], maxlen=count) for count in schedule.versions]
        self.summed: list[list[int]] = [[] for _ in range(schedule.stages)]  # batches, by stage
        self.log: list[Action] = []

    def run(self) -> Transport:
        at = [0] * self.schedule.ranks
        while any(at[rank] < len(actions) for rank, actions in enumerate(self.actions)):
            before = list(at)
            for rank, actions in enumerate(self.actions):
                while at[rank] < len(actions) and self._take(actions[at[rank]]):
                    at[rank] += 1
            if at == before:
                raise Blocked(
                    [actions[at[rank]] for rank, actions in enumerate(self.actions) if at[rank] < len(actions)]
                )
        assert self.sent == self.posted
        assert self.in_flight == [0] * self.schedule.stages
        assert set(self.done.values()) <= {1}
        return self

    def check_complete(self) -> None:
        """Asserts that all actions of the batches that have begun were done."""
        seen = {(action.batch, action.microbatch) for action in self.log if action.kind in (F, B)}
        wanted = {(kind, stage, *place) for kind in (F, B) for stage in range(self.schedule.stages) for place in seen}
        batches = {batch for batch, _ in seen}
        wanted |= {(kind, stage, b, 0) for kind in (R, BU, U) for stage in range(self.schedule.stages) for b in batches}
        there = {(a.kind, a.stage, a.batch, a.microbatch) for a in self.log if a.kind in (F, B, R, BU, U)}
        assert there == wanted

    def _take(self, action: Action) -> bool:
        stage, kind = action.stage, action.kind
        if kind in (F, B):
            if not self._arrived(action):
                return False
            assert self.schedule.version_of(stage, action.batch) in self.held[stage], (action, self.held[stage])
            assert kind == F or (self._has(F, action, stage) and not self._has(R, action, stage))
            self.in_flight[stage] += 1 if kind == F else -1
            self.most_in_flight[stage] = max(self.most_in_flight[stage], self.in_flight[stage])
            if kind == B:
                self.summed[stage].append(action.batch)
        elif kind in (SF, SB):
            sent, posted = self.sent[kind, stage], self.posted[kind, stage]
            if self.rendezvous and len(sent) == len(posted):
                return False
            assert self._has(F if kind == SF else B, action, stage)
            sent.append((action.batch, action.microbatch))
        elif kind in (RF, RB):
            self.posted[(SF, stage - 1) if kind == RF else (SB, stage + 1)].append((action.batch, action.microbatch))
        elif kind == R:
            assert set(self.summed[stage]) == {action.batch}, (action, self.summed[stage])
            self.summed[stage].clear()
        elif kind == U:
            if self.schedule.versions[stage] == 1:  # nothing else uses the rank while its weights are written over
                own = self.actions[self.schedule.stage_rank(stage)]
                assert own[own.index(action) - 1] == Action(BU, stage=stage, batch=action.batch), action
            if any(not self._has(R, action, other) for other in range(self.schedule.stages)):
                return False
            assert self.held[stage][-1] == BEING_WRITTEN
            self.held[stage][-1] = action.batch + 1
        elif kind == BU:
            own = self.schedule.stages_of(self.schedule.stage_rank(stage))
            assert all(self._has(R, action, other) for other in own), action  # their gradients are summed together
            assert self.held[stage][-1] == action.batch, (action, self.held[stage])
            self.held[stage].append(BEING_WRITTEN)
        self.done[action] += 1
        self.log.append(action)
        return True

    def _arrived(self, action: Action) -> bool:
        other = action.stage + (-1 if action.kind == F else 1)
        if not 0 <= other < self.schedule.stages:
            return True
        if self.schedule.stage_rank(other) == self.schedule.stage_rank(action.stage):
            return self._has(action.kind, action, other)
        assert self._has(RF if action.kind == F else RB, action, action.stage)
        queue = SF if action.kind == F else SB, other
        place = self.posted[queue].index((action.batch, action.microbatch))
        if place >= len(self.sent[queue]):
            return False
        assert self.sent[queue][place] == (action.batch, action.microbatch)
        return True

    def _has(self, kind: ActionKind, action: Action, stage: int) -> bool:
        microbatch = 0 if kind in (R, BU, U) else action.microbatch
        return self.done[Action(kind, stage=stage, batch=action.batch, microbatch=microbatch)] > 0
