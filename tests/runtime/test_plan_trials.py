"""Plans that forecasts cannot tell apart are timed: which one stays, after how many steps."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hydra_ext.runtime.fit import Trials

FAST, SLOW, OTHER = "fast", "slow", "other"  # in place of plans, of which only identity matters


def trials_of(*plans: str) -> Trials:
    return Trials(cast("list[Any]", [*plans]))


def run(trials: Trials, seconds: dict[str, list[float]]) -> list[object]:
    """Makes steps until a plan's seconds are spent, which are in the order of its steps. Returns what they ran by."""
    ran: list[object] = []
    left = {plan: [*each] for plan, each in seconds.items()}
    while left[cast("str", trials.planned)]:
        ran.append(trials.planned)
        trials.note(left[cast("str", trials.planned)].pop(0))
    return ran


@pytest.mark.parametrize("plans", [(FAST, SLOW), (SLOW, FAST)])
def test_a_step_that_something_else_made_longer_does_not_decide(plans: tuple[str, str]) -> None:
    trials = trials_of(*plans)
    ran = run(trials, {FAST: [9, 5, 5, 1, 5, 5], SLOW: [9, 2, 2, 2, 2, 2]})
    assert ran[:8] == [plan for plan in plans for _ in range(4)]
    assert set(ran[8:]) == {FAST}
    assert trials.seconds == {FAST: 1, SLOW: 2}


def test_the_first_step_by_a_plan_does_not_count() -> None:
    trials = trials_of(FAST, SLOW)
    run(trials, {FAST: [0.1, 3, 3, 3, 3], SLOW: [0.2, 4, 4, 4]})
    assert trials.seconds == {FAST: 3, SLOW: 4}


def test_one_note_says_that_all_are_timed() -> None:
    trials = trials_of(FAST, SLOW)
    assert [trials.note(1) for _ in range(12)] == [False] * 7 + [True] + [False] * 4


def test_others_that_are_found_later_are_timed_and_the_fastest_of_all_stays() -> None:
    trials = trials_of(SLOW)
    assert [trials.note(2) for _ in range(4)] == [False, False, False, True]
    trials.try_also(cast("list[Any]", [SLOW, OTHER, FAST]))
    ran = run(trials, {OTHER: [3] * 4, FAST: [1] * 9, SLOW: [2] * 9})
    assert ran == [OTHER] * 4 + [FAST] * 9
    trials.try_also(cast("list[Any]", [SLOW, OTHER, FAST]))
    assert trials.planned is FAST
