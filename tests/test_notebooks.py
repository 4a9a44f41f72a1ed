"""Reports as notebooks show them: valid markup, with the text and bars as wide as their figures say."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.notebooks import Bar, html_of, seconds_said, size_said


def parsed(html: str) -> Element:
    return fromstring(html.replace("&nbsp;", " "))  # XML knows no names of characters


def widths(bar: Element) -> list[float]:
    return [float(each.get("width", "")) for each in bar.findall("rect")]


def test_the_parts_of_a_bar_are_as_wide_as_their_share() -> None:
    bar = Bar("memory", {"a": 2.0**20, "none": 0.0, "b <&>": 3 * 2.0**20}, size_said, whole=8 * 2.0**20)
    page = parsed(html_of("text with <tags> & more", bar))
    (drawn,) = page.iter("svg")
    assert widths(drawn) == [60.0, 180.0, 480.0]  # the last one is the frame
    assert page.findtext("pre") == "text with <tags> & more"
    assert "memory: 4.0 MiB of 8.0 MiB" in "".join(page.itertext())
    assert [title.text for title in page.iter("title")] == ["a 1.0 MiB", "b <&> 3.0 MiB"]


def test_more_than_the_whole_fills_the_bar_and_nothing_draws_none() -> None:
    (drawn,) = parsed(html_of("", Bar("time", {"a": 3.0, "b": 1.0}, seconds_said, whole=2.0))).iter("svg")
    assert widths(drawn) == [360.0, 120.0, 480.0]
    assert not list(parsed(html_of("", Bar("time", {"a": 0.0}, seconds_said))).iter("svg"))


def test_many_parts_are_all_drawn() -> None:
    (drawn,) = parsed(html_of("", Bar("ranks", {str(i): 1.0 for i in range(20)}, seconds_said))).iter("svg")
    assert len(widths(drawn)) == 21


class _Whole(HTMLParser):
    """Expects that what begins also ends."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run() -> hydra_ext.Run:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    optimizer = hydra_ext.optim.AdamW(model.parameters(), lr=1e-3)
    with hydra_ext.offload(model, optimizer, budget="128KiB") as run:
        for _ in range(3):
            run.step([torch.randn(4, 64)] * 2, lambda x: model(x).square().mean())
    return run


def test_a_runs_report_is_shown_with_its_memory(run: hydra_ext.Run) -> None:
    report = run.report()
    html = report._repr_html_()
    _Whole().feed(html)
    page = parsed(html)
    memory = next(page.iter("svg"))
    assert memory.get("aria-label") == "device memory at its peak"
    shares = sum(widths(memory)[:-1]) / 480
    assert shares == pytest.approx(min(1.0, report.peak_bytes / report.budget_bytes), abs=0.01)
    assert page.findtext("pre") == str(report)
