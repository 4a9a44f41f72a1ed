"""What compute and the lanes of a planned step do when: the order, the sums and the ends of its intervals."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.plan import Card, LaneInterval, Plan, fit

CLOSE = 1e-9  # of the step's seconds
LINK = 1e8
CARD = Card(
    name="slow",
    memory_bytes=2**30,
    half_flops=1e11,
    full_flops=1e11,
    memory_bytes_per_second=1e11,
    link_bytes_per_second=LINK,
)
KEEP, OFFLOAD, COMPRESS = _C.ActivationOption.KEEP, _C.ActivationOption.OFFLOAD, _C.ActivationOption.COMPRESS
AGAIN, AGAIN_OFFLOADED = _C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED
Kind = _C.StepWorkKind
COMPUTE = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
TO_DEVICE, TO_HOST = (Kind.BRING_WEIGHTS, Kind.BRING_STASH), (Kind.SEND_STASH, Kind.SEND_GRADIENTS)


class Drawn:
    """A random step and its record."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        count = draw.randrange(1, 7)
        self.figures = [self._figures(draw) for _ in range(count)]
        self.segments = [_C.ActivationSegment(**figures) for figures in self.figures]
        self.options = [draw.choice((KEEP, OFFLOAD, COMPRESS, AGAIN, AGAIN_OFFLOADED)) for _ in range(count)]
        self.microbatches = draw.randrange(1, 6)
        self.round_size = draw.randrange(1, self.microbatches + 1)
        self.link = draw.choice((30.0, 100.0, 1000.0))
        given: dict[str, Any] = {
            "options": self.options,
            "round_size": self.round_size,
            "stash_bytes": draw.choice((0, 60, 200, 500)),
            "microbatches": self.microbatches,
            "to_device": self.link,
            "to_host": self.link,
            "update_seconds": draw.choice((0.0, 5.0, 50.0)),
        }
        *_, peak = _C.simulate_activations(self.segments, budget=2**40, **given)
        given["budget"] = peak + draw.randrange(500)
        self.seconds, self.compute, self.to_device, self.to_host, _ = _C.simulate_activations(self.segments, **given)
        self.record = _C.record_step(self.segments, **given)

    def _figures(self, draw: random.Random) -> dict[str, Any]:
        saved, weights = draw.randrange(1, 100), draw.choice((0, draw.randrange(100)))
        return {
            "forward_seconds": draw.random(),
            "backward_seconds": draw.random(),
            "saved_fresh": saved,
            "saved_all": saved + draw.choice((0, 7)),
            "inputs_fresh": draw.randrange(30),
            "inputs_all": 30,
            "parked_bytes": draw.randrange(20),
            "forward_bytes": draw.randrange(200),
            "backward_bytes": draw.randrange(200),
            "live_gradient_bytes": draw.randrange(50),
            "weight_bytes": weights,
            "slot_bytes": draw.randrange(weights + 1),
            "gradient_bytes": draw.choice((0, draw.randrange(100))),
            "recompute": _C.RecomputeScope.IN_ROUNDS,
            "stream_bytes": saved // 2,
            "coding_seconds": draw.random() / 10,
        }

    @property
    def rounds(self) -> int:
        return -(-self.microbatches // self.round_size)

    def of(self, *kinds: Any) -> list[Any]:
        return [work for work in self.record.work if work.kind in kinds]

    def of_segments(self, *kinds: Any) -> dict[int, list[Any]]:
        """In the order of time: of microbatches, or of passes."""
        found: dict[int, list[Any]] = defaultdict(list)
        for work in self.of(*kinds):
            found[work.segment].append(work)
        return found

    def moved(self, number: int) -> int:
        """Bytes of one microbatch that leave and come back."""
        figures = self.figures[number]
        sizes = {OFFLOAD: "saved_fresh", COMPRESS: "stream_bytes", AGAIN_OFFLOADED: "inputs_fresh"}
        option = self.options[number]
        return int(figures[sizes[option]]) if option in sizes else 0


def spent(work: Iterable[Any]) -> float:
    return sum(each.end - each.begin for each in work)


@pytest.mark.parametrize("seed", range(60))
def test_the_record_is_the_step_that_the_planner_counts(seed: int) -> None:
    drawn = Drawn(seed)
    work, close = drawn.record.work, pytest.approx
    assert max(each.end for each in work) == drawn.seconds
    for lane in (COMPUTE, TO_DEVICE, TO_HOST, (Kind.UPDATE,)):
        for before, after in itertools.pairwise(drawn.of(*lane)):
            assert before.begin <= before.end <= after.begin <= after.end
    assert spent(drawn.of(*COMPUTE)) == close(drawn.compute)
    assert spent(drawn.of(*TO_DEVICE)) == close(drawn.to_device)
    assert spent(drawn.of(*TO_HOST)) == close(drawn.to_host)
    assert sum(each.bytes for each in drawn.of(*TO_DEVICE)) == close(drawn.to_device * drawn.link)
    assert sum(each.bytes for each in drawn.of(*TO_HOST)) == close(drawn.to_host * drawn.link)
    for number, (figures, option) in enumerate(zip(drawn.figures, drawn.options, strict=True)):
        coding = figures["coding_seconds"] / 2 if option == COMPRESS else 0.0
        again = figures["forward_seconds"] if option in (AGAIN, AGAIN_OFFLOADED) else 0.0
        for kind, seconds in (
            (Kind.FORWARD, figures["forward_seconds"] + coding),
            (Kind.BACKWARD, figures["backward_seconds"] + coding),
            (Kind.RECOMPUTE, again),
        ):
            assert spent(drawn.of_segments(kind)[number]) == close(drawn.microbatches * seconds)
        for kind in (Kind.SEND_STASH, Kind.BRING_STASH):
            assert sum(each.bytes for each in drawn.of_segments(kind)[number]) == drawn.microbatches * drawn.moved(
                number
            )
        gradients = sum(each.bytes for each in drawn.of_segments(Kind.SEND_GRADIENTS)[number])
        assert gradients == drawn.rounds * figures["gradient_bytes"]


@pytest.mark.parametrize("seed", range(60))
def test_work_begins_after_what_it_needs(seed: int) -> None:
    drawn = Drawn(seed)
    forward, backward = drawn.of_segments(Kind.FORWARD), drawn.of_segments(Kind.BACKWARD)
    again = drawn.of_segments(Kind.RECOMPUTE)
    sent, brought = drawn.of_segments(Kind.SEND_STASH), drawn.of_segments(Kind.BRING_STASH)
    for number in range(len(drawn.segments)):
        assert len(forward[number]) == len(backward[number]) == drawn.microbatches
        reads = again[number] or backward[number]  # what came back
        assert all(in_order(first.end, then.begin) for first, then in zip(forward[number], reads, strict=True))
        assert all(first.end == then.begin for first, then in zip(again[number], backward[number], strict=False))
        if drawn.moved(number):
            pairs = zip(forward[number], sent[number], brought[number], reads, strict=True)
            for saving, leaving, coming, reading in pairs:
                assert in_order(saving.begin, leaving.begin)
                assert in_order(saving.end, leaving.end)
                assert in_order(saving.end, coming.begin)
                assert in_order(coming.end, reading.begin)
        for gradients in drawn.of_segments(Kind.SEND_GRADIENTS)[number]:
            assert any(work.end == gradients.begin for work in drawn.of(Kind.BACKWARD, *TO_HOST))
        for weights in drawn.of_segments(Kind.BRING_WEIGHTS)[number]:
            after = min(work.begin for work in forward[number] + reads if work.begin >= weights.begin)
            assert weights.end <= after
    compute = drawn.of(*COMPUTE)
    for begin, (_, stay) in zip(drawn.record.stays, itertools.groupby(compute, key=way_and_segment), strict=True):
        assert begin <= next(stay).begin
    assert drawn.record.stays == sorted(drawn.record.stays)


def in_order(first: float, then: float) -> bool:
    """Whether one moment is not after another, but for the rounding of sums of seconds."""
    return first <= then * (1 + 1e-12)


def way_and_segment(work: Any) -> tuple[int, bool]:
    return work.segment, work.kind == Kind.FORWARD


def model(depth: int = 6, width: int = 64) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)),
        nn.BatchNorm1d(width),
    )


