"""What the verifier finds: every change that makes a schedule wrong, with what, where and why."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule import Schedule, make
from support.schedules import Blocked, Shape, Transport, made

pytestmark = pytest.mark.every_case

SHAPES: list[Shape] = [
    ("gpipe", 3, 3, 4),
    ("1f1b", 4, 4, 6),
    ("1f1b", 2, 2, 1),
    ("2bw", 4, 4, 3),
    ("2bw", 4, 4, 8),
    ("pipedream", 4, 4, 1),
    ("interleaved", 4, 2, 4),
    ("interleaved", 6, 2, 3),
    ("gpipe", 4, 2, 3),
    ("2bw", 6, 2, 4),
]


def lines_of(schedule: Schedule) -> list[list[str]]:
    """The words of each rank's line, without "rank N:"."""
    return [line.split()[2:] for line in schedule.text.splitlines()[1:]]


def rewritten(schedule: Schedule, ranks: list[list[str]]) -> Schedule:
    header = schedule.text.splitlines()[0]
    return Schedule.parse("\n".join([header, *(f"rank {n}: {' '.join(words)}" for n, words in enumerate(ranks))]))


@st.composite
def bodies(draw: st.DrawFn, communication: bool = True) -> tuple[Schedule, list[list[str]], int, int]:
    """A schedule, its words, a rank and a place in its line."""
    schedule = made(draw(st.sampled_from(SHAPES)))
    if communication and draw(st.booleans()):
        schedule = schedule.with_communication()
    ranks = lines_of(schedule)
    rank = draw(st.integers(0, len(ranks) - 1))
    return schedule, ranks, rank, draw(st.integers(0, len(ranks[rank]) - 1))


@settings(deadline=None)
@given(bodies())
def test_an_action_that_is_left_out_is_missed(case: tuple[Schedule, list[list[str]], int, int]) -> None:
    schedule, ranks, rank, place = case
    word = ranks[rank].pop(place)
    assume(any(re.match(rf"[A-Z]+{stage}(\D|$)", w) for stage in schedule.stages_of(rank) for w in ranks[rank]))
    with pytest.raises(InvalidSchedule):
        rewritten(schedule, ranks).verify()
    ranks[rank].insert(place, word)
    rewritten(schedule, ranks).verify()


@settings(deadline=None)
@given(bodies(), st.data())
def test_an_action_that_is_there_twice_is_found(
    case: tuple[Schedule, list[list[str]], int, int], data: st.DataObject
) -> None:
    schedule, ranks, rank, place = case
    ranks[rank].insert(data.draw(st.integers(0, len(ranks[rank]))), ranks[rank][place])
    with pytest.raises(InvalidSchedule):
        rewritten(schedule, ranks).verify()


def parts(word: str) -> tuple[str, str, str]:
    """Letters, stage, and the rest."""
    found = re.fullmatch(r"([A-Z]+)(\d+)(.*)", word)
    assert found
    return found[1], found[2], found[3]


@settings(deadline=None)
@given(bodies(communication=False), st.data())
def test_two_actions_of_a_kind_and_stage_are_not_exchanged_unseen(
    case: tuple[Schedule, list[list[str]], int, int], data: st.DataObject
) -> None:
    """One end of a hop would have another order than the other."""
    schedule, ranks, rank, place = case
    words = ranks[rank]
    letters, stage, rest = parts(words[place])
    alike = [at for at, word in enumerate(words) if parts(word)[:2] == (letters, stage) and parts(word)[2] != rest]
    assume(alike)
    other = data.draw(st.sampled_from(alike))
    words[place], words[other] = words[other], words[place]
    with pytest.raises(InvalidSchedule):
        rewritten(schedule, ranks).verify()


