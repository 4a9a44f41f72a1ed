"""A model's segments, as the planner of activations takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_ext import _C
from hydra_ext.profile import ModuleFigures, Profile

_LEAST_GAIN = 1.5  # a segment that saves less than this many times its inputs is not worth a second forward
_LEAST_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One microbatch of modules that run in one piece.

    Attributes:
        figures: Of a module that stands for all of them, or of a group of children of an ``nn.Sequential``.
        backward_seconds: Time of its backward, without waits and without a second forward.
        weight_bytes: Of all its blocks.
        slot_bytes: Of the largest one.
        live_gradient_bytes: What gradients of weights add to the most that its backward has in use, each until it is
            summed.
        gradient_bytes: Of its weights, those of blocks in earlier segments excepted.
        recompute: Where it may run again in backward.
    """

    figures: ModuleFigures
    backward_seconds: float
    weight_bytes: int
    slot_bytes: int
    live_gradient_bytes: int
    gradient_bytes: int
    recompute: _C.RecomputeScope = _C.RecomputeScope.NEVER

    @property
    def name(self) -> str:
        return self.figures.name

    def core(self) -> _C.ActivationSegment:
        """The same for the planner."""
        figures = self.figures
        return _C.ActivationSegment(
            forward_seconds=figures.forward_seconds,
            backward_seconds=self.backward_seconds,
            saved_fresh=figures.saved.fresh,
            saved_all=figures.saved.all,
            inputs_fresh=figures.inputs.fresh,
            inputs_all=figures.inputs.all,
            parked_bytes=figures.parked_bytes,
            forward_bytes=figures.forward_bytes,
            backward_bytes=figures.backward_bytes,
            live_gradient_bytes=self.live_gradient_bytes,
            weight_bytes=self.weight_bytes,
            slot_bytes=self.slot_bytes,
            gradient_bytes=self.gradient_bytes,
            recompute=self.recompute,
        )


def segments_of(
    profile: Profile, names: Sequence[str], *, recompute: bool = True, slowness: float = 1.0
) -> list[Segment]:
    """The segments of a cut.

    Args:
        profile: What one microbatch costs.
        names: The cut, as :func:`hydra_ext.profile.cuts_of` gives it.
        recompute: Whether segments may run again in backward.
        slowness: Seconds of compute for each one of the profile.
    """
    counted: set[int] = set()
    segments = []
    for at, name in enumerate(names):
        figures = profile.segment(name)
        after = profile.segment(names[at + 1]).parked_bytes if at + 1 < len(names) else 0
        blocks = profile.blocks_of(name)
        weights = [profile.blocks[block].weight_bytes for block in blocks]
        gradients = [profile.blocks[block].gradient_bytes for block in blocks if block not in counted]
        counted.update(blocks)
        slot_bytes, live_gradient_bytes = max(weights, default=0), figures.live_gradient_bytes
        if live_gradient_bytes is None:
            live_gradient_bytes = min(sum(gradients), slot_bytes)
        segments.append(
            Segment(
                figures=replace(
                    figures,
                    forward_seconds=figures.forward_seconds * slowness,
                    parked_bytes=max(figures.parked_bytes, after),
                ),
                backward_seconds=figures.forward_seconds * slowness * profile.backward_ratio,
                weight_bytes=sum(weights),
                slot_bytes=slot_bytes,
                live_gradient_bytes=live_gradient_bytes,
                gradient_bytes=sum(gradients),
                recompute=_scope(profile, figures) if recompute else _C.RecomputeScope.NEVER,
            )
        )
    return segments


def _scope(profile: Profile, figures: ModuleFigures) -> _C.RecomputeScope:
    saved = figures.saved.fresh
    if (
        not figures.name
        or not figures.is_repeatable
        or saved < _LEAST_BYTES
        or saved <= _LEAST_GAIN * figures.inputs.fresh
    ):
        return _C.RecomputeScope.NEVER
    return _C.RecomputeScope.IN_ROUNDS
