"""Makes the pictures of the pages: ``python docs/pictures/make.py [NAME ...] [--into FOLDER]``.

Names are architecture, layers, lanes, versions, plan and fleet.

``lanes`` trains a small model on the simulated device, under a budget and over a link of a chosen speed. It draws the
trace of the shortest of six steps twice: the work of each lane (lanes.png), and the bytes on the device (budget.png).
Times depend on the machine that it runs on. ``layers`` and ``versions`` draw tables of the code, and
``plan`` a plan of the guide. ``fleet`` runs the jobs of examples/fleet_sweep.py.

It needs hydra_ext and matplotlib.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from torch import nn

import hydra_ext
from hydra_ext.cli.plan_picture import draw as draw_plan
from hydra_ext.fleet import history
from hydra_ext.fleet.reporting import bars
from hydra_ext.schedule import ActionKind

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DPI = 110
MIB = 2**20

INK, GREY, LIGHT = "#2d3436", "#9d9d9d", "#eef1f5"
BLUE, GREEN, ORANGE, RED, VIOLET = "#5b8def", "#3fa66b", "#f2a03d", "#c0392b", "#8e6bbf"
BLOCK_COLOURS = ("#5b8def", "#3fa66b", "#f2a03d", "#8e6bbf", "#e07a8b", "#4bb3c4", "#b5a642", "#8a9ba8")


_into = HERE  # the folder that pictures are written to


# ---- boxes and arrows -----------------------------------------------------------------------------------------------
def _box(
    axes: Any, x: float, y: float, width: float, height: float, title: str, text: str = "", colour: str = LIGHT
) -> None:
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor=colour, edgecolor=INK, linewidth=0.9
    )
    axes.add_patch(shape)
    middle = y + height / 2
    if text:
        axes.text(
            x + width / 2, y + height - 0.24, title, ha="center", va="center", fontsize=9.5, weight="bold", color=INK
        )
        axes.text(
            x + width / 2, middle - 0.16, text, ha="center", va="center", fontsize=7.6, color=INK, linespacing=1.3
        )
    else:
        axes.text(x + width / 2, middle, title, ha="center", va="center", fontsize=9.5, weight="bold", color=INK)


def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], label: str = "", **options: Any) -> None:
    colour = options.pop("colour", INK)
    at = options.pop("at", ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2))
    align = options.pop("align", "center")
    axes.add_patch(
        FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.1, **options)
    )
    if label:
        axes.text(*at, label, ha=align, va="center", fontsize=7.4, color=colour)


def _canvas(width: float, height: float, x: float, y: float) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.set_xlim(0, x)
    axes.set_ylim(0, y)
    axes.axis("off")
    return figure, axes


def _save(figure: Any, name: str) -> None:
    figure.savefig(_into / f"{name}.png", dpi=DPI, facecolor="white")
    pyplot.close(figure)


# ---- the parts, and transfers between them --------------------------------------------------------------------------
def architecture() -> None:
    figure, axes = _canvas(10.2, 6.3, 12.4, 7.7)
    for bottom, height, name, colour in (
        (6.15, 1.45, "the user's\nprogram", "#fbfbf6"),
        (4.0, 1.75, "Python: per step,\nper block", "#f6f9ff"),
        (1.95, 1.75, "C++: per tensor,\nper byte", "#f3faf5"),
        (0.1, 1.6, "memory", "#fdf6ee"),
    ):
        band = FancyBboxPatch((0.1, bottom), 12.2, height, boxstyle="square,pad=0", facecolor=colour, linewidth=0)
        axes.add_patch(band)
        axes.text(0.4, bottom + height / 2, name, fontsize=7.6, color=GREY, va="center", ha="center", rotation=90)
    _box(axes, 0.9, 6.35, 3.2, 1.0, "nn.Module", "forward, loss, backward")
    _box(axes, 4.9, 6.35, 3.2, 1.0, "host parameters", "the user's own, on the CPU")
    _box(axes, 8.9, 6.35, 3.2, 1.0, "optimizer", "torch.optim or hydra_ext.optim")
    _box(axes, 0.9, 4.3, 2.6, 1.15, "window", "root class, sites,\nengine wrapper")
    _box(axes, 3.77, 4.3, 2.6, 1.15, "rounds", "a fiber for\neach microbatch")
    _box(axes, 6.63, 4.3, 2.6, 1.15, "homes and spilling", "what lives on the\ndevice, on the disk")
    _box(axes, 9.5, 4.3, 2.6, 1.15, "updates", "deferred, block\nby block")
    _box(axes, 0.9, 2.25, 2.6, 1.15, "fault path", "dispatch key: absent\npages come")
    _box(axes, 3.77, 2.25, 2.6, 1.15, "pager", "blocks, slots, pins,\nnext use")
    _box(axes, 6.63, 2.25, 2.6, 1.15, "lanes", "to device, to host,\ndisk; tickets")
    _box(axes, 9.5, 2.25, 2.6, 1.15, "gradient sink, stash", "what leaves, and\nwhat comes back")
    _box(axes, 0.9, 0.35, 4.3, 1.05, "device", "slots, activations, gradients\nunder way: one budget", "#dcebdf")
    _box(axes, 6.3, 0.35, 3.1, 1.05, "host arena", "exact sizes,\npinned under CUDA", "#fbe5c8")
    _box(axes, 10.4, 0.35, 1.7, 1.05, "disk", "one unnamed\nfile", "#ecdff5")
    _arrow(axes, (2.2, 6.35), (2.2, 5.45), "calls", at=(2.3, 5.95), align="left")
    _arrow(axes, (6.0, 6.35), (3.3, 5.45), "shown as device parameters", at=(5.3, 5.95), align="left", colour=BLUE)
    _arrow(axes, (10.8, 6.35), (10.8, 5.45), "step()", at=(10.9, 5.95), align="left")
    _arrow(axes, (1.9, 4.3), (1.9, 3.4))
    _arrow(axes, (2.9, 4.3), (4.5, 3.4), "arrive, release", at=(3.1, 3.84), align="right")
    _arrow(axes, (5.07, 4.3), (5.07, 3.4), "stay_in", at=(5.17, 3.84), align="left")
    _arrow(axes, (7.6, 4.3), (6.0, 3.4), "settle", at=(6.95, 3.84), align="left")
    _arrow(axes, (10.4, 4.3), (8.6, 3.4), "before a fill", at=(9.65, 3.84), align="left")
    _arrow(axes, (3.5, 2.8), (3.77, 2.8))
    _arrow(axes, (6.37, 2.8), (6.63, 2.8))
    _arrow(axes, (9.5, 2.8), (9.23, 2.8))
    _arrow(axes, (4.4, 2.25), (3.5, 1.4), "slots", at=(4.1, 1.82), align="left")
    _arrow(axes, (7.9, 2.25), (7.9, 1.4))
    _arrow(axes, (6.3, 1.05), (5.2, 1.05), "weights", at=(5.75, 1.24), colour=GREEN)
    _arrow(axes, (5.2, 0.65), (6.3, 0.65), "gradients", at=(5.75, 0.45), colour=ORANGE)
    _arrow(axes, (10.4, 1.05), (9.4, 1.05), colour=VIOLET)
    _arrow(axes, (9.4, 0.65), (10.4, 0.65), colour=VIOLET)
    _save(figure, "architecture")


# ---- the layers of csrc, as the test has them -----------------------------------------------------------------------
def _cpp_layers() -> dict[str, tuple[str, ...]]:
    """Reads ``CPP_LAYERS`` from tests/test_architecture.py."""
    found: dict[str, Any] = {}
    for node in ast.parse((ROOT / "tests" / "test_architecture.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in ("_CORE", "CPP_LAYERS") for target in targets):
            exec(compile(ast.Module([node], []), "layers", "exec"), found)
    return dict(found["CPP_LAYERS"])


def _direct(layers: dict[str, tuple[str, ...]]) -> dict[str, set[str]]:
    """The dependencies of each layer, without those that follow from others."""
    below = {name: set(others) for name, others in layers.items()}
    return {
        name: {one for one in below[name] if not any(one in below[other] for other in below[name])} for name in below
    }


def layers() -> None:
    direct = _direct(_cpp_layers())
    floor: dict[str, int] = {}
    while len(floor) < len(direct):
        for name, others in direct.items():
            if name not in floor and others <= floor.keys():
                floor[name] = 1 + max((floor[other] for other in others), default=-1)
    order = sorted(direct, key=lambda name: name == "optim")  # otherwise another box would cover an arrow to it
    rows = [[name for name in order if floor[name] == level] for level in range(max(floor.values()) + 1)]
    figure, axes = _canvas(8.6, 5.4, 12.0, len(rows) * 1.2 + 0.1)
    places: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(rows):
        for number, name in enumerate(names):
            places[name] = (12.0 * (number + 1) / (len(names) + 1), 0.2 + level * 1.2)
    for name, others in direct.items():
        for other in others:
            begin, end = places[name], places[other]
            _arrow(axes, begin, (end[0], end[1] + 0.56), colour=GREY, zorder=1)
    for name, (x, y) in places.items():
        sees_torch = name in ("pytorch", "bindings")
        _box(axes, x - 0.85, y, 1.7, 0.56, name, colour="#dde8fb" if sees_torch else "white")
    axes.text(11.9, 0.1, "blue: may include torch", ha="right", fontsize=8, color=GREY)
    _save(figure, "layers")


# ---- one step, from a trace -----------------------------------------------------------------------------------------
class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + added


def _model(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(_Layer(width) for _ in range(layers)), nn.Linear(width, 16))


def _trace() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model(layers=8, width=512)
    optimizer = hydra_ext.optim.AdamW(model.parameters(), lr=1e-3)
    device = hydra_ext.SimulatedDevice(
        to_device_bytes_per_second=1.2e9, to_host_bytes_per_second=1.2e9, host_memory_bytes_per_second=8e9
    )
    data = [torch.randn(24, 512) for _ in range(4)]
    blocks = list(model)

    def step() -> None:
        run.step(data, lambda x: model(x).square().mean(), max_norm=1.0, round_size=4, recompute=False)

    with (
        tempfile.TemporaryDirectory() as folder,
        hydra_ext.offload(model, optimizer, budget="64MiB", device=device, blocks=blocks) as run,
    ):
        for _ in range(4):
            step()
        with run.trace(Path(folder) / "step.json"):
            for _ in range(6):
                step()
        traced: dict[str, Any] = json.loads((Path(folder) / "step.json").read_text())
    return traced


def _step(events: list[dict[str, Any]]) -> tuple[float, float]:
    """The begin and end of the shortest traced step, in microseconds."""
    step = min((event for event in events if event.get("cat") == "step"), key=lambda event: event["dur"])
    return step["ts"], step["ts"] + step["dur"]


def lanes() -> None:
    traced = _trace()
    events = traced["traceEvents"]
    _draw_lanes(events)
    _draw_budget(events, traced["otherData"]["budget_bytes"])


_ROWS = {"compute": 2, "host to device": 3, "device to host": 4, "optimizer": 5}


def _draw_lanes(events: list[dict[str, Any]]) -> None:
    begin, end = _step(events)
    figure, axes = pyplot.subplots(figsize=(10.2, 3.5), layout="constrained")
    blocks = sorted({e["args"]["block"] for e in events if e.get("ph") == "X" and "block" in e["args"]})
    colour = {block: BLOCK_COLOURS[number % len(BLOCK_COLOURS)] for number, block in enumerate(blocks)}
    for row, thread in enumerate(_ROWS.values()):
        for event in events:
            inside = event.get("ph") == "X" and event["tid"] == thread and event["ts"] < end
            if not inside or event["ts"] + event["dur"] <= begin or event["cat"] in ("step", "host"):
                continue
            left = (max(event["ts"], begin) - begin) / 1e3
            length = (min(event["ts"] + event["dur"], end) - begin) / 1e3 - left
            if event["cat"] == "pass":
                axes.barh(row - 0.46, length, left=left, height=0.08, color=INK)
                axes.text(left + 0.2, row - 0.6, event["name"].split()[0], fontsize=7, color=INK, va="bottom")
            elif event["cat"] == "wait":
                axes.barh(row, length, left=left, height=0.7, color="white", edgecolor=GREY, hatch="////", linewidth=0)
            elif event["cat"] in ("block", "copy", "update") and "block" in event["args"]:
                shade = colour[event["args"]["block"]]
                axes.barh(row, length, left=left, height=0.7, color=shade, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(_ROWS)), list(_ROWS))
    axes.set_ylim(len(_ROWS) - 0.45, -0.95)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("milliseconds from the beginning of run.step; a colour is a block", fontsize=8)
    axes.tick_params(labelsize=8, length=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(
        handles=[Patch(facecolor="white", edgecolor=GREY, hatch="////", label="compute waits")],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=7.5,
        frameon=False,
    )
    axes.set_title(
        "One run.step of four microbatches: the update of the step before runs behind the forward",
        fontsize=9,
        loc="left",
    )
    _save(figure, "lanes")


_CLASSES = (
    ("buffers", GREY),
    ("activations", BLUE),
    ("gradients", ORANGE),
    ("weights", GREEN),
    ("optimizer state", VIOLET),
)


def _draw_budget(events: list[dict[str, Any]], budget: int) -> None:
    begin, end = _step(events)
    moments = [event for event in events if event.get("ph") == "C" and begin <= event["ts"] <= end]
    held = [(name, colour) for name, colour in _CLASSES if any(moment["args"][name] for moment in moments)]
    figure, axes = pyplot.subplots(figsize=(10.2, 3.3), layout="constrained")
    axes.stackplot(
        [(moment["ts"] - begin) / 1e3 for moment in moments],
        [[moment["args"][name] / MIB for moment in moments] for name, _ in held],
        labels=[name for name, _ in held],
        colors=[colour for _, colour in held],
        step="post",
    )
    axes.axhline(budget / MIB, color=RED, linestyle="--", label="budget")
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_ylim(0, budget / MIB * 1.3)
    axes.set_xlabel("milliseconds from the beginning of run.step", fontsize=8)
    axes.set_ylabel("device memory, MiB", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(loc="upper right", ncols=len(held) + 1, fontsize=7.5, frameon=False)
    axes.set_title("What the device holds over the same step, as each block is reached", fontsize=9, loc="left")
    _save(figure, "budget")


# ---- versions of weights --------------------------------------------------------------------------------------------
def versions() -> None:
    schedule = hydra_ext.schedule.make("2bw", stages=3, microbatches=4)
    simulated = schedule.simulate(batches=4, forward=1.0, backward=2.0, update=0.4)
    colours = (GREY, BLUE, GREEN, ORANGE, VIOLET)
    figure, axes = pyplot.subplots(figsize=(10.2, 3.9), layout="constrained")
    for timed in simulated.actions:
        action, length = timed.action, timed.end - timed.start
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            version = schedule.version_of(action.stage, action.batch)
            backward = action.kind == ActionKind.BACKWARD
            axes.barh(
                timed.rank,
                length,
                left=timed.start,
                height=0.5,
                color=colours[version % len(colours)],
                alpha=1.0 if backward else 0.55,
                edgecolor="white",
                linewidth=0.8,
            )
            number = action.batch * schedule.microbatches + action.microbatch
            axes.text(
                timed.start + length / 2,
                timed.rank,
                str(number),
                ha="center",
                va="center",
                fontsize=6.5,
                color="white" if backward else INK,
            )
    for stage in range(schedule.stages):
        _draw_buffers(axes, schedule, simulated, stage, colours)
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.set_ylim(schedule.stages - 0.35, -0.45)
    axes.set_xlim(0, simulated.makespan)
    axes.set_xlabel("time, in forwards of one microbatch; below each stage its two buffers", fontsize=8)
    axes.tick_params(labelsize=8, length=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    used = range(4)
    figure.legend(
        handles=[Patch(facecolor=colours[v % len(colours)], label=f"W({v})") for v in (*used, 4)],
        loc="outside upper right",
        ncols=5,
        fontsize=7.5,
        frameon=False,
    )
    axes.set_title(
        "2BW, 3 stages, 4 microbatches a batch: pale a forward, full a backward, in the colour of its weights",
        fontsize=9,
        loc="left",
    )
    _save(figure, "versions")


def _draw_buffers(axes: Any, schedule: Any, simulated: Any, stage: int, colours: tuple[str, ...]) -> None:
    """Draws the buffers of a stage: each has one version until the update that overwrites it begins."""
    begins, ends = (
        [timed for timed in simulated.actions if (timed.action.kind, timed.action.stage) == (kind, stage)]
        for kind in (ActionKind.BEGIN_UPDATE, ActionKind.UPDATE)
    )
    count = schedule.versions[stage]
    made = [0.0, *(timed.end for timed in ends)]
    for version, begin in enumerate(made):
        over = version + count - 1  # the number of the update that overwrites it
        end = begins[over].start if over < len(begins) else simulated.makespan
        top = stage + 0.3 + 0.12 * (version % count)
        axes.barh(top, end - begin, left=begin, height=0.1, color=colours[version % len(colours)], align="edge")


# ---- a plan ---------------------------------------------------------------------------------------------------------
def plan() -> None:
    """Of the model in docs/guide/does-my-model-fit.md."""
    with torch.device("meta"):
        wide = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(24)])
    microbatch = torch.empty(8192, 4096, device="meta")
    found = hydra_ext.plan.fit(wide, microbatch, lambda x: wide(x).square().mean(), device="rtx4090-24", budget="5GiB")
    draw_plan(found, _into / "plan.png")


# ---- a fleet --------------------------------------------------------------------------------------------------------
def fleet() -> None:
    """Of the jobs of examples/fleet_sweep.py: what was planned first, and what happened."""
    sys.path.insert(0, str(ROOT / "examples"))
    sweep = importlib.import_module("fleet_sweep")
    with tempfile.TemporaryDirectory() as folder:
        hydra_ext.Fleet(folder, devices=2, budget=sweep.BUDGET).run(sweep.jobs())
        past = history.load(Path(folder))
    panels = {"planned at first": bars.planned(past), "what happened": bars.real(past)}
    rows = bars.rows(past, [bar for panel in panels.values() for bar in panel])
    jobs = list(past.jobs)
    figure, both = pyplot.subplots(2, sharex=True, figsize=(10.2, 3.2), layout="constrained")
    for axes, (heading, panel) in zip(both, panels.items(), strict=True):
        axes.barh(range(len(rows)), past.plans[0].at, height=1.0, color=LIGHT)
        axes.text(past.plans[0].at / 2, (len(rows) - 1) / 2, "trials", ha="center", va="center", fontsize=8, color=GREY)
        for bar in panel:
            _draw_stretch(axes, rows.index(bar.row), bar, BLOCK_COLOURS[jobs.index(bar.job)])
        axes.set_yticks(range(len(rows)), [f"{node}:{device}" for node, device in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(labelsize=8, length=2)
        axes.set_title(heading, fontsize=9, loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    axes.set_xlim(0, max(bar.end for panel in panels.values() for bar in panel) * 1.01)
    axes.set_xlabel("seconds from the fleet's beginning", fontsize=8)
    figure.legend(
        handles=[Patch(facecolor=BLOCK_COLOURS[number], label=job) for number, job in enumerate(jobs)],
        loc="outside lower center",
        ncols=3,
        fontsize=7.5,
        frameon=False,
    )
    _save(figure, "fleet")


def _draw_stretch(axes: Any, row: int, bar: bars.Bar, colour: str) -> None:
    axes.barh(row, bar.end - bar.start, left=bar.start, height=0.72, color=colour, edgecolor="white", linewidth=0.8)
    if bar.failure is not None:
        axes.plot(bar.end, row, marker="x", color=RED, markersize=7)


PICTURES = {
    "architecture": architecture,
    "layers": layers,
    "lanes": lanes,
    "versions": versions,
    "plan": plan,
    "fleet": fleet,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; all unless given")
    parser.add_argument("--into", type=Path, default=HERE, metavar="FOLDER", help="docs/pictures unless given")
    given = parser.parse_args()
    global _into
    _into = given.into
    for name in given.names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