@settings(deadline=None)
@given(bodies(), st.data())
def test_a_backward_does_not_change_places_with_its_forward_unseen(
    case: tuple[Schedule, list[list[str]], int, int], data: st.DataObject
) -> None:
    schedule, ranks, rank, _ = case
    words = ranks[rank]
    forwards = [word for word in words if word[0] == "F" and "B" + word[1:] in words]
    assume(forwards)
    forward = data.draw(st.sampled_from(forwards))
    first, second = words.index(forward), words.index("B" + forward[1:])
    words[first], words[second] = words[second], words[first]
    with pytest.raises(InvalidSchedule):
        rewritten(schedule, ranks).verify()


@settings(deadline=None)
@given(bodies(), st.data())
def test_what_the_verifier_accepts_after_any_move_a_transport_runs(
    case: tuple[Schedule, list[list[str]], int, int], data: st.DataObject
) -> None:
    schedule, ranks, rank, place = case
    word = ranks[rank].pop(place)
    ranks[rank].insert(data.draw(st.integers(0, len(ranks[rank]))), word)
    moved = rewritten(schedule, ranks)
    transport = Transport(moved, moved.unroll(5))
    try:
        verified = moved.verify()
    except InvalidSchedule:
        with pytest.raises((AssertionError, Blocked)):
            Transport(moved, moved.unroll(2 * moved.stages + 4)).run().check_complete()
        return
    transport.run().check_complete()
    if verified.rendezvous:
        Transport(moved, moved.unroll(5), rendezvous=True).run()
    else:
        with pytest.raises(Blocked):
            Transport(moved, moved.unroll(verified.batches), rendezvous=True).run()


# ---- what it says ----------------------------------------------------------------------------------------------------


def problem(body: str, *, versions: str = "flush", microbatches: int = 1, stages: int = 2) -> str:
    """Of a schedule whose ranks' lines are separated by "|"."""
    lines = body.split("|")
    header = f"hydra-schedule 1 stages={stages} ranks={len(lines)} microbatches={microbatches} versions={versions}"
    text = "\n".join([header, *(f"rank {rank}: {line}" for rank, line in enumerate(lines))])
    with pytest.raises(InvalidSchedule) as raised:
        Schedule.parse(text).verify()
    return str(raised.value)


GOOD = "F0.0 B0.0 R0 U0|F1.0 B1.0 R1 U1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("F0.0 R0 U0|F1.0 B1.0 R1 U1", "the bodies have 1 actions B, where 2 stages with 1 microbatches have 2"),
        ("B0.0 F0.0 R0 U0|F1.0 B1.0 R1 U1", "rank 0, its action 1, B0.0 of batch 0: its forward has not run"),
        ("F0.0 R0 B0.0 U0|F1.0 B1.0 R1 U1", "R0 of batch 0: the gradients are not complete: 1 of the batch's"),
        ("F0.0 B0.0 U0 R0|F1.0 B1.0 R1 U1", "U0 of batch 0: its gradients were not reduced"),
        ("F0.0 B0.0 U0|F1.0 B1.0 R1 U1", "U0 of batch 0: its gradients were not reduced"),
        ("F0.0 B0.0 R0|F1.0 B1.0 R1 U1", r"F0.0 of batch 1: it uses W\(1\) .*newest version is W\(0\): put U of batch"),
        ("F0.0 B0.0 R0 R0 U0|F1.0 B1.0 R1 U1", "R0 of batch 0: it occurs twice"),
        ("F0.0 B0.0 R0 U0 U0|F1.0 B1.0 R1 U1", "U0 of batch 0: updates are made in the order of batches"),
        ("F0.0 B0.0 R0 U0-1|F1.0 B1.0 R1 U1", r"F0.0 of batch 1: it uses W\(1\)"),
        ("F0.0 B0.0 R0 U0|F1.0 B1.0 R1 BU1 U1", "rank 0, .*U0 of batch 0: it was not begun: put BU of that batch"),
        ("F0.0 B0.0 BU0 R0 U0|F1.0 B1.0 R1 BU1 U1", "BU0 of batch 0: the gradients of stage 0 were not reduced, and"),
        ("F0.0 B0.0 R0 BU0 BU0 U0|F1.0 B1.0 R1 BU1 U1", "BU0 of batch 0: stage 0 is being updated in place: put its U"),
        ("F0.0 BU0-1 B0.0 R0 U0-1|F1.0 B1.0 R1 BU1 U1", r"F0.0 of batch 1: it uses W\(1\)"),
        ("F0.0 SF0.0 RB0.0 B0.0 R0 U0|F1.0 B1.0 R1 U1", "rank 1, .*F1.0 of batch 0: its input was not received"),
        ("F0.0 RB0.0 B0.0 R0 U0|RF1.0 F1.0 B1.0 SB1.0 R1 U1", "rank 0: SF0.0 of batch 0 is missing"),
        ("SF0.0 F0.0 RB0.0 B0.0 R0 U0|RF1.0 F1.0 B1.0 SB1.0 R1 U1", "SF0.0 .*its value is not computed yet"),
        ("F0.0 SF0.0 RB0.0 B0.0 R0 U0|F1.0 RF1.0 B1.0 SB1.0 R1 U1", "F1.0 .*its input was not received"),
    ],
)  # fmt: skip
def test_it_says_what_is_wrong_where_and_why(body: str, message: str) -> None:
    assert re.search(message, problem(body))


