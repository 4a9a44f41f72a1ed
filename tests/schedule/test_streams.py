"""What a rank gets, step after step: the bodies, one after the other."""

import pytest

from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule import Action, ActionKind, Schedule, make

COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD)


def shapes() -> list[tuple[str, int, int, int]]:
    """Kind, stages, ranks, microbatches."""
    square = [(kind, d, d, m) for kind in ("gpipe", "1f1b", "2bw") for d in (1, 2, 3, 4, 6) for m in (1, 3, 5, 8)]
    wrapped = [
        (kind, v * r, r, m)
        for kind in ("gpipe", "2bw", "interleaved")
        for v in (2, 3)
        for r in (1, 2, 3)
        for m in (2, 3, 7)
    ]
    streams = [("pipedream", d, d, 1) for d in (1, 2, 3, 5)]
    return [shape for shape in (*square, *wrapped, *streams) if shape[0] != "2bw" or shape[3] >= shape[2] - 1]


def made(shape: tuple[str, int, int, int]) -> Schedule:
    kind, stages, ranks, microbatches = shape
    return make(kind, stages=stages, ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_with_batches_of_one_size_a_stream_is_the_unrolled_bodies(shape: tuple[str, int, int, int]) -> None:
    schedule = made(shape)
    for batches in (1, 2, 5, 9):
        unrolled = schedule.unroll(batches)
        for rank in range(schedule.ranks):
            stream = schedule.stream(rank)
            streamed = [action for _ in range(batches) for action in stream.next_batch(schedule.microbatches)]
            assert streamed + stream.drain() == unrolled[rank]


def computes(actions: list[Action]) -> str:
    return " ".join(action.token for action in actions if action.kind in COMPUTES)


def test_one_forward_one_backward_is_the_order_of_the_paper() -> None:
    schedule = make("1f1b", stages=3, microbatches=4)
    assert computes(schedule.body(0)) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert computes(schedule.body(1)) == "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"
    assert computes(schedule.body(2)) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"


def test_two_versions_need_stages_less_one_microbatches() -> None:
    make("2bw", stages=4, microbatches=3)
    with pytest.raises(InvalidSchedule, match="give at least 3"):
        make("2bw", stages=4, microbatches=2)
