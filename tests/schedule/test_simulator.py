"""The simulator against formulas (notation: d stages, m microbatches, one forward and backward P = tF + tB)."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule import Schedule, make
from support.schedules import RF, SF, B, F, U

pytestmark = pytest.mark.every_case

DEPTHS = (1, 2, 3, 4, 8)
SIZES = (1, 3, 8, 32)


def same(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-9 * max(1.0, abs(expected))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("microbatches", SIZES)
def test_a_flush_takes_depth_less_one_microbatches_longer(kind: str, depth: int, microbatches: int) -> None:
    simulation = make(kind, stages=depth, microbatches=microbatches).simulate(batches=4, forward=0.3, backward=0.7)
    assert same(simulation.period, microbatches + depth - 1)
    assert same(simulation.makespan, 4 * simulation.period)
    bubble = (depth - 1) / (microbatches + depth - 1)
    assert all(same(value, bubble) for value in simulation.bubbles)
    assert all(same(value, 4 * microbatches) for value in simulation.busy)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_several_stages_a_rank_divide_the_bubble_of_a_flush(ranks: int, chunks: int, microbatches: int) -> None:
    for kind in ("interleaved", "gpipe"):
        schedule = make(kind, stages=ranks * chunks, ranks=ranks, microbatches=microbatches)
        simulation = schedule.simulate(batches=3, forward=1, backward=2)
        assert same(simulation.period, 3 * (microbatches * chunks + ranks - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 24), st.data())
def test_two_versions_leave_no_bubble_at_the_slowest_stage(depth: int, extra: int, data: st.DataObject) -> None:
    microbatches = max(depth - 1, 1) + extra
    times = st.lists(st.integers(1, 50).map(lambda n: n / 8), min_size=depth, max_size=depth)
    forward, backward = data.draw(times), data.draw(times)
    schedule = make("2bw", stages=depth, microbatches=microbatches)
    simulation = schedule.simulate(batches=64, forward=forward, backward=backward)
    predicted = microbatches * max(f + b for f, b in zip(forward, backward, strict=True))
    assert same(simulation.period, predicted)


@pytest.mark.parametrize("depth", DEPTHS)
def test_pipedream_and_wrapped_two_versions_leave_no_bubble_either(depth: int) -> None:
    for vertical_sync in (False, True):
        schedule = make("pipedream", stages=depth, microbatches=1, vertical_sync=vertical_sync)
        assert same(schedule.simulate(batches=40).period, 3.0)
    for chunks in (2, 3):
        schedule = make("2bw", stages=depth * chunks, ranks=depth, microbatches=max(2 * depth, 2))
        assert same(schedule.simulate(batches=10).period, 3.0 * chunks * schedule.microbatches)


@pytest.mark.parametrize("depth", [2, 3, 4, 8])
@pytest.mark.parametrize("latency", [0.05, 0.25, 0.5])
def test_a_hop_costs_two_latencies_a_round_shared_by_what_is_in_flight(depth: int, latency: float) -> None:
    schedule = make("2bw", stages=depth, microbatches=4 * depth)
    simulation = schedule.simulate(batches=12, forward=1, backward=2, latency=latency)
    assert same(simulation.period, 4 * depth * (3 + 2 * latency * (depth - 1) / depth))


@pytest.mark.parametrize("depth", [2, 3, 4, 8])
@pytest.mark.parametrize("ahead", [1, 2])
def test_hops_cost_nothing_up_to_half_of_what_is_computed_ahead(depth: int, ahead: int) -> None:
    microbatches = 4 * depth * (1 + ahead)

    def cost(latency: float, ahead: int) -> float:
        schedule = make("2bw", stages=depth, microbatches=microbatches, ahead=ahead)
        return schedule.simulate(batches=40, forward=1, backward=2, latency=latency).period / microbatches - 3

    assert same(cost(1.5 * ahead, ahead), 0.0)
    beyond, hops = 0.25, depth - 1
    shared = 2 * hops * beyond / (1 + hops * (1 + ahead))  # by what is in flight
    found = cost(1.5 * ahead + beyond, ahead)
    assert found == pytest.approx(shared, rel=0.01)  # in the long run
    assert found < cost(beyond, 0)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_reduction_costs_nothing_up_to_the_slack_of_its_stage_and_all_beyond(depth: int, extra: int) -> None:
    microbatches = max(depth - 1, 1) + extra
    schedule = make("2bw", stages=depth, microbatches=microbatches)
    for stage in range(depth):
        slack = 3.0 * (microbatches - depth + 1 + stage)
        for reduce, cost in ((slack, 0.0), (slack + 1.5, 1.5)):
            costs = [reduce if s == stage else 0.0 for s in range(depth)]
            simulation = schedule.simulate(batches=12, forward=1, backward=2, reduce=costs)
            hidden = simulation.period - 3 * microbatches
            assert same(hidden, cost) if stage == 0 else hidden <= cost + 1e-9
            assert cost or same(hidden, 0.0)


def test_a_norm_over_the_model_makes_every_update_wait_for_the_last_reduction() -> None:
    schedule = make("1f1b", stages=2, microbatches=2)
    reduce = [0.0, 100.0]
    alone = schedule.simulate(batches=1, reduce=reduce)
    together = schedule.simulate(batches=1, reduce=reduce, global_norm=True)
    # The second stage's last backward ends at 1 + 2 * (1 + 2), the first's 2 later.
    assert [t.start for t in alone.actions if t.action.kind == U] == [9.0, 107.0]
    assert [t.start for t in together.actions if t.action.kind == U] == [107.0, 107.0]


def test_updates_take_their_time() -> None:
    schedule = make("1f1b", stages=3, microbatches=4)
    assert same(schedule.simulate(batches=4, update=5.0).period, 3 * (4 + 2) + 5)
    schedule = make("2bw", stages=3, microbatches=4)
    assert same(schedule.simulate(batches=20, update=5.0).period, 3 * 4 + 5)


def starts(schedule: Schedule, **costs: object) -> dict[str, tuple[float, float]]:
    actions = schedule.simulate(batches=1, **costs).actions  # type: ignore[arg-type]
    return {timed.action.token: (timed.start, timed.end) for timed in actions}


def test_values_queue_for_a_hop_and_arrive_a_latency_later() -> None:
    schedule = make("gpipe", stages=2, microbatches=2)
    times = starts(schedule, crossing_bytes=300, bytes_per_second=100, latency=0.5)
    # A hop is taken for 3 s a value: the second, made at 2, leaves when the first, made at 1, has left.
    assert (times["SF0.0"], times["SF0.1"]) == ((1.0, 4.5), (4.0, 7.5))
    assert (times["F1.0"], times["F1.1"]) == ((4.5, 5.5), (7.5, 8.5))
    # The way back is another queue.
    assert (times["B1.0"], times["SB1.0"], times["B0.0"]) == ((8.5, 10.5), (10.5, 14.0), (14.0, 16.0))


def test_reductions_of_a_rank_run_one_after_the_other_beside_its_computes() -> None:
    times = starts(make("gpipe", stages=2, ranks=1, microbatches=1), reduce=10.0)
    assert (times["B1.0"], times["B0.0"]) == ((2.0, 4.0), (4.0, 6.0))
    assert (times["R1"], times["R0"]) == ((4.0, 14.0), (14.0, 24.0))
    assert (times["U1"][0], times["U0"][0]) == (14.0, 24.0)


def test_without_overlap_a_send_and_a_reduction_hold_up_their_rank() -> None:
    schedule = make("gpipe", stages=2, microbatches=2)
    times = starts(schedule, crossing_bytes=300, bytes_per_second=100, reduce=7.0, overlap=False)
    assert (times["F0.0"], times["SF0.0"], times["F0.1"]) == ((0.0, 1.0), (1.0, 4.0), (4.0, 5.0))
    assert times["R1"][1] - times["R1"][0] == 7.0
    assert times["U1"][0] == times["R1"][1]


def test_a_hop_between_stages_of_one_rank_costs_nothing() -> None:
    schedule = make("gpipe", stages=4, ranks=1, microbatches=2)
    assert schedule.simulate(batches=1, latency=9.0, crossing_bytes=9, bytes_per_second=1).makespan == 4 * 2 * 3.0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "2bw"]), st.integers(1, 6), st.integers(5, 9), st.data())
def test_no_rank_does_two_things_at_once_and_nothing_before_it_can(
    kind: str, depth: int, microbatches: int, data: st.DataObject
) -> None:
    cost = st.floats(0.0, 3.0)
    schedule = make(kind, stages=depth, microbatches=microbatches)
    latency, update = data.draw(cost), data.draw(cost)
    forward = data.draw(st.lists(cost, min_size=depth, max_size=depth))
    simulation = schedule.simulate(batches=3, forward=forward, backward=data.draw(cost), latency=latency, update=update)
    ends = {timed.action: timed.end for timed in simulation.actions}
    for rank in range(depth):
        work = [t for t in simulation.actions if t.rank == rank and t.action.kind in (F, B, U)]
        assert all(before.end <= after.start for before, after in itertools.pairwise(work))
    for timed in simulation.actions:
        if timed.action.kind == F and timed.action.stage > 0:
            brought = type(timed.action)(
                SF, stage=timed.action.stage - 1, batch=timed.action.batch, microbatch=timed.action.microbatch
            )
            assert timed.start >= ends[brought] >= latency
    assert simulation.makespan == max(ends.values())
    assert {timed.action for timed in simulation.actions} == {a for rank in schedule.unroll(3) for a in rank}
    assert all(timed.start == timed.end for timed in simulation.actions if timed.action.kind == RF)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1.0]}, "forward: 1 numbers; give one, or 2"),
        ({"latency": [1.0, 1.0]}, "latency: 2 numbers; give one, or 1"),
        ({"backward": -1.0}, "backward: a cost of -1.0+ seconds; give 0 or more"),
        ({"update": float("nan")}, "update: a cost of -?nan seconds"),
        ({"reduce": float("inf")}, "reduce: a cost of inf seconds"),
        ({"crossing_bytes": 1, "bytes_per_second": 0.0}, "bytes_per_second: 0.0; give more than 0"),
        ({"batches": 0}, "0 batches were asked for; give at least 1"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        make("gpipe", stages=2, microbatches=2).simulate(**costs)  # type: ignore[arg-type]


def test_ranks_that_block_each_other_have_no_time() -> None:
    text = """hydra-schedule 1 stages=2 ranks=2 microbatches=2 versions=flush
    rank 0: F0.0 B0.0 F0.1 B0.1 R0 U0
    rank 1: F1.0 F1.1 B1.0 B1.1 R1 U1"""
    with pytest.raises(InvalidSchedule, match="ranks block each other: rank 0 at its action 3"):
        Schedule.parse(text).simulate()
