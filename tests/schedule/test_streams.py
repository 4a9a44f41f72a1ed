"""What a rank gets, step after step: the bodies one after the other, and batches of other sizes."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule import Action, Schedule, make
from support.schedules import BU, SB, SF, B, F, R, Shape, Transport, U, made, square_shapes, wrapped_shapes

SHAPES = [
    *square_shapes((1, 2, 3, 4, 6), (1, 3, 5, 8)),
    *wrapped_shapes((1, 2, 3), (2, 3), (2, 3, 7)),
]
DRAIN = 0


def streamed(schedule: Schedule, sizes: list[int]) -> list[list[Action]]:
    """Of each rank. DRAIN among the sizes drains there; the end does."""
    ranks = []
    for rank in range(schedule.ranks):
        stream = schedule.stream(rank)
        ranks.append([action for size in sizes for action in (stream.next_batch(size) if size else stream.drain())])
        ranks[-1] += stream.drain()
        assert stream.drain() == []
        assert stream.batches == sum(size != DRAIN for size in sizes)
    return ranks


def verified(schedule: Schedule, sizes: list[int]) -> list[list[Action]]:
    ranks = streamed(schedule, sizes)
    schedule.verify_actions(ranks, microbatches=[size for size in sizes if size])
    Transport(schedule, ranks).run()
    return ranks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_batches_of_one_size_a_stream_is_the_unrolled_bodies(shape: Shape) -> None:
    schedule = made(shape)
    for batches in (1, 2, 5, 9):
        assert streamed(schedule, [schedule.microbatches] * batches) == schedule.unroll(batches)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_text_streams_as_the_kind_it_was_written_from(shape: Shape) -> None:
    schedule = made(shape)
    again = Schedule.parse(schedule.text)
    assert again.kind is None
    sizes = [schedule.microbatches] * 4 + [DRAIN] + [schedule.microbatches] * 3
    assert streamed(again, sizes) == streamed(schedule, sizes)
    verified(again, sizes)


@settings(deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "2bw"]),
    st.integers(1, 8),
    st.lists(st.integers(DRAIN, 12), min_size=1, max_size=10),
    st.integers(0, 2),
)
def test_any_sequence_of_batch_sizes_and_drains_runs(kind: str, depth: int, sizes: list[int], ahead: int) -> None:
    verified(make(kind, stages=depth, microbatches=21, ahead=0 if kind == "gpipe" else ahead), sizes)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["gpipe", "interleaved"]),
    st.integers(1, 5),
    st.integers(2, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_flushes_with_several_stages_a_rank_take_any_sizes(
    kind: str, ranks: int, chunks: int, sizes: list[int]
) -> None:
    verified(make(kind, stages=ranks * chunks, ranks=ranks, microbatches=4), sizes)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6), st.booleans(), st.lists(st.sampled_from([1, 1, 1, 1, DRAIN]), min_size=1, max_size=20)
)  # fmt: skip
def test_pipedream_may_be_drained_anywhere(depth: int, vertical_sync: bool, sizes: list[int]) -> None:
    verified(make("pipedream", stages=depth, microbatches=1, vertical_sync=vertical_sync), sizes)


@pytest.mark.parametrize("shape", wrapped_shapes((2, 3), (2, 3), (4,)), ids=str)
def test_schedules_with_several_stages_a_rank_may_be_drained_anywhere(shape: Shape) -> None:
    schedule = made(shape)
    for before in range(4):
        verified(schedule, [4] * before + [DRAIN] + [4] * 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_a_drain_changes_no_version_and_leaves_no_update_out(depth: int, sizes: list[int], data: st.DataObject) -> None:
    schedule = make("2bw", stages=depth, microbatches=8)
    cut = data.draw(st.integers(0, len(sizes)))
    whole = streamed(schedule, sizes)
    drained = streamed(schedule, [*sizes[:cut], DRAIN, *sizes[cut:]])
    for rank in range(depth):
        assert sorted(map(str, whole[rank])) == sorted(map(str, drained[rank]))
        updates = [action.batch for action in drained[rank] if action.kind == U]
        assert updates == list(range(len(sizes)))


def test_a_batch_smaller_than_the_pipeline_is_finished_before_its_version_is_needed() -> None:
    stream = make("2bw", stages=4, microbatches=8).stream(0)
    tokens = [[a.token for a in stream.next_batch(1) if a.kind in (F, B, U)] for _ in range(3)]
    assert tokens == [["F0.0"], ["F0.0"], ["B0.0", "U0", "F0.0"]]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("schedule", "size", "message"),
    [
        (make("pipedream", stages=2, microbatches=1), 2, "give 1, which the schedule was made for"),
        (make("2bw", stages=4, ranks=2, microbatches=4), 3, "give 4, which the schedule was made for"),
        (Schedule.parse(make("gpipe", stages=2, microbatches=3).text), 2, "written for 3"),
        (make("gpipe", stages=2, microbatches=3), 0, "give 1 to"),
        (make("2bw", stages=2, microbatches=3), -1, "give 1 to"),
    ],
    ids=str,
)
def test_a_size_that_cannot_be_is_refused_and_changes_nothing(schedule: Schedule, size: int, message: str) -> None:
    stream, untouched = schedule.stream(0), schedule.stream(0)
    for _ in range(3):
        with pytest.raises(InvalidSchedule, match=message):
            stream.next_batch(size)
        assert stream.next_batch(schedule.microbatches) == untouched.next_batch(schedule.microbatches)


def test_a_rank_that_is_not_there_has_no_stream() -> None:
    with pytest.raises(InvalidSchedule, match="rank 2 was asked for; there are 0 to 1"):
        make("gpipe", stages=2, microbatches=2).stream(2)


def test_receives_come_one_compute_ahead_and_sends_right_behind() -> None:
    stream = make("1f1b", stages=3, microbatches=2).stream(1)
    tokens = " ".join(action.token for action in stream.next_batch(2))
    assert tokens == "RF1.0 RF1.1 F1.0 SF1.0 RB1.0 F1.1 SF1.1 RB1.1 B1.0 SB1.0 B1.1 SB1.1 R1 BU1 U1"


def test_nothing_is_sent_between_stages_of_one_rank() -> None:
    text = """hydra-schedule 1 stages=3 ranks=2 microbatches=1 versions=flush
    rank 0: F0.0 F1.0 B1.0 R1 B0.0 R0 U0 U1
    rank 1: F2.0 B2.0 R2 U2"""
    schedule = Schedule.parse(text)
    schedule.verify()
    crossing = [action.token for actions in schedule.unroll(1) for action in actions if action.kind in (SF, SB)]
    assert crossing == ["SF1.0", "SB2.0"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_communication_may_be_written_into_the_bodies(shape: Shape) -> None:
    schedule = made(shape).with_communication()
    assert schedule.communicates == (shape[2] > 1)
    assert [sum(action.kind == BU for action in schedule.body(rank)) for rank in range(schedule.ranks)] == [
        len(schedule.stages_of(rank)) for rank in range(schedule.ranks)
    ]
    assert schedule.with_communication() == schedule
    schedule.verify()
    sizes = [schedule.microbatches] * 5
    assert streamed(schedule, sizes) == schedule.unroll(5)
    verified(Schedule.parse(schedule.text), sizes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_between_two_computes_the_same_updates_may_begin_however_the_schedule_was_written(shape: Shape) -> None:
    schedule = made(shape)
    for again in (Schedule.parse(schedule.text), schedule.with_communication()):
        for rank in range(schedule.ranks):
            assert begun_by_compute(again, rank) == begun_by_compute(schedule, rank)


def begun_by_compute(schedule: Schedule, rank: int) -> list[tuple[Action, set[Action]]]:
    """Each forward and backward with the updates that may begin, and have not ended, when it runs."""
    found, begun = [], set[Action]()
    for action in schedule.unroll(5)[rank]:
        if action.kind in (F, B):
            found.append((action, set(begun)))
        elif action.kind == BU:
            begun.add(action)
        elif action.kind == U:
            begun.remove(Action(BU, stage=action.stage, batch=action.batch))
    assert not begun
    return found


def test_with_two_versions_updates_may_run_behind_all_that_follows_their_sums() -> None:
    schedule = make("2bw", stages=3, microbatches=4)
    assert [" ".join(a.token for a in actions if a.kind in (F, B, R, BU, U)) for actions in schedule.unroll(2)] == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.0 B0.2 F0.1 B0.3 R0 BU0 F0.2 B0.0 F0.3 B0.1 U0 B0.2 B0.3 R0 BU0 U0",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 F1.0 B1.3 R1 BU1 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 U1 B1.3 R1 BU1 U1",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 R2 BU2 F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 R2 U2 BU2 U2",
    ]
    flush = make("1f1b", stages=2, microbatches=2)
    assert [actions[-3:] for actions in flush.unroll(1)] == [
        [Action(kind, stage=stage, batch=0) for kind in (R, BU, U)] for stage in range(2)
    ]


def test_an_evaluation_is_forwards_alone_stage_after_stage() -> None:
    stream = make("2bw", stages=4, ranks=2, microbatches=3).stream(0)
    stream.next_batch(3)
    actions = stream.evaluation(-2, microbatches=2)
    assert {action.batch for action in actions} == {-2}
    assert " ".join(action.token for action in actions) == "F0.0 SF0.0 RF2.0 F0.1 SF0.1 RF2.1 F2.0 SF2.0 F2.1 SF2.1"
    assert stream.batches == 1
    for batch, microbatches in ((0, 2), (-2, 0)):
        with pytest.raises(InvalidSchedule, match="give a number below 0, and 1 to"):
            stream.evaluation(batch, microbatches=microbatches)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_may_begin_before_every_compute_at_which_its_buffer_is_free(shape: Shape) -> None:
    """By what is in memory: its gradients are complete on the rank, the version that it reads is the newest of several,
    and no batch that is under way uses the version that it writes over."""
    schedule = made(shape)
    for rank in range(schedule.ranks):
        stream = schedule.stream(rank)
        memory = Memory(schedule, rank)
        for step in (1, 1, 1, DRAIN, 1, DRAIN, 1, 1):
            memory.under_way |= {stream.batches} if step else set()
            for action in stream.next_batch(schedule.microbatches) if step else stream.drain():
                memory.take(action)


class Memory:
    """What one rank's memory holds while it takes its actions."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.own = schedule.stages_of(rank)
        self.under_way: set[int] = set()
        self.newest = dict.fromkeys(self.own, 0)
        self.reduced: dict[int, set[int]] = defaultdict(set)
        self.begun: set[tuple[int, int]] = set()

    def take(self, action: Action) -> None:
        stage, batch = action.stage, action.batch
        if action.kind in (F, B):
            assert self.begun == {(s, b) for s in self.own for b in self.under_way if self.is_free(s, b)}
        elif action.kind == R:
            self.reduced[batch].add(stage)
        elif action.kind == BU:
            self.begun.add((stage, batch))
        elif action.kind == U:
            self.begun.remove((stage, batch))
            self.newest[stage] = batch + 1
            self.under_way -= {batch} if min(self.newest.values()) > batch else set()

    def is_free(self, stage: int, batch: int) -> bool:
        alive = self.schedule.versions[stage]
        used = [self.schedule.version_of(stage, later) for later in self.under_way if later > batch]
        complete = len(self.reduced[batch]) == len(self.own)
        return (
            alive > 1 and complete and self.newest[stage] == batch and min(used, default=batch + 1) > batch + 1 - alive
        )
