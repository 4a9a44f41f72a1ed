"""What a stash did: one documented schema."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hydra_ext import _C


@dataclass(frozen=True)
class StashReport:
    """Figures of a stash since its beginning. Bytes are bytes, times seconds.

    Attributes:
        tensors: saved by autograd; ``kept`` of them stayed as they were.
        intervals: parts of storages that the others share, ``saved_bytes`` together.
        to_host_bytes: moved, counted where they are copied; ``to_device_bytes`` likewise.
        prefetched: intervals that came back ahead of their use.
        stayed: intervals that could not leave: there was no host memory, or a transfer failed.
        waited_for_room_seconds: forward waited for others to leave.
        waited_in_backward_seconds: backward waited for what had to come back.
        held_bytes: on the device now, by the stash itself; at most ``peak_held_bytes``.
        host_bytes: on the host now.
        recomputed: calls of modules that were made again in backward, by ``hydra_ext.Recompute()``.
    """

    tensors: int
    kept: int
    intervals: int
    saved_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    prefetched: int
    stayed: int
    waited_for_room_seconds: float
    waited_in_backward_seconds: float
    held_bytes: int
    peak_held_bytes: int
    host_bytes: int
    recomputed: int

    @staticmethod
    def of(figures: _C.StashStatistics, *, recomputed: int) -> StashReport:
        return StashReport(
            tensors=figures.tensors,
            kept=figures.kept,
            intervals=figures.intervals,
            saved_bytes=figures.saved_bytes,
            to_host_bytes=figures.to_host_bytes,
            to_device_bytes=figures.to_device_bytes,
            prefetched=figures.prefetched,
            stayed=figures.stayed,
            waited_for_room_seconds=figures.wait_seconds,
            waited_in_backward_seconds=figures.backward_wait_seconds,
            held_bytes=figures.held_bytes,
            peak_held_bytes=figures.peak_held_bytes,
            host_bytes=figures.host_bytes,
            recomputed=recomputed,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        sizes = {name: _C.human_bytes(size) for name, size in self.as_dict().items() if name.endswith("_bytes")}
        return "\n".join(
            (
                f"saved    {self.tensors} tensors, {self.kept} of them kept; the others {sizes['saved_bytes']} in "
                f"{self.intervals} intervals; {self.recomputed} calls made again",
                f"moved    {sizes['to_host_bytes']} to the host, {sizes['to_device_bytes']} back "
                f"({self.prefetched} intervals ahead of time); {self.stayed} could not leave",
                f"held     {sizes['held_bytes']} on the device, at most {sizes['peak_held_bytes']}; "
                f"{sizes['host_bytes']} on the host",
                f"waited   {self.waited_for_room_seconds:.3f} s for room, {self.waited_in_backward_seconds:.3f} s in "
                "backward",
            )
        )
