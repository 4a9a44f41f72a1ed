"""The memory picture: what the device held over one step, by class, under the budget."""

from __future__ import annotations

from pathlib import Path

from hydra_ext import _C
from hydra_ext.runtime.run import Run

_CLASSES = (
    (_C.MemoryClass.BUFFERS, "buffers", "#9d9d9d"),
    (_C.MemoryClass.ACTIVATIONS, "activations and workspace", "#5b8def"),
    (_C.MemoryClass.GRADIENTS, "gradients on their way out", "#f2a03d"),
    (_C.MemoryClass.WEIGHTS, "weights in slots", "#3fa66b"),
)
_MIB = 2**20


def draw(run: Run, path: Path) -> None:
    """Writes the recorded timeline as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = run.core.timeline()
    moments = range(len(samples))
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
