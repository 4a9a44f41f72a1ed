"""The picture of a plan: memory above lanes, over the same seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext.plan import Card, Plan, fit

pytest.importorskip("matplotlib")

from hydra_ext.cli.plan_picture import draw, figure_of

CARD = Card(
    name="slow",
    memory_bytes=2**30,
    half_flops=1e11,
    full_flops=1e11,
    memory_bytes_per_second=1e11,
    link_bytes_per_second=1e8,
)
KINDS = {"forward", "recompute", "backward", "update", "weights", "stash", "gradients"}


def planned(depth: int, **options: Any) -> Plan:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(depth)),
    )
    return fit(model, torch.randn(256, 64), lambda x: model(x).square().mean(), **{"device": CARD, **options})


@pytest.fixture(scope="module")
def tight() -> Plan:
    return planned(4, budget=2 * planned(4).least_bytes, update_seconds=0.01, microbatches=2)


def bars(axes: Any) -> list[tuple[str, float, float, float]]:
    """Kind, height of the middle, left and right."""
    found = []
    labelled = [each for each in axes.collections if not each.get_label().startswith("_")]
    kinds = {tuple(each.get_facecolor()[0]): each.get_label() for each in labelled}
    for each in axes.collections:
        kind = kinds[tuple(each.get_facecolor()[0])]
        for path in each.get_paths():
            box = path.get_extents()
            found.append((kind, (box.y0 + box.y1) / 2, box.x0, box.x1))
    return found


def test_lanes_are_drawn_under_memory_over_the_same_seconds(tight: Plan) -> None:
    figure = figure_of(tight)
    memory, lanes = figure.axes
    assert memory.get_xlim() == lanes.get_xlim() == (0, 1000 * tight.seconds)
    assert lanes.get_xlabel() == "milliseconds since the step began"
    names = [label.get_text().partition("\n")[0] for label in lanes.get_yticklabels()]
    assert names == ["compute", "to device", "to host", "optimizer"]
    drawn = bars(lanes)
    assert {kind for kind, *_ in drawn} == KINDS
    assert {text.get_text() for text in lanes.get_legend().get_texts()} == KINDS
    assert max(right for *_, right in drawn) == pytest.approx(1000 * tight.seconds)
    for row, name in enumerate(names[:3]):
        own = sorted((left, right) for _, middle, left, right in drawn if round(middle) == row)
        assert sum(right - left for left, right in own) == pytest.approx(1000 * tight.lanes[name], rel=0.01)
    for row, name in enumerate(names):
        busy = tight.lanes[name] / tight.seconds
        assert lanes.get_yticklabels()[row].get_text() == f"{name}\n{busy:.0%} busy"


def test_the_curve_of_memory_has_the_plans_peak_and_end(tight: Plan) -> None:
    memory, _ = figure_of(tight).axes
    boxes = [path.get_extents() for each in memory.collections for path in each.get_paths()]
    assert max(box.y1 for box in boxes) * 2**20 == pytest.approx(tight.peak_bytes)
    assert min(box.x0 for box in boxes) == 0
    assert max(box.x1 for box in boxes) == pytest.approx(1000 * tight.seconds)
    (budget,) = memory.get_lines()
    assert budget.get_ydata()[0] * 2**20 == pytest.approx(tight.budget)
    roomy, _ = figure_of(planned(4, budget="1GiB")).axes  # a line that far above would leave no room for the curve
    assert not roomy.get_lines()
    assert "of 1 GiB" in roomy.get_title(loc="left")


def test_names_are_written_where_they_have_room(tight: Plan) -> None:
    figure = figure_of(tight)
    _, lanes = figure.axes
    figure.canvas.draw()
    written = [text for text in lanes.texts if text.get_text()]
    assert {text.get_text() for text in written} == {segment.name for segment in tight.segments}
    for text in written:
        box = text.get_window_extent().transformed(lanes.transData.inverted())
        middle, row = text.get_position()
        _, _, left, right = next(bar for bar in bars(lanes) if round(bar[1]) == row and bar[2] <= middle <= bar[3])
        assert left <= box.x0 < box.x1 <= right
        assert abs(box.y1 - box.y0) <= 0.8


@pytest.mark.full
def test_a_long_step_has_no_more_bars_than_can_be_seen(tmp_path: Path) -> None:
    plan = planned(4, budget="1GiB", microbatches=200, round_size=1)
    intervals = plan.timeline().intervals
    _, lanes = figure_of(plan).axes
    assert len(bars(lanes)) < 0.6 * len(intervals)
    assert not lanes.texts
    draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_without_a_link_is_drawn() -> None:
    plan = planned(2, device=None)
    _, lanes = figure_of(plan).axes
    assert {round(middle) for _, middle, *_ in bars(lanes)} == {0}
