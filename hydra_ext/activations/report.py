"""What a stash did: one documented schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra_ext import _C

_MOST_LINES = 4  # of what may be many


@dataclass(frozen=True)
class LayerReport:
    """A layer whose input may be stored inexactly.

    Attributes:
        weight: the name of its weight.
        forwards: that saved its input; ``samples`` of their backwards were measured.
        bound: how far off a number may come back, now; 0 as long as that is not known, and the input stored exactly.
        saved_bytes: of inputs that were compressed; to ``stored_bytes``.
        gradient_error: the norm of the error in the weight's gradient over that of the gradient, as foretold for a
            single backward by :class:`hydra_ext.Compress`'s formula, for bounds that are small against the input; 0 as
            long as nothing was measured, or compressed.
    """

    weight: str
    forwards: int
    samples: int
    bound: float
    saved_bytes: int
    stored_bytes: int
    gradient_error: float

    @property
    def ratio(self) -> float:
        """How many times smaller inputs became; 1 if none was compressed."""
        return self.saved_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        return (
            f"{self.weight}: bound {self.bound:.3g}, {self.ratio:.1f} times smaller "
            f"({_C.human_bytes(self.saved_bytes)}), gradient error {self.gradient_error:.2%} "
            f"(measured {self.samples} times in {self.forwards} forwards)"
        )


@dataclass(frozen=True)
class ExactReport:
    """What was stored exactly although its module's policy is :class:`hydra_ext.Compress`.

    Attributes:
        operator: that saved it and needs it so.
    """

    operator: str
    intervals: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.operator}: {_C.human_bytes(self.bytes)} in {self.intervals} intervals"


@dataclass(frozen=True)
class PartReport:
    """What became of what a part of the model saved, as far as it has been used; in bytes of the tensors.

    Attributes:
        name: of the module; "" for what was saved outside of all of them.
        kept: by :class:`hydra_ext.Keep`, and not counted once where tensors share memory, as the others are.
        stayed: on the device, as it was: there was room, or a policy that moves convolutions' inputs alone.
        moved: to the host, as it was.
        compressed: to ``stored`` bytes.
    """

    name: str
    kept: int
    stayed: int
    moved: int
    compressed: int
    stored: int

    @property
    def ratio(self) -> float:
        """How many times smaller became what was compressed; 1 if nothing was."""
        return self.compressed / self.stored if self.stored else 1.0


@dataclass(frozen=True)
class StashReport:
    """Figures of a stash since its beginning. Bytes are bytes, times seconds.

    Attributes:
        tensors: saved by autograd; ``kept`` of them stayed as they were.
        intervals: parts of storages that the others share, ``saved_bytes`` together.
        compressed: of them, which had ``compressed_bytes`` and have become streams of ``stream_bytes``.
        layers: whose inputs may be stored inexactly, with :class:`hydra_ext.Compress`.
        parts: what became of it by part of the model: the layers that it is a list of, and what stands beside them.
        exact: what was stored exactly under that policy, by operator, as far as it has been used.
        to_host_bytes: moved, counted where they are copied; ``to_device_bytes`` likewise.
        prefetched: intervals that came back ahead of their use.
        stayed: intervals that could not leave: there was no host memory, or a transfer failed.
        waited_for_room_seconds: forward waited for others to leave.
        waited_in_backward_seconds: backward waited for what had to come back.
        held_bytes: on the device now, by the stash itself; at most ``peak_held_bytes``.
        resident_bytes: on the device now, which are not to leave by ``Offload("conv")``; not among the held ones.
        host_bytes: on the host now.
        recomputed: calls of modules that were made again in backward, by ``hydra_ext.Recompute()``.
        chosen: by ``Offload("dynamic")``: "keep", "conv" or "all"; None while it tries, and with other policies.
    """

    tensors: int
    kept: int
    intervals: int
    saved_bytes: int
    compressed: int
    compressed_bytes: int
    stream_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    prefetched: int
    stayed: int
    waited_for_room_seconds: float
    waited_in_backward_seconds: float
    held_bytes: int
    peak_held_bytes: int
    resident_bytes: int
    host_bytes: int
    recomputed: int
    chosen: str | None = None
    layers: tuple[LayerReport, ...] = ()
    exact: tuple[ExactReport, ...] = ()
    parts: tuple[PartReport, ...] = ()

    @staticmethod
    def of(
        core: _C.Stash,
        *,
        recomputed: int,
        layers: Iterable[LayerReport],
        chosen: str | None,
        names: Sequence[str],
    ) -> StashReport:
        figures = core.statistics()
        return StashReport(
            tensors=figures.tensors,
            kept=figures.kept,
            intervals=figures.intervals,
            saved_bytes=figures.saved_bytes,
            compressed=figures.encoded,
            compressed_bytes=figures.encoded_bytes,
            stream_bytes=figures.stream_bytes,
            to_host_bytes=figures.to_host_bytes,
            to_device_bytes=figures.to_device_bytes,
            prefetched=figures.prefetched,
            stayed=figures.stayed,
            waited_for_room_seconds=figures.wait_seconds,
            waited_in_backward_seconds=figures.backward_wait_seconds,
            held_bytes=figures.held_bytes,
            peak_held_bytes=figures.peak_held_bytes,
            resident_bytes=figures.resident_bytes,
            host_bytes=figures.host_bytes,
            recomputed=recomputed,
            chosen=chosen,
            layers=tuple(layers),
            exact=tuple(ExactReport(operator, *counted) for operator, counted in core.exact().items()),
            parts=tuple(_parts(core.parts(), names)),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        sizes = {name: _C.human_bytes(size) for name, size in self.as_dict().items() if name.endswith("_bytes")}
        lines = [
            f"saved    {self.tensors} tensors, {self.kept} of them kept; the others {sizes['saved_bytes']} in "
            f"{self.intervals} intervals; {self.recomputed} calls made again",
            f"moved    {sizes['to_host_bytes']} to the host, {sizes['to_device_bytes']} back "
            f"({self.prefetched} intervals ahead of time); {self.stayed} could not leave",
            f"held     {sizes['held_bytes']} on the device, at most {sizes['peak_held_bytes']}; "
            f"{sizes['host_bytes']} on the host",
            f"waited   {self.waited_for_room_seconds:.3f} s for room, {self.waited_in_backward_seconds:.3f} s in "
            "backward",
        ]
        if self.chosen is not None:
            lines.append(f"chosen   {self.chosen}")
        if self.compressed:
            lines.append(
                f"packed   {self.compressed} intervals of {sizes['compressed_bytes']} into {sizes['stream_bytes']}, "
                f"{self.compressed_bytes / self.stream_bytes:.1f} times smaller"
            )
        smaller = [layer for layer in self.layers if layer.saved_bytes]
        if smaller:
            ratios = [layer.ratio for layer in smaller]
            error = max(layer.gradient_error for layer in smaller)
            lines.append(
                f"layers   {len(smaller)} of {len(self.layers)}, whose inputs became {min(ratios):.1f} to "
                f"{max(ratios):.1f} times smaller; errors of their gradients at most {error:.2%}"
            )
        largest = sorted(self.exact, key=lambda exact: -exact.bytes)[:_MOST_LINES]
        if largest:
            lines.append("exact    " + "; ".join(map(str, largest)))
        return "\n".join(lines)


def _parts(found: Mapping[int, _C.StashPart], names: Sequence[str]) -> Iterator[PartReport]:
    for number, part in sorted(found.items()):
        name = names[number] if number >= 0 else ""
        yield PartReport(name, part.kept, part.stayed, part.moved, part.encoded, part.streams)