def test_ranks_that_block_each_other_are_named_with_what_they_wait_for() -> None:
    said = problem("F0.0 B0.0 F0.1 B0.1 R0 U0|F1.0 F1.1 B1.0 B1.1 R1 U1", microbatches=2)
    assert said == (
        "ranks block each other: rank 0 at its action 3, B0.0 of batch 0, waits for SB1.0; "
        "rank 1 at its action 3, F1.1 of batch 0, waits for SF0.1"
    )


def test_an_update_that_waits_for_a_rank_that_waits_for_it_is_a_deadlock() -> None:
    """Every update waits for the reductions of all stages, as a norm over the model makes it."""
    said = problem("F0.0 B0.0 R0 U0|F1.0 R1-1 B1.0 U1-1", versions="delay-1")
    assert said == (
        "ranks block each other: rank 0 at its action 6, U0 of batch 0, waits for R of that batch on every stage; "
        "rank 1 at its action 5, F1.0 of batch 1, waits for SF0.0"
    )


def test_batches_that_use_one_version_do_not_sum_their_gradients_together() -> None:
    said = problem("F0.0 B0.0 R0-1 U0-1|F1.0 B1.0 R1 U1", versions="delay-1")
    assert said == (
        "rank 0, its action 7, B0.0 of batch 1: the gradients of the previous batch are still being summed: put R of "
        "that batch before it"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("U0-1 F0.0 B0.0 R0 BU0", None),
        ("F0.0 BU0-1 B0.0 U0-1 R0", None),
        ("F0.0 B0.0 R0 BU0 BU0 U0", "BU0 of batch 0: it occurs twice; remove one"),
        ("F0.0 B0.0 BU0 R0 U0", "BU0 of batch 0: the gradients of stage 0 were not reduced"),
        ("F0.0 B0.0 R0 BU0 U0-1", r"BU0 of batch 1: it needs W\(1\), but the newest version is W\(0\): put U of batch"),
        ("F0.0 B0.0 R0 U0-1 BU0-1", "U0 of batch 0: it was not begun: put BU of that batch before it, or"),
    ],
)
def test_a_begin_of_an_update_stands_where_nothing_uses_what_it_writes_to(body: str, message: str | None) -> None:
    if message is not None:
        assert re.search(message, problem(body, versions="delay-1", stages=1))
        return
    text = f"hydra-schedule 1 stages=1 ranks=1 microbatches=1 versions=delay-1\nrank 0: {body}"
    assert Schedule.parse(text).verify(versions=2).stages[0].versions == 2


