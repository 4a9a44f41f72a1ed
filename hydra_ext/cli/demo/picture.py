"""The memory picture: device bytes over one step, by class, under the budget.

If saved tensors have policies, a second panel shows by block how many bytes were kept, moved or compressed, and the
ratio of compression.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra_ext import _C
from hydra_ext.activations.report import PartReport
from hydra_ext.runtime.run import Run

_CLASSES = (
    (_C.MemoryClass.BUFFERS, "buffers", "#9d9d9d"),
    (_C.MemoryClass.ACTIVATIONS, "activations and workspace", "#5b8def"),
    (_C.MemoryClass.GRADIENTS, "gradients on their way out", "#f2a03d"),
    (_C.MemoryClass.WEIGHTS, "weights in slots", "#3fa66b"),
)
_FATES = (
    ("kept", "kept", "#9d9d9d"),
    ("stayed", "moved only if there is no room", "#c9d8f5"),
    ("moved", "moved to the host", "#5b8def"),
    ("stored", "after compression", "#f2a03d"),
)
_MIB = 2**20


def draw(run: Run, path: Path) -> None:
    """Writes the recorded timeline as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    activations = run.report().activations
    parts = [] if activations is None else [part for part in activations.parts if _saved(part)]
    rows = 2 if parts else 1
    figure, panels = pyplot.subplots(rows, figsize=(10, 4.5 * rows), layout="constrained", squeeze=False)
    _draw_timeline(run, panels[0, 0])
    if parts:
        _draw_parts(parts, panels[1, 0])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_timeline(run: Run, axes: Any) -> None:
    samples = run.core.arrivals.timeline.samples()
    moments = range(len(samples))
    axes.stackplot(
        moments,
        [[sample.bytes(cls) / _MIB for sample in samples] for cls, _, _ in _CLASSES],
        labels=[label for _, label, _ in _CLASSES],
        colors=[colour for _, _, colour in _CLASSES],
        step="post",
    )
    axes.axhline(run.budget / _MIB, color="#c0392b", linestyle="--", label="budget")
    turn = next((i for i, sample in enumerate(samples) if sample.kind == _C.PassKind.BACKWARD), None)
    if turn is not None:
        axes.axvline(turn, color="black", linewidth=0.8, label="backward begins")
    axes.set_xlabel("blocks in the order they are reached, forward then backward")
    axes.set_ylabel("device memory, MiB")
    axes.set_title("One training step under a budget")
    axes.set_xlim(0, max(len(samples) - 1, 1))
    axes.set_ylim(0, run.budget / _MIB * 1.3)
    axes.legend(loc="upper right", ncols=3, fontsize="small")


def _draw_parts(parts: list[PartReport], axes: Any) -> None:
    bottoms = [0.0] * len(parts)
    places = range(len(parts))
    for attribute, label, colour in _FATES:
        heights = [getattr(part, attribute) / _MIB for part in parts]
        axes.bar(places, heights, bottom=bottoms, label=label, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    freed = [(part.compressed - part.stored) / _MIB for part in parts]
    axes.bar(places, freed, bottom=bottoms, label="before compression", color="none", edgecolor="#f2a03d", hatch="//")
    for place, part, bottom, height in zip(places, parts, bottoms, freed, strict=True):
        if part.compressed:
            axes.annotate(f"{part.ratio:.1f}x", (place, bottom + height), ha="center", va="bottom", fontsize="small")
    axes.set_xticks(places, [part.name or "elsewhere" for part in parts], rotation=45, ha="right", fontsize="small")
    axes.set_ylabel("saved in all steps, MiB")
    axes.set_title("Tensors saved for backward, by block")
    axes.legend(loc="upper right", ncols=3, fontsize="small")
    axes.margins(y=0.25)


def _saved(part: PartReport) -> int:
    return part.kept + part.stayed + part.moved + part.compressed
