"""The report of a fleet: one page of HTML that needs nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from hydra_ext.errors import TraceFileError
from hydra_ext.fleet import history
from hydra_ext.fleet.history import History, Move
from hydra_ext.fleet.reporting import bars, charts, status
from hydra_ext.fleet.reporting.palette import STYLE
from hydra_ext.fleet.reporting.status import FleetStatus, duration
from hydra_ext.fleet.results import Results, text_of

_STRETCHES = ("job", "technique", "where", "from, s", "to, s", "steps by its end", "failure")
_MEASURED = ("technique", "devices", "s/step", "s to open", "s to save", "its numbers", "why not")


def write(folder: Path, path: str | os.PathLike[str]) -> None:
    """Writes the report of the fleet in a folder. It may be running, or have been killed.

    Raises:
        JournalError: The folder holds no fleet, or its journal is damaged.
        TraceFileError: The file cannot be written.
    """
    runs = status.is_running(folder)
    past = history.load(folder, now=time.time() if runs else None)
    text = page_of(past, status.of(past, folder, runs=runs))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceFileError(
            f"the report cannot be written to '{os.fspath(path)}': {error.strerror or error}; give a path in a folder "
            "that exists and may be written to"
        ) from error


def page_of(past: History, now: FleetStatus) -> str:
    """The whole page."""
    results = history.results(past)
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", name="color-scheme", content="light dark")
    SubElement(head, "title").text = f"Fleet {Path(now.folder).name}"
    SubElement(head, "style").text = STYLE
    main = SubElement(SubElement(html, "body"), "main")
    SubElement(main, "h1").text = f"Fleet {Path(now.folder).name}"
    _paragraph(main, now.summary() + ".")
    _add_gantt(main, past)
    _add_losses(main, results)
    _add_results(main, results)
    _add_measured(main, past)
    return "<!DOCTYPE html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


# ---- sections -------------------------------------------------------------------------------------------------------
def _add_gantt(main: Element, past: History) -> None:
    section = _section(main, "Plan and reality")
    planned, real = bars.planned(past), bars.real(past)
    if not planned and not real:
        _paragraph(section, "Nothing is planned yet: the trials have not ended.")
        return
    marks = bars.moves(past)
    description = _told(past)
    end = max(bar.end for bar in (*planned, *real))
    rows = bars.rows(past, [*planned, *real])
    panels = {"planned at first": planned, "what happened": real}
    trials = past.plans[0].at if past.plans else 0.0
    chart = charts.gantt(list(past.jobs), rows, panels, marks, seconds=end, trials=trials, description=description)
    _scrolled(section, "Jobs by device and time").append(chart)
    legend = SubElement(section, "ul", {"class": "legend"})
    for name in past.jobs:
        colour = charts.colour_of(list(past.jobs), name)
        SubElement(_legend_item(legend, name), "rect", {"width": "28", "height": "10", "class": f"fill{colour}"})
    _paragraph(section, description)
    _paragraph(
        section,
        "A bar is a job on one device. A cross is a failure, a diamond is where a job was asked to go on in another "
        "way. The tables have the same in words.",
    )
    _add_stretches(section, past)


def _told(past: History) -> str:
    """Plan and reality in words."""
    stretches = [stretch for job in past.jobs.values() for stretch in job.stretches]
    failures = sum(stretch.failure is not None for stretch in stretches)
    moves = sum(len(job.moves) for job in past.jobs.values())
    found = f"In reality, after {duration(past.seconds)}: {len(stretches)} stretches of {len(past.jobs)} jobs, "
    found += f"{failures} ended by a failure, {moves} moves, {len(past.plans)} plans."
    if not past.plans:
        return found
    first = past.plans[0]
    return (
        f"Planned at first: {len(first.jobs)} jobs, whose last one ends after {duration(first.end)}. The plan was made "
        f"after {duration(first.at)}; the trials ran until then. {found}"
    )


def _add_stretches(section: Element, past: History) -> None:
    planned = [
        (name, job.technique, f"{job.devices} of {job.node}", _number(job.start), _number(job.end), "", "")
        for plan in past.plans[:1]
        for name, job in sorted(plan.jobs.items(), key=lambda item: (item[1].start, item[0]))
    ]
    real = [
        (
            name,
            stretch.technique,
            f"{stretch.node}:{','.join(map(str, stretch.devices))}",
            _number(stretch.start),
            _number(stretch.end),
            str(stretch.steps),
            stretch.failure or "",
        )
        for name, job in past.jobs.items()
        for stretch in job.stretches
    ]
    details = SubElement(section, "details")
    SubElement(details, "summary").text = "Plan and reality in words"
    _table(details, "Planned at first", _STRETCHES, planned)
    _table(details, "What happened", _STRETCHES, sorted(real, key=lambda row: (float(row[3]), row[0])))
    moves = [(name, _number(move.at), _goal(move)) for name, job in past.jobs.items() for move in job.moves]
    if moves:
        _table(details, "Moves", ("job", "after, s", "goes on with"), moves)


def _goal(move: Move) -> str:
    return f"{move.technique} on {move.devices}"


def _add_losses(main: Element, results: Results) -> None:
    section = _section(main, "Losses")
    losses = {name: job.losses for name, job in results.items()}
    if not any(losses.values()):
        _paragraph(section, "No step has been made yet.")
        return
    ends = [f"{name} from {text_of(own[min(own)])} to {text_of(own[max(own)])}" for name, own in losses.items() if own]
    chart = charts.curves(losses, description="Losses: " + "; ".join(ends) + ".")
    _scrolled(section, "Loss by step").append(chart)
    lasts = {name: text_of(own[max(own)]) if own else "no step yet" for name, own in losses.items()}
    legend = SubElement(section, "ul", {"class": "legend"})
    for name, last in lasts.items():
        sample = _legend_item(legend, f"{name}: {last}")
        colour = charts.colour_of(list(losses), name)
        line = SubElement(sample, "path", {"d": "M1 5h26", "class": f"curve line{colour}"})
        dashes = charts.dashes_of(list(losses), name)
        if dashes:
            line.set("stroke-dasharray", dashes)


def _legend_item(legend: Element, text: str) -> Element:
    """Adds an item of a legend; returns the picture for its sample."""
    item = SubElement(legend, "li")
    sample = SubElement(item, "svg", {"viewBox": "0 0 28 10", "aria-hidden": "true"})
    sample.tail = f" {text}"
    return sample


def _add_results(main: Element, results: Results) -> None:
    section = _section(main, "Results")
    rows = [[text_of(value) for value in row.values()] for row in results.rows()]
    _table(section, "Jobs, the best first", list(results.rows()[0]), rows)


def _add_measured(main: Element, past: History) -> None:
    section = _section(main, "What the trials measured")
    if not past.measured:
        _paragraph(section, "The trials have not ended.")
    for measured in past.measured.values():
        names = [name for name in past.jobs if past.measured_of(name) is measured]
        rows = [
            (
                option.name,
                str(option.devices),
                _number(option.step_s),
                _number(option.open_s),
                _number(option.save_s),
                option.bound or "those of the plain loop",
                "",
            )
            for option in measured.options
        ]
        for label, reason in measured.refused.items():
            technique, _, devices = label.rpartition(" on ")
            rows.append((technique, devices, "", "", "", "", reason))
        _table(section, f"Of {', '.join(names)}", _MEASURED, rows)


# ---- parts ----------------------------------------------------------------------------------------------------------
def _section(main: Element, heading: str) -> Element:
    section = SubElement(main, "section")
    SubElement(section, "h2").text = heading
    return section


def _paragraph(parent: Element, text: str) -> None:
    SubElement(parent, "p").text = text


def _scrolled(parent: Element, label: str) -> Element:
    """A box that scrolls if it is too wide, also by keys."""
    return SubElement(parent, "div", {"class": "scrolled", "tabindex": "0", "role": "region", "aria-label": label})


def _table(parent: Element, caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = SubElement(_scrolled(parent, caption), "table")
    SubElement(table, "caption").text = caption
    head = SubElement(SubElement(table, "thead"), "tr")
    for column in columns:
        SubElement(head, "th", scope="col").text = column
    body = SubElement(table, "tbody")
    for row in rows:
        line = SubElement(body, "tr")
        SubElement(line, "th", scope="row").text = row[0]
        for cell in row[1:]:
            SubElement(line, "td").text = cell


def _number(value: float) -> str:
    return f"{value:.4g}"
