"""The planner of activations, as the core gives it to Python. Its own tests are in tests/cpp/plan."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hydra_ext import _C
from hydra_ext.errors import PlanDoesNotFit, PlanError

pytestmark = pytest.mark.every_case

KEEP, OFFLOAD = _C.ActivationOption.KEEP, _C.ActivationOption.OFFLOAD
AGAIN, AGAIN_OFFLOADED = _C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED


def segment(**changed: Any) -> _C.ActivationSegment:
    given: dict[str, Any] = {
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "saved_fresh": 100,
        "saved_all": 100,
        "inputs_fresh": 10,
        "inputs_all": 10,
        "parked_bytes": 0,
        "forward_bytes": 5,
        "backward_bytes": 7,
        "live_gradient_bytes": 0,
        "weight_bytes": 0,
        "slot_bytes": 0,
        "gradient_bytes": 0,
    }
    return _C.ActivationSegment(**{**given, **changed})


def figures(plan: _C.ActivationPlan) -> tuple[Any, ...]:
    times = plan.seconds, plan.compute_seconds, plan.to_device_seconds, plan.to_host_seconds
    return plan.cut, plan.options, plan.round_size, plan.stash_bytes, *times, plan.peak_bytes


def test_room_for_everything_keeps_everything() -> None:
    plan = _C.plan_activations([[segment()] * 3], microbatches=2, budget=1000, to_device=1.0, to_host=1.0)
    assert plan.options == [KEEP] * 3
    assert plan.seconds == plan.compute_seconds == 18
    assert plan.to_device_seconds == plan.to_host_seconds == 0
    assert plan.peak_bytes <= 1000


def test_a_plan_is_what_the_simulation_of_its_treatment_says() -> None:
    cuts = [[segment(), segment(recompute=_C.RecomputeScope.IN_ROUNDS), segment()], [segment(saved_fresh=300)]]
    lanes = {"to_device": 90.0, "to_host": 110.0, "update_seconds": 5.0}
    plan = _C.plan_activations(cuts, microbatches=2, budget=250, **lanes)
    cut, options, round_size, stash_bytes, *times = figures(plan)
    simulated = _C.simulate_activations(
        cuts[cut],
        options=options,
        round_size=round_size,
        stash_bytes=stash_bytes,
        microbatches=2,
        budget=250,
        **lanes,
    )
    assert tuple(times) == simulated


@pytest.mark.parametrize("round_size", [1, 2])
@pytest.mark.parametrize("on_host", [0, 50, 100, 130, 300, 600, 10_000])
def test_what_the_host_cannot_hold_takes_the_seconds_of_the_disk(on_host: int, round_size: int) -> None:
    def seconds(**given: Any) -> float:
        return _C.simulate_activations(
            [segment()] * 3,
            options=[OFFLOAD] * 3,
            round_size=round_size,
            stash_bytes=0,  # nothing overlaps
            microbatches=2,
            budget=1000,
            to_device=50.0,
            to_host=40.0,
            **given,
        )[0]

    over = max(0, 300 * round_size - on_host)  # bytes of each round
    found = seconds(host_bytes=on_host, disk=20.0)
    assert found == pytest.approx(seconds() + 2 / round_size * 2 * over / 20)


def test_with_a_disk_the_host_limits_no_plan_but_makes_moving_dearer() -> None:
    given: dict[str, Any] = {"microbatches": 1, "budget": 110, "to_device": 1e3, "to_host": 1e3}
    cuts = [[segment(recompute=_C.RecomputeScope.ALONE)] * 3]
    with pytest.raises(PlanError, match="on the host"):
        _C.plan_activations([[segment()] * 3], **given, host_bytes=50)
    plans = [_C.plan_activations(cuts, **given, host_bytes=0, disk=disk) for disk in (1e9, 1e3, 1.0)]
    assert OFFLOAD in plans[0].options
    assert OFFLOAD not in plans[2].options, "to run again takes a second, and to move takes 200"
    assert plans[0].seconds < plans[1].seconds < plans[2].seconds
    with pytest.raises(PlanError, match="the disk has less than 0"):
        _C.plan_activations(cuts, **given, disk=-1.0)


def test_the_same_problem_has_the_same_plan() -> None:
    cuts = [[segment(saved_fresh=50 + 37 * i % 90, forward_seconds=1 + 0.3 * (i % 5)) for i in range(40)]]
    plans = [
        _C.plan_activations(cuts, microbatches=4, budget=1500, to_device=60.0, to_host=60.0, effort=0.3)
        for _ in range(2)
    ]
    assert figures(plans[0]) == figures(plans[1])


def test_compressing_needs_a_stream() -> None:
    compressed = segment(stream_bytes=10, coding_seconds=0.1)
    plan = _C.plan_activations([[compressed] * 2], microbatches=1, budget=150, to_device=10.0, to_host=10.0)
    assert _C.ActivationOption.COMPRESS in plan.options
    treatment = {"options": [_C.ActivationOption.COMPRESS], "round_size": 1, "stash_bytes": 0}
    with pytest.raises(PlanError, match="segment 0 does not allow its option"):
        _C.simulate_activations([segment()], **treatment, microbatches=1, budget=1000)


def test_segments_may_run_again_only_in_their_scope() -> None:
    recompute = {"options": [_C.ActivationOption.RECOMPUTE], "stash_bytes": 0, "microbatches": 2, "budget": 1000}
    for scope, allowed in (
        (_C.RecomputeScope.NEVER, []),
        (_C.RecomputeScope.ALONE, [1]),
        (_C.RecomputeScope.IN_ROUNDS, [1, 2]),
    ):
        for round_size in (1, 2):
            if round_size in allowed:
                seconds, *_ = _C.simulate_activations([segment(recompute=scope)], round_size=round_size, **recompute)
                assert seconds == 8
            else:
                with pytest.raises(PlanError, match=f"rounds of {round_size}"):
                    _C.simulate_activations([segment(recompute=scope)], round_size=round_size, **recompute)


FREEDOM = [[KEEP], [OFFLOAD], [KEEP, OFFLOAD], [AGAIN], [AGAIN_OFFLOADED], [AGAIN, AGAIN_OFFLOADED], None]


@pytest.mark.parametrize("seed", range(12))
def test_options_that_are_given_are_kept_to_and_the_others_are_as_good_as_enumerated(seed: int) -> None:
    draw = random.Random(seed)
    given = [draw.choice(FREEDOM) for _ in range(5)]
    chain = [
        segment(
            saved_fresh=draw.randrange(40, 160),
            forward_seconds=draw.uniform(0.5, 2),
            recompute=_C.RecomputeScope.IN_ROUNDS,
            stream_bytes=20,
            coding_seconds=0.5,
            options=options,
        )
        for options in given
    ]
    least = _C.least_activation_budget([chain])
    budget = least + draw.randrange(60, 400)
    plan = _C.plan_activations([chain], microbatches=2, budget=budget, to_device=60.0, to_host=60.0)
    assert all(options is None or option in options for option, options in zip(plan.options, given, strict=True))
    best = _C.testing.least_activation_seconds(chain, microbatches=2, budget=budget, to_device=60.0, to_host=60.0)
    assert best <= plan.seconds <= 1.05 * best
    assert _C.plan_activations([chain], microbatches=2, budget=least).peak_bytes == least
    with pytest.raises(PlanDoesNotFit):
        _C.plan_activations([chain], microbatches=2, budget=least - 1)


def test_what_is_given_counts_for_the_least_budget_and_needs_an_option_that_is_possible() -> None:
    kept = segment(options=[KEEP])
    assert _C.least_activation_budget([[kept, segment()]]) == 100 + 7
    assert _C.least_activation_budget([[kept, kept]]) == 200 + 7
    with pytest.raises(PlanError, match="segment 1 allows no option"):
        _C.least_activation_budget([[segment(), segment(options=[AGAIN])]])


def test_what_early_segments_keep_counts_for_the_least_budget_of_later_ones() -> None:
    """By itself a segment needs less to be kept than to run again. But then it keeps more before the others."""
    chain = [segment(options=[KEEP, AGAIN], recompute=_C.RecomputeScope.IN_ROUNDS, second=(95, 1.0))] * 3
    assert _C.least_activation_budget([chain]) == 10 + 10 + 100 + 7
    plan = _C.plan_activations([chain], microbatches=2, budget=127)
    assert (plan.options, plan.round_size, plan.peak_bytes) == ([AGAIN, AGAIN, KEEP], 1, 127)


def test_options_and_sizes_of_rounds_that_contradict_each_other_are_told() -> None:
    alone = segment(options=[AGAIN], recompute=_C.RecomputeScope.ALONE)
    with pytest.raises(PlanError, match="no option in rounds of the given sizes"):
        _C.least_activation_budget([[segment(), alone]], round_sizes=[2])
    plan = _C.plan_activations([[alone], [segment()]], microbatches=2, budget=1000, round_sizes=[2])
    assert plan.cut == 1


def test_a_search_among_many_rounds_and_cuts_ends() -> None:
    """Asking all of them would take minutes."""
    draw = random.Random(0)
    cuts = [[segment(saved_fresh=draw.randrange(50, 99), weight_bytes=30) for _ in range(100)] for _ in range(8)]
    many = {"microbatches": 512, "round_sizes": [*range(2, 513)], "to_device": 90.0, "to_host": 110.0}
    plan = _C.plan_activations(cuts, budget=20_000, effort=0.1, **many)
    assert plan.peak_bytes <= 20_000
    assert plan.seconds < math.inf


def test_of_plans_that_are_as_fast_the_one_that_moves_less_is_taken() -> None:
    chain = [segment(), segment(options=[OFFLOAD]), segment()]
    assert _C.plan_activations([chain], microbatches=1, budget=1000).options == [KEEP, OFFLOAD, KEEP]


def test_given_round_sizes_are_kept_to() -> None:
    for size in (1, 2, 3):
        plan = _C.plan_activations([[segment()]], microbatches=3, budget=1000, round_sizes=[size])
        assert plan.round_size == size
    with pytest.raises(PlanError, match="1 to 3 microbatches"):
        _C.plan_activations([[segment()]], microbatches=3, budget=1000, round_sizes=[4])


def test_a_budget_that_is_too_small_names_the_one_that_is_not() -> None:
    cuts = [[segment(), segment(backward_bytes=70, parked_bytes=3)]]
    least = _C.least_activation_budget(cuts)
    assert least == 70
    assert _C.least_activation_budget(cuts, round_sizes=[3]) == 76
    assert _C.plan_activations(cuts, microbatches=3, budget=least).peak_bytes == least
    with pytest.raises(PlanDoesNotFit, match="give at least 70 bytes") as error:
        _C.plan_activations(cuts, microbatches=3, budget=least - 1)
    assert (error.value.needed_bytes, error.value.limit_bytes) == (70, 69)
    with pytest.raises(PlanDoesNotFit, match="it takes 270 bytes") as error:
        _C.simulate_activations(cuts[0], options=[KEEP, KEEP], round_size=1, stash_bytes=0, microbatches=3, budget=100)
    assert error.value.needed_bytes == 270


@pytest.mark.parametrize(
    ("cuts", "changed", "message"),
    [
        ([], {}, "needs its segments"),
        ([[]], {}, "1 to 4095 segments"),
        ([[segment(saved_fresh=-1)]], {}, "segment 0: its bytes"),
        ([[segment(), segment(forward_seconds=math.nan)]], {}, "segment 1: its seconds"),
        ([[segment()]], {"microbatches": 0}, "1 to 1023 microbatches"),
        ([[segment()]], {"to_host": 0.0}, "more than 0 bytes a second"),
        ([[segment()]], {"update_seconds": -1.0}, "the optimizer's seconds"),
        ([[segment()]], {"host_bytes": -1}, "the host has less than 0 bytes"),
        ([[segment()]], {"effort": math.nan}, "the effort is not from 0 to 1000"),
        ([[segment()]], {"budget": 50, "host_bytes": 1}, "on the host: give more of either"),
    ],
)
def test_senseless_problems_are_refused(cuts: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _C.plan_activations(cuts, **{"microbatches": 1, "budget": 1000, **changed})


def test_the_enumeration_finds_nothing_faster() -> None:
    segments = [segment(saved_fresh=60 + 30 * i, recompute=_C.RecomputeScope.IN_ROUNDS) for i in range(4)]
    given = {"microbatches": 2, "budget": 260, "to_device": 80.0, "to_host": 80.0}
    least = _C.testing.least_activation_seconds(segments, **given)
    assert _C.plan_activations([segments], **given).seconds == pytest.approx(least, rel=1e-12)
    assert _C.testing.least_activation_seconds(segments, **{**given, "budget": 0}) == math.inf