def planned(**options: Any) -> Plan:
    made = model()
    return fit(made, torch.randn(256, 64), lambda x: made(x).square().mean(), **{"device": CARD, **options})


@pytest.fixture(scope="module")
def tight() -> Plan:
    return planned(budget=2 * planned().least_bytes, update_seconds=0.01, microbatches=3)


def spent_in(intervals: Iterable[LaneInterval], lane: str) -> float:
    return sum(each.end - each.begin for each in intervals if each.lane == lane)


def test_a_plan_has_the_timeline_of_its_seconds_and_bytes(tight: Plan) -> None:
    timeline = tight.timeline()
    intervals = timeline.intervals
    assert timeline == tight.timeline()
    assert max(each.end for each in intervals) == tight.seconds
    assert {each.lane for each in intervals} == {*tight.lanes}
    for lane in ("compute", "to device", "to host"):
        assert spent_in(intervals, lane) == pytest.approx(tight.lanes[lane])
    for lane in ("to device", "to host"):
        assert sum(each.nbytes for each in intervals if each.lane == lane) == pytest.approx(LINK * tight.lanes[lane])
    update = intervals[-1]
    assert (update.kind, update.segment, update.end) == ("update", "", tight.seconds)
    forward = sum(each.end - each.begin for each in intervals if each.kind == "forward")
    hidden = forward * tight.round_size / tight.microbatches  # by the next step's first round
    assert update.end - update.begin == pytest.approx(tight.lanes["optimizer"] - hidden)
    assert tight.lanes["optimizer"] == 0.01
    for segment in tight.segments:
        own = [each for each in intervals if each.segment == segment.name]
        assert spent_in(own, "compute") == pytest.approx(segment.seconds)
        for lane in ("to device", "to host"):
            moved = sum(each.nbytes for each in own if (each.lane, each.kind) == (lane, "stash"))
            assert moved == tight.microbatches * segment.moved_bytes
    assert {"recompute", "stash", "weights", "gradients"} <= {each.kind for each in intervals}


