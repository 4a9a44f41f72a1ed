"""Reports in notebooks: bars above the text, as HTML and SVG without scripts or other files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import cycle

# By Okabe and Ito: also people who see fewer colours tell them apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
_WIDTH, _HEIGHT = 480, 14


@dataclass(frozen=True)
class Bar:
    """Parts of one whole, side by side.

    Attributes:
        label: What they are parts of.
        parts: Their sizes by name. Those of zero are left out.
        whole: What the full width means; None for the sum.
        said: A size in words.
    """

    label: str
    parts: Mapping[str, float]
    said: Callable[[float], str]
    whole: float | None = None


def html_of(text: str, *bars: Bar) -> str:
    """A fragment of HTML: each bar with its legend, and the text below."""
    return "<div>" + "".join(map(_drawn, bars)) + f"<pre>{escape(text)}</pre></div>"


def _drawn(bar: Bar) -> str:
    total = sum(bar.parts.values())
    whole = max(total, bar.whole or 0.0)
    if not total:
        return ""
    rectangles, legend, begin = [], [], 0.0
    colours = cycle(_COLOURS)
    for name, size in bar.parts.items():
        if size <= 0:
            continue
        colour = next(colours)
        width = _WIDTH * size / whole
        title = escape(f"{name} {bar.said(size)}")
        rectangles.append(
            f'<rect x="{begin:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}">'
            f"<title>{title}</title></rect>"
        )
        legend.append(f'<span style="color:{colour}">&#9632;</span> {title}')
        begin += width
    frame = f'<rect x="0" y="0" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="currentColor"/>'
    of = f" of {bar.said(bar.whole)}" if bar.whole else ""
    return (
        f"<div>{escape(bar.label)}: {escape(bar.said(total))}{escape(of)}</div>"
        f'<svg role="img" aria-label="{escape(bar.label)}" width="{_WIDTH}" height="{_HEIGHT}">'
        f"{''.join(rectangles)}{frame}</svg><div>{' &nbsp; '.join(legend)}</div>"
    )


def size_said(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def seconds_said(seconds: float) -> str:
    return f"{seconds:.3g} s"
