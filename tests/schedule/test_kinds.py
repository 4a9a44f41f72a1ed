"""The built-in schedules: each can run, holds no more than it says, and uses the versions that it says."""

import pytest

from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule import make
from support.schedules import F, R, Shape, Transport, U, made, square_shapes, wrapped_shapes

DEPTHS = range(1, 9)
SHAPES = [
    *square_shapes((1, 2, 3, 4, 6, 8), (1, 2, 3, 5, 7, 8, 13, 32)),
    *wrapped_shapes((1, 2, 3, 4), (2, 3), (1, 2, 3, 4, 7, 16)),
    ("pipedream", 7, 7, 1),
]


def test_every_depth_and_size_of_every_kind_can_run() -> None:
    shapes = square_shapes(DEPTHS, range(1, 33)) + wrapped_shapes(DEPTHS, (2, 3, 4), (1, 2, 3, 5, 8, 17, 32))
    for shape in shapes:
        made(shape).verify()
    assert len(shapes) > 1000


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_transport_of_queues_runs_every_kind(shape: Shape) -> None:
    schedule = made(shape)
    stages, microbatches = schedule.stages, schedule.microbatches
    batches = 4 if shape[0] != "pipedream" else 2 * stages
    ran = Transport(schedule, schedule.unroll(batches)).run()
    assert sum(action.kind == F for action in ran.log) == stages * microbatches * batches
    assert sum(action.kind in (R, U) for action in ran.log) == 2 * stages * batches
    assert all(held[-1] == batches for held in ran.held)
    peaks = schedule.verify().stages
    assert [peak.in_flight for peak in peaks] == ran.most_in_flight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_runs_within_the_peaks_that_are_said_and_in_no_less(shape: Shape) -> None:
    schedule = made(shape)
    peaks = schedule.verify().stages
    most = {name: max(getattr(peak, name) for peak in peaks) for name in ("in_flight", "versions", "gradients")}
    schedule.verify(**most)
    for name, value in most.items():
        if value > 1 or name == "in_flight":
            with pytest.raises(InvalidSchedule, match=f"where the limit is {value - 1}"):
                schedule.verify(**{name: value - 1})


@pytest.mark.every_case
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("microbatches", [1, 3, 8, 21])
def test_of_one_forward_one_backward_at_most_depth_less_stage_are_in_flight(depth: int, microbatches: int) -> None:
    for kind in ("1f1b", "2bw") if microbatches >= depth - 1 else ("1f1b",):
        peaks = make(kind, stages=depth, microbatches=microbatches).verify().stages
        bound = microbatches if kind == "1f1b" else depth
        assert [peak.in_flight for peak in peaks] == [min(depth - stage, bound) for stage in range(depth)]
    peaks = make("gpipe", stages=depth, microbatches=microbatches).verify().stages
    assert [peak.in_flight for peak in peaks] == [microbatches] * depth