def test_a_rank_begins_no_update_before_all_its_stages_are_reduced() -> None:
    said = problem("F0.0 F1.0 B1.0 R1 BU1 B0.0 R0 BU0 U0-1 U1-1", versions="delay-1")
    assert "BU1 of batch 0: the gradients of stage 0 were not reduced, and a rank sums those of all its stages" in said


def test_both_ends_of_a_hop_have_to_use_one_order() -> None:
    said = problem("F0.0 F0.1 B0.0 B0.1 R0 U0|F1.1 F1.0 B1.0 B1.1 R1 U1", microbatches=2)
    assert said == (
        "from stage 0 to stage 1, value 0: SF0.0 of batch 0 is sent, where RF1.1 of batch 0 is received; "
        "both ends have to use the same order"
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"in_flight": 3}, "rank 0, .*F0.3 of batch 0: 4 microbatches are in flight on this stage, where the limit is"),
        ({"versions": 1}, "2 versions are held on this stage, where the limit is 1"),
        ({"gradients": 1}, "2 batches have gradients on this stage, where the limit is 1"),
    ],
)  # fmt: skip
def test_limits_are_checked(limits: dict[str, int], message: str) -> None:
    schedule = make("2bw", stages=4, microbatches=8)
    schedule.verify(in_flight=4, versions=2, gradients=2)
    with pytest.raises(InvalidSchedule, match=message):
        schedule.verify(**limits)


def test_actions_of_other_batches_stages_or_ranks_are_refused() -> None:
    schedule = make("1f1b", stages=2, microbatches=2)
    ranks = schedule.unroll(2)
    schedule.verify_actions(ranks, microbatches=[2, 2])
    with pytest.raises(InvalidSchedule, match="there is no such microbatch"):
        schedule.verify_actions(ranks, microbatches=[2])
    with pytest.raises(InvalidSchedule, match="R0 of batch 1: the gradients are not complete: 1"):
        schedule.verify_actions(ranks, microbatches=[2, 3])
    with pytest.raises(InvalidSchedule, match="the stage does not live on this rank"):
        schedule.verify_actions([ranks[1], ranks[0]], microbatches=[2, 2])
    with pytest.raises(InvalidSchedule, match="actions of 1 ranks for a schedule of 2"):
        schedule.verify_actions(ranks[:1], microbatches=[2, 2])
    with pytest.raises(InvalidSchedule, match="a batch without microbatches"):
        schedule.verify_actions(ranks, microbatches=[2, 2, 0])


USERS_OWN = """
# Three stages on two ranks: the first and the last share one.
hydra-schedule 1 ranks=2 stages=3 versions=delay-1 microbatches=2
rank 1:  U1-2 F1.0 F1.1 B1.0 B1.1 R1
rank 0:  U0-2 U2-2  F0.0 F0.1 F2.0 B2.0 F2.1 B2.1 R2 B0.0 B0.1 R0   # nothing is left in flight
"""


def test_a_users_own_text_is_parsed_verified_simulated_streamed_and_drawn() -> None:
    schedule = Schedule.parse(USERS_OWN)
    assert (schedule.kind, schedule.stages_of(0), schedule.stages_of(1)) == (None, [0, 2], [1])
    assert (schedule.versions, schedule.flushes) == ((2, 2, 2), False)
    verified = schedule.verify(versions=2)
    assert [peaks.in_flight for peaks in verified.ranks] == [3, 2]
    ranks = []
    for rank in range(2):
        stream = schedule.stream(rank)
        ranks.append([action for _ in range(4) for action in stream.next_batch(2)] + stream.drain())
    assert ranks == schedule.unroll(4)
    Transport(schedule, ranks).run().check_complete()
    simulation = schedule.simulate(batches=4, forward=1, backward=1)
    assert simulation.makespan == 4 * simulation.period
    assert "1b" in simulation.grid()
