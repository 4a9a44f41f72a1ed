"""What a stash did: one documented schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hydra_ext import _C


@dataclass(frozen=True)
class LayerReport:
    """A layer whose input may be stored inexactly.

    Attributes:
        weight: the name of its weight.
        forwards: that saved its input; ``samples`` of their backwards were measured.
        bound: how far off a number may come back, now; 0 as long as that is not known, and the input stored exactly.
        saved_bytes: of inputs that were compressed; to ``stored_bytes``.
        gradient_error: the norm of the error in the weight's gradient over that of the gradient, as foretold for a
            single backward by :class:`hydra_ext.Compress`'s formula; 0 as long as nothing was measured.
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
class StashReport:
    """Figures of a stash since its beginning. Bytes are bytes, times seconds.

    Attributes:
        tensors: saved by autograd; ``kept`` of them stayed as they were.
        intervals: parts of storages that the others share, ``saved_bytes`` together.
        compressed: of them, which had ``compressed_bytes`` and have become streams of ``stream_bytes``.
        layers: whose inputs may be stored inexactly, with :class:`hydra_ext.Compress`.
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

    @staticmethod
    def of(core: _C.Stash, *, recomputed: int, layers: Iterable[LayerReport], chosen: str | None) -> StashReport:
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
        lines += [f"layer    {layer}" for layer in self.layers]
        lines += [f"exact    {exact}" for exact in self.exact]
        return "\n".join(lines)