@pytest.mark.parametrize("kind", ["1f1b", "2bw"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ahead", [1, 2])
def test_ahead_means_so_many_more_in_flight_for_every_hop_to_come(kind: str, depth: int, ahead: int) -> None:
    fewest = max((depth - 1) * (1 + ahead), 1)
    for microbatches in (fewest, fewest + 1, 3 * fewest + 2):
        schedule = make(kind, stages=depth, microbatches=microbatches, ahead=ahead)
        bound = microbatches if kind == "1f1b" else microbatches + 1
        in_flight = [min(1 + (depth - 1 - stage) * (1 + ahead), bound) for stage in range(depth)]
        verified = schedule.verify(versions=2, gradients=2)
        assert [peak.in_flight for peak in verified.stages] == in_flight
        ran = Transport(schedule, schedule.unroll(4)).run()
        assert ran.most_in_flight == in_flight
        assert sum(action.kind == F for action in ran.log) == depth * microbatches * 4


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("extra", [-1, 0, 1, 9])
def test_two_versions_are_used_as_the_paper_says(depth: int, extra: int) -> None:
    microbatches = max(depth + extra, 1)
    schedule = make("2bw", stages=depth, microbatches=microbatches)
    assert schedule.versions == (2,) * depth
    verified = schedule.verify()
    assert [peak.versions for peak in verified.stages] == [2] * depth
    tight = depth > 1 and microbatches == depth - 1  # the first stage then updates before it has other gradients
    assert [peak.gradients for peak in verified.stages] == [1 if tight else 2] + [2] * (depth - 1)
    for action in Transport(schedule, schedule.unroll(5)).run().log:
        if action.kind == F:
            number = action.batch * microbatches + action.microbatch
            assert schedule.version_of(action.stage, action.batch) == max(number // microbatches - 1, 0)


@pytest.mark.every_case
@pytest.mark.parametrize("depth", DEPTHS)
def test_pipedream_keeps_a_version_for_everything_in_flight(depth: int) -> None:
    schedule = make("pipedream", stages=depth, microbatches=1)
    kept = [depth - stage for stage in range(depth)]
    assert list(schedule.versions) == kept
    assert [peak.versions for peak in schedule.verify().stages] == kept
    assert [peak.in_flight for peak in schedule.verify().stages] == kept
    for rank, actions in enumerate(schedule.unroll(3 * depth)):
        updates = 0
        for action in actions:
            updates += action.kind == U
            if action.kind == F:
                assert schedule.version_of(rank, action.batch) == updates  # the newest there is


@pytest.mark.every_case
@pytest.mark.parametrize("depth", DEPTHS)
def test_vertical_sync_keeps_as_many_versions_everywhere(depth: int) -> None:
    schedule = make("pipedream", stages=depth, microbatches=1, vertical_sync=True)
    assert [peak.versions for peak in schedule.verify().stages] == list(schedule.versions) == [depth] * depth
    for batch in range(2 * depth):
        used = {schedule.version_of(stage, batch) for stage in range(depth)}
        assert used == {max(batch - (depth - 1), 0)}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("microbatches", [3, 4, 9])
def test_a_send_may_block_until_it_is_received_with_one_stage_a_rank(kind: str, microbatches: int) -> None:
    schedule = make(kind, stages=4, microbatches=microbatches)
    assert schedule.verify().rendezvous
    Transport(schedule, schedule.unroll(4), rendezvous=True).run()


def test_one_forward_one_backward_is_the_order_of_the_paper() -> None:
    text = make("1f1b", stages=3, microbatches=4).text
    assert text.splitlines()[1:] == [
        "rank 0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 R0 U0",
        "rank 1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3 R1 U1",
        "rank 2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 R2 U2",
    ]


def test_two_versions_update_as_late_as_they_can() -> None:
    assert make("2bw", stages=3, microbatches=4).text.splitlines()[1:] == [
        "rank 0: U0-2 F0.0 B0.2-1 F0.1 B0.3-1 R0-1 F0.2 B0.0 F0.3 B0.1",
        "rank 1: U1-2 F1.0 B1.3-1 R1-1 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2",
        "rank 2: U2-2 F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 R2",
    ]


def test_interleaved_runs_its_stages_for_as_many_microbatches_as_there_are_ranks() -> None:
    assert make("interleaved", stages=4, ranks=2, microbatches=4).text.splitlines()[1:] == [
        "rank 0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 R2 B0.2 B0.3 R0 U2 U0",
        "rank 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 R3 B1.2 B1.3 R1 U3 U1",
    ]


def test_the_wrapped_pipeline_runs_stage_by_stage() -> None:
    assert make("gpipe", stages=4, ranks=2, microbatches=2).text.splitlines()[1:] == [
        "rank 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 R2 B0.0 B0.1 R0 U2 U0",
        "rank 1: F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 R3 B1.0 B1.1 R1 U3 U1",
    ]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["gpipe", "2bw"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (4, 2)])
def test_a_wrapped_rank_gets_to_a_stage_once_each_way_a_batch(kind: str, ranks: int, chunks: int) -> None:
    schedule = make(kind, stages=ranks * chunks, ranks=ranks, microbatches=8)
    for rank in range(schedule.ranks):
        forwards = [action.stage for action in schedule.body(rank) if action.kind == F]
        assert forwards == [stage for stage in schedule.stages_of(rank) for _ in range(8)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "zb", "stages": 2, "microbatches": 2}, "no schedule 'zb'; the built-in ones are 'gpipe', '1f1b'"),
        ({"kind": "2bw", "stages": 4, "microbatches": 2}, "microbatches=2: .*give at least 3"),
        ({"kind": "2bw", "stages": 8, "ranks": 4, "microbatches": 2}, "give at least 3"),
        ({"kind": "gpipe", "stages": 0, "microbatches": 2}, "each must be at least 1"),
        ({"kind": "gpipe", "stages": 2, "microbatches": 0}, "each must be at least 1"),
        ({"kind": "gpipe", "stages": 2, "microbatches": 2, "ranks": 0}, "each must be at least 1"),
        ({"kind": "gpipe", "stages": 3, "microbatches": 2, "ranks": 2}, "multiple of ranks"),
        ({"kind": "gpipe", "stages": 10**5, "microbatches": 2}, "at most 4096 stages"),
        ({"kind": "1f1b", "stages": 4, "microbatches": 2, "ranks": 2}, "'interleaved' is its form with more"),
        ({"kind": "interleaved", "stages": 4, "microbatches": 2}, "'1f1b' is its form with one"),
        ({"kind": "pipedream", "stages": 4, "microbatches": 2}, "microbatches=1"),
        ({"kind": "pipedream", "stages": 4, "microbatches": 1, "ranks": 2}, "one stage a rank"),
        ({"kind": "2bw", "stages": 2, "microbatches": 2, "vertical_sync": True}, "option of 'pipedream' only"),
        ({"kind": "2bw", "stages": 4, "microbatches": 5, "ahead": 1}, "ahead=1: .*give at least 6"),
        ({"kind": "2bw", "stages": 4, "microbatches": 8, "ahead": -1}, "ahead must be 0 to"),
        ({"kind": "gpipe", "stages": 4, "microbatches": 8, "ahead": 1}, "option of '1f1b' and '2bw' with one stage"),
        ({"kind": "2bw", "stages": 4, "ranks": 2, "microbatches": 8, "ahead": 1}, "with one stage a rank only"),
    ],
)
def test_what_a_kind_cannot_do_is_said(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        make(**arguments)  # type: ignore[arg-type]