def test_what_goes_to_the_disk_takes_as_long_as_the_plan_says(tight: Plan) -> None:
    options: dict[str, Any] = {"budget": tight.budget, "microbatches": 3, "recompute": False, "host_budget": "1MiB"}
    plan, fast = (planned(**options, disk=disk) for disk in (LINK / 4, 1e15))
    intervals = plan.timeline().intervals
    assert max(each.end for each in intervals) == plan.seconds > fast.seconds
    for lane in ("compute", "to device", "to host"):
        assert spent_in(intervals, lane) == pytest.approx(plan.lanes[lane])
    sent = [each for each in intervals if (each.lane, each.kind) == ("to host", "stash")]
    assert sent
    for each in sent:  # all of it: weights and gradients alone fill the host
        assert each.end - each.begin == pytest.approx(each.nbytes / LINK + each.nbytes / (LINK / 4))


def test_memory_over_the_step_is_that_of_each_round(tight: Plan) -> None:
    for plan in (tight, planned(budget="4MiB", microbatches=3, round_size=2)):
        memory = plan.timeline().memory
        rounds = -(-plan.microbatches // plan.round_size)
        assert [point for _, point in memory] == rounds * [*plan.memory]
        assert max(point.total for _, point in memory) == plan.peak_bytes
        moments = [moment for moment, _ in memory]
        assert moments == sorted(moments)
        assert moments[0] == 0
        assert moments[-1] < plan.seconds
        intervals = plan.timeline().intervals
        for begin, point in memory:  # something of the segment begins before the next one's
            own = [each for each in intervals if each.segment == point.segment and each.begin >= begin]
            assert own


def test_a_plan_is_copied_with_what_its_timeline_needs(tight: Plan) -> None:
    copy = pickle.loads(pickle.dumps(tight))  # noqa: S301 - written in the same line
    assert copy == tight
    assert copy.timeline() == tight.timeline()
    assert "_step" not in repr(tight)
