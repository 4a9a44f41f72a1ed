"""What a planned step holds on the device, segment by segment, and of activations on the host.

The formulas are those of ``csrc/plan/step_simulation.h``, which gives the largest sum and not its terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hydra_ext import _C
from hydra_ext.plan.segments import Segment

_AGAIN = (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)


class Treatment(Protocol):
    """How a step runs: the planner's answer has it, and so has a copy of it."""

    @property
    def options(self) -> Sequence[_C.ActivationOption]: ...

    @property
    def round_size(self) -> int: ...

    @property
    def stash_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Device bytes at the neediest moment of a segment's forward or backward.

    Weights that stay only because there is room do not count.

    Attributes:
        segment: The module.
        way: ``forward`` or ``backward``.
        buffers: Of the model.
        stash: Room for activations on their way.
        kept: Activations that stay until backward reads them. What several segments keep counts once, as far as it was
            saved first by a segment until this one, or outside of the segments.
        weights: Of the segment; with rounds of 1, of its largest block.
        in_use: Activations that are alive in the segment, of all microbatches of the round.
        gradients: Of parameters, until they are summed; with larger rounds all of the segment's, if these are more.
    """

    segment: str
    way: str
    buffers: int
    stash: int
    kept: int
    weights: int
    in_use: int
    gradients: int

    @property
    def total(self) -> int:
        return self.buffers + self.stash + self.kept + self.weights + self.in_use + self.gradients


def memory_of(segments: Sequence[Segment], found: Treatment, buffer_bytes: int) -> tuple[MemoryPoint, ...]:
    """A round's forward, then its backward."""
    forward = [*_points(segments, found, buffer_bytes, "forward")]
    backward = [*_points(segments, found, buffer_bytes, "backward")]
    return (*forward, *reversed(backward))


def _points(segments: Sequence[Segment], found: Treatment, buffer_bytes: int, way: str) -> Iterator[MemoryPoint]:
    size = found.round_size
    for segment, option, kept in zip(segments, found.options, _kept_until(segments, found.options), strict=True):
        in_use, gradients = segment.figures.forward_bytes, 0
        if way == "backward":
            in_use, gradients = segment.figures.backward_bytes, segment.live_gradient_bytes
            gradients = max(gradients, segment.gradient_bytes) if size > 1 else gradients
            if option in _AGAIN:
                again = segment.again_bytes
                in_use = max(segment.figures.forward_bytes, in_use) + again
        yield MemoryPoint(
            segment=segment.name or "(the model)",
            way=way,
            buffers=buffer_bytes,
            stash=found.stash_bytes,
            kept=size * kept,
            weights=segment.weight_bytes if size > 1 else segment.slot_bytes,
            in_use=in_use + (size - 1) * segment.figures.parked_bytes,
            gradients=gradients,
        )


def moved_bytes(segments: Sequence[Segment], found: _C.ActivationPlan) -> int:
    """Activations of a round that are on the host at once."""
    options = zip(segments, found.options, strict=True)
    return found.round_size * sum(moved_of(segment, option) for segment, option in options)


def moved_of(segment: Segment, option: _C.ActivationOption) -> int:
    """Bytes of one microbatch that leave and come back."""
    if option == _C.ActivationOption.OFFLOAD:
        return segment.figures.saved.fresh
    if option == _C.ActivationOption.COMPRESS and segment.freedom.coding is not None:
        return segment.freedom.coding.stream_bytes
    return segment.figures.inputs.fresh if option == _C.ActivationOption.RECOMPUTE_OFFLOADED else 0


def _kept_until(segments: Sequence[Segment], options: Sequence[_C.ActivationOption]) -> Iterator[int]:
    """Bytes of one microbatch that the segments until each one keep together."""
    *_, outside = segments
    kept, most = 0, outside.figures.saved.fresh
    for number, (segment, option) in enumerate(zip(segments, options, strict=True), 1):
        own = _kept(segment, option)
        most += segment.figures.saved.fresh if number < len(segments) else 0
        most += own if option == _C.ActivationOption.RECOMPUTE else 0
        kept = min(kept + own, most)
        yield kept


def _kept(segment: Segment, option: _C.ActivationOption) -> int:
    """Bytes of one microbatch that stay."""
    if option == _C.ActivationOption.KEEP:
        return max(segment.figures.saved.fresh, segment.figures.saved.all)
    if option == _C.ActivationOption.RECOMPUTE:
        return max(segment.figures.inputs.fresh, segment.figures.inputs.all)
    return 0
