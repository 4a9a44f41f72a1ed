"""The colours and the style sheet of a report, for dark and for light displays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

INSIDE = "#111417"  # text on bars, whose colours are the same on dark and light displays
FILLS = (
    "#8ab4f8",
    "#81c995",
    "#fdb863",
    "#c9a6f0",
    "#f4a3b0",
    "#7fd6e3",
    "#d8cf6c",
    "#b8c2cc",
    "#e6a57e",
    "#9fd8c8",
)
LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "ink": "#1f2429",
    "quiet": "#59626b",
    "grid": "#d9dee3",
    "failure": "#b3261e",
}
DARK: Mapping[str, str] = {
    "paper": "#15181b",
    "ink": "#e8eaed",
    "quiet": "#a7b0b8",
    "grid": "#3a4148",
    "failure": "#ff7b70",
}
LIGHT_LINES = (
    "#2b62c4",
    "#24804a",
    "#b35c00",
    "#7b3fb8",
    "#b8324f",
    "#0f7a8a",
    "#7d7400",
    "#56626d",
    "#9a4f22",
    "#2c7d69",
)
DARK_LINES = FILLS


def _variables(colours: Mapping[str, str], lines: Sequence[str]) -> str:
    named = {**colours, **{f"line{number}": colour for number, colour in enumerate(lines)}}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


_JOBS = "\n".join(
    f".fill{number} {{ fill: {fill}; }} .line{number} {{ stroke: var(--line{number}); }}"
    for number, fill in enumerate(FILLS)
)

STYLE = f"""
:root {{ {_variables(LIGHT, LIGHT_LINES)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK, DARK_LINES)} }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1040px; margin: 0 auto; padding: 1rem; }}
h2 {{ margin-top: 2rem; }}
.scrolled {{ overflow-x: auto; margin: 0.5rem 0; }}
.chart {{ display: block; width: 100%; min-width: 640px; font: 12px system-ui, sans-serif; }}
.chart text {{ fill: var(--ink); }}
.chart text.quiet {{ fill: var(--quiet); }}
.chart text.heading {{ font-weight: 600; }}
.chart text.inside {{ fill: {INSIDE}; pointer-events: none; }}
.grid {{ stroke: var(--grid); }}
.trials {{ fill: var(--grid); fill-opacity: 0.5; }}
.bar {{ stroke: var(--ink); stroke-width: 0.7; }}
.failure {{ stroke: var(--failure); stroke-width: 3; fill: none; }}
.move {{ fill: var(--paper); stroke: var(--ink); stroke-width: 1.5; }}
.curve {{ fill: none; stroke-width: 1.8; stroke-linecap: round; stroke-linejoin: round; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; list-style: none; padding: 0; }}
.legend svg {{ width: 28px; height: 10px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding: 0.4rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.2rem 0.9rem 0.2rem 0; border-top: 1px solid var(--grid); }}
thead th {{ border-top: none; color: var(--quiet); font-weight: 600; white-space: nowrap; }}
tbody th {{ font-weight: 400; white-space: nowrap; }}
{_JOBS}
"""
