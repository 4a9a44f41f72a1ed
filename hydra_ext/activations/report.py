"""Figures of a stash, in one documented schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra_ext import _C

_MOST_LINES = 4  # entries of ``exact`` in the text


@dataclass(frozen=True)
class LayerReport:
    """A layer whose input may be stored inexactly.

    Attributes:
        weight: Name of the layer's weight.
        forwards: Number of forwards that saved the layer's input.
        samples: Number of their backwards that were measured.
        bound: Largest error of a decoded number now. 0 while it is unknown; the input is stored exactly until then.
        saved_bytes: Bytes of the inputs that were compressed.
        stored_bytes: Bytes of the streams that they became.
        gradient_error: Norm of the error of the weight's gradient over the norm of the gradient, in a single backward.
            Predicted by the formula of :class:`hydra_ext.Compress`, for bounds that are small against the input. 0
            while nothing was measured or compressed.
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
        """Bytes of the compressed inputs over the bytes of their streams; 1 if none was compressed."""
        return self.saved_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        return (
            f"{self.weight}: bound {self.bound:.3g}, {self.ratio:.1f} times smaller "
            f"({_C.human_bytes(self.saved_bytes)}), gradient error {self.gradient_error:.2%} "
            f"(measured {self.samples} times in {self.forwards} forwards)"
        )


@dataclass(frozen=True)
class ExactReport:
    """Saved tensors that are stored exactly although their module's policy is :class:`hydra_ext.Compress`.

    Attributes:
        operator: Operator that saved them and needs them exactly.
        intervals: Number of intervals.
        bytes: Bytes of these intervals.
    """

    operator: str
    intervals: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.operator}: {_C.human_bytes(self.bytes)} in {self.intervals} intervals"


@dataclass(frozen=True)
class PartReport:
    """Saved tensors of one part of the model, by where they were stored.

    All figures but the name are bytes. Memory that tensors share counts once, except in ``kept``. Except in ``kept``,
    an interval counts when backward needs it no more.

    Attributes:
        name: Name of the module; "" for tensors saved outside all parts.
        kept: Bytes of tensors with the policy :class:`hydra_ext.Keep`.
        stayed: Bytes that stayed on the device as they were: there was room, or the policy moves only the inputs of
            convolutions.
        moved: Bytes that were moved to the host as they were.
        compressed: Bytes that were compressed, as they were before.
        stored: Bytes of the streams that they became.
    """

    name: str
    kept: int
    stayed: int
    moved: int
    compressed: int
    stored: int

    @property
    def ratio(self) -> float:
        """Compressed bytes over the bytes of their streams; 1 if nothing was compressed."""
        return self.compressed / self.stored if self.stored else 1.0


@dataclass(frozen=True)
class CopiesReport:
    """Where intervals are that have left the device.

    Attributes:
        peak_host_bytes: Most bytes of host memory at one time, with memory kept for next copies and on the way to the
            disk.
        disk_bytes: Bytes on the disk now.
        disk_written_bytes: Bytes written to the disk.
        disk_read_bytes: Bytes read from the disk.
    """

    peak_host_bytes: int
    disk_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int

    def __str__(self) -> str:
        sizes = {name: _C.human_bytes(size) for name, size in asdict(self).items()}
        disk = f"; {sizes['disk_bytes']} on the disk, {sizes['disk_written_bytes']} written"
        return f"at most {sizes['peak_host_bytes']}{disk if self.disk_written_bytes else ''}"


@dataclass(frozen=True)
class StashReport:
    """Time, byte and event counts of a stash since it was made.

    Attributes:
        tensors: Number of tensors that autograd has saved in the stash.
        kept: Number of these tensors that stayed as they were, by policy or because the stash cannot move them.
        intervals: Number of intervals of storages that the other tensors occupy.
        saved_bytes: Bytes of these intervals.
        compressed: Number of these intervals that were compressed.
        compressed_bytes: Bytes of the compressed intervals, as they were before.
        stream_bytes: Bytes of the streams that they became.
        to_host_bytes: Bytes copied to the host.
        to_device_bytes: Bytes copied back to the device.
        prefetched: Number of intervals that returned ahead of their use.
        stayed: Number of intervals that could not leave, because host memory was missing or a transfer failed.
        waited_for_room_seconds: Seconds in which forwards waited for intervals to leave the device.
        waited_in_backward_seconds: Seconds in which backwards waited for intervals to return.
        held_bytes: Bytes of intervals on the device now, without ``resident_bytes``.
        peak_held_bytes: Largest value of ``held_bytes``.
        resident_bytes: Bytes of intervals on the device now that ``Offload("conv")`` leaves there.
        host_bytes: Bytes of host memory in use now.
        copies: Where intervals are that have left the device.
        recomputed: Number of calls that ``hydra_ext.Recompute()`` has repeated in backward.
        chosen: Choice of ``Offload("dynamic")``: "keep", "conv" or "all". None while it tries, and with other policies.
        layers: Layers whose inputs may be stored inexactly under :class:`hydra_ext.Compress`.
        exact: Intervals stored exactly under that policy, by operator; each counts when backward needs it no more.
        parts: Saved tensors by part of the model. Parts are the elements of the model's lists of layers, and the
            modules beside such lists.
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
    copies: CopiesReport
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
        figures, copies = core.statistics(), core.copies()
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
            copies=CopiesReport(
                peak_host_bytes=copies.peak_host_bytes,
                disk_bytes=copies.disk_bytes,
                disk_written_bytes=copies.written_bytes,
                disk_read_bytes=copies.read_bytes,
            ),
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
            f"{sizes['host_bytes']} on the host, {self.copies}",
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
    """The parts by name; several numbers may have one."""
    sums: dict[str, list[int]] = {}
    for number, part in sorted(found.items()):
        figures = part.kept, part.stayed, part.moved, part.encoded, part.streams
        name = names[number] if number >= 0 else ""
        sums[name] = [before + now for before, now in zip(sums.get(name, [0] * len(figures)), figures, strict=True)]
    for name, summed in sums.items():
        yield PartReport(name, *summed)
