"""`hydra_ext.plan.crossover`: against a plain enumeration, and what it refuses."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hydra_ext.errors import PlanError
from hydra_ext.plan import crossover

pytestmark = pytest.mark.every_case

GIVEN: dict[str, Any] = {
    "epoch_samples": 1000,
    "line_batch": 10,
    "line_seconds": 2.0,
    "speedups": {2: 1.5},
}


def enumerated(epochs: Any, given: dict[str, Any], count: int) -> tuple[float, float]:
    """The seconds of data parallelism alone and of the fastest hybrid, each step summed up."""

    def train(lines: int, ways: int) -> float:
        batch = lines * given["line_batch"]
        steps = 0
        while steps * batch < given["epoch_samples"]:
            steps += 1
        speedup = {**given["speedups"], 1: 1.0}[ways]
        sums = 2 * given["gradient_bytes"] * (lines - 1) / (lines * ways * given["link"])
        return epochs(batch) * steps * (given["line_seconds"] / speedup + sums)

    ways = [each for each in given["speedups"] if count % each == 0 and each > 1]
    return train(count, 1), min([train(count // each, each) for each in ways], default=math.inf)


@pytest.mark.parametrize("seed", range(30))
def test_the_curve_is_that_of_an_enumeration(seed: int) -> None:
    draw = random.Random(seed)
    given: dict[str, Any] = {
        "epoch_samples": draw.randint(100, 5000),
        "line_batch": draw.randint(1, 64),
        "line_seconds": draw.uniform(0.1, 2),
        "speedups": {ways: draw.uniform(0.8, ways) for ways in draw.sample([1, 2, 3, 4, 8], draw.randint(0, 4))},
        "gradient_bytes": draw.choice([0.0, 1e8]),
        "link": draw.choice([math.inf, 1e9]),
    }
    bend = draw.uniform(100, 2000)

    def epochs(batch: int) -> float:
        return math.inf if batch > 4000 else 5 + (batch / bend) ** 2

    found = crossover(epochs, **given)
    assert [point.devices for point in found.points] == [2**power for power in range(9)]
    gains = []
    for point in found.points:
        alone, hybrid = enumerated(epochs, given, point.devices)
        assert (point.data_parallel, point.hybrid) == pytest.approx((alone, hybrid))
        assert (point.ways > 1) == math.isfinite(hybrid)
        gains.append((point.devices, hybrid < alone))
    last = [devices for place, (devices, _) in enumerate(gains) if all(better for _, better in gains[place:])]
    assert found.devices == (last[0] if last else None)
    assert str(found).count("\n") == len(found.points) + 1


def test_a_hybrid_is_faster_where_more_lines_take_too_many_epochs() -> None:
    """Twice the lines would halve the steps, at equal epochs; a line of two is 1.5 times as fast."""
    found = crossover([(80, 1.0), (160, 1.2), (320, 4.0)], devices=[1, 2, 4, 8, 16, 32], **GIVEN)
    gains = {point.devices: point.gain for point in found.points}
    assert gains[1] == 0.0
    assert gains[8] == pytest.approx(1.5 * 13 / 25)  # steps of an epoch, rounded up
    assert gains[16] == pytest.approx(1.5 * 1.2 * 7 / 13)
    assert gains[32] == pytest.approx(1.5 * 4.0 * 4 / 1.2 / 7)
    assert found.devices == 32
    assert found.gain_at_scale == pytest.approx(
        min(p.data_parallel for p in found.points) / min(p.hybrid for p in found.points)
    )


def test_points_are_joined_in_the_logarithm_and_end() -> None:
    found = crossover([(10, 2.0), (40, 4.0)], devices=[1, 2, 4, 8], **{**GIVEN, "speedups": {}})
    steps = {point.devices: math.ceil(1000 / (10 * point.devices)) for point in found.points}
    epochs = [point.data_parallel / 2 / steps[point.devices] for point in found.points]
    assert epochs[:3] == pytest.approx([2.0, 3.0, 4.0])
    assert math.isinf(epochs[3])
    assert found.devices is None
    assert found.gain_at_scale == 0.0
    assert "never" in str(found)


@pytest.mark.parametrize(
    ("epochs", "options", "named"),
    [
        ([], {}, "epochs"),
        ([(10, 1.0), (10, 2.0)], {}, "growing"),
        (lambda _: 0.0, {}, "epochs"),
        (lambda _: float("nan"), {}, "epochs"),
        ([(10, 1.0)], {"line_batch": 0}, "line_batch"),
        ([(10, 1.0)], {"epoch_samples": -1}, "epoch_samples"),
        ([(10, 1.0)], {"line_seconds": math.inf}, "line_seconds"),
        ([(10, 1.0)], {"speedups": {2: 0.0}}, "speedups"),
        ([(10, 1.0)], {"speedups": {0: 1.0}}, "speedups"),
        ([(10, 1.0)], {"link": 0}, "link"),
        ([(10, 1.0)], {"gradient_bytes": -1}, "gradient_bytes"),
        ([(10, 1.0)], {"devices": []}, "devices"),
        ([(10, 1.0)], {"devices": [0]}, "devices"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(epochs: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        crossover(epochs, **{**GIVEN, **options})
