"""Rules that stop jobs, against what they say of themselves."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_ext.errors import InvalidArgument
from hydra_ext.fleet.guides import Guide, MedianStopping, SuccessiveHalving

LOSSES = st.lists(st.floats(0.01, 10), min_size=9, max_size=9)
JOBS = st.lists(LOSSES, min_size=1, max_size=9)


@given(JOBS)
def test_at_each_rung_a_job_goes_on_if_it_is_among_the_best_third_so_far(jobs: list[list[float]]) -> None:
    """Jobs one after the other, each to its end or to where it is stopped: the rule anew from all that was said."""
    rule = SuccessiveHalving(first=1, factor=3, window=2)
    at_rung: dict[int, list[float]] = {1: [], 3: [], 9: []}
    for number, losses in enumerate(jobs):
        for step, loss in enumerate(losses, 1):
            stopped = rule.stops(str(number), step, loss)
            if step not in at_rung:
                assert not stopped
                continue
            mean = statistics.fmean(losses[max(0, step - 2) : step])
            at_rung[step].append(mean)
            better = sum(other < mean for other in at_rung[step])
            assert stopped == (better >= max(1, len(at_rung[step]) // 3))
            if stopped:
                break


@given(JOBS)
def test_a_job_stops_if_its_best_is_worse_than_the_median_of_the_others_means(jobs: list[list[float]]) -> None:
    rule = MedianStopping(grace=3, least=2)
    for step in range(1, 10):
        for number, losses in enumerate(jobs):
            stopped = rule.stops(str(number), step, losses[step - 1])
            means = [statistics.fmean(other[:step]) for other in jobs[:number]]
            due = step >= 3 and len(means) >= 2 and min(losses[:step]) > statistics.median(means)
            assert stopped == due


def test_a_loss_that_is_not_finite_is_the_worst() -> None:
    rule = SuccessiveHalving(first=1)
    assert not rule.stops("a", 1, math.nan)
    assert not rule.stops("b", 1, 1.0)
    assert rule.stops("c", 1, math.inf)
    median = MedianStopping(grace=1, least=1)
    assert not median.stops("a", 1, 1.0)
    assert median.stops("b", 1, math.nan)


def test_steps_that_come_again_count_once() -> None:
    """After a failure a job makes the steps since its checkpoint again."""
    rule = MedianStopping(grace=2, least=1)
    for step, loss in ((1, 4.0), (2, 2.0), (1, 4.0), (2, 2.0)):
        assert not rule.stops("a", step, loss)
    assert rule.stops("b", 1, 3.5) is False
    assert rule.stops("b", 2, 3.2)


def test_a_guide_by_itself_changes_nothing() -> None:
    guide = Guide()
    assert guide.propose(0) == ()
    assert not guide.stops("a", 1, math.nan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuccessiveHalving(first=0), "first=0: give a whole number of at least 1"),
        (lambda: SuccessiveHalving(first=1, factor=1), "factor=1: give a whole number of at least 2"),
        (lambda: MedianStopping(grace=0), "grace=0: give a whole number of at least 1"),
    ],
)
@pytest.mark.every_case
def test_numbers_are_checked(make: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()  # type: ignore[operator]
