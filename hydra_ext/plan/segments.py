"""A model's segments, as the planner of activations takes them."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_ext import _C
from hydra_ext.profile import ModuleFigures, Profile

_LEAST_GAIN = 1.5  # a segment that saves less than this many times its inputs is not worth a second forward
_LEAST_BYTES = 2**16


def segments_of(
    profile: Profile, names: Sequence[str], *, recompute: bool = True, slowness: float = 1.0
) -> list[_C.ActivationSegment]:
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
        figures = profile.modules[name]
        after = profile.modules[names[at + 1]].parked_bytes if at + 1 < len(names) else 0
        blocks = profile.blocks_of(name)
        weights = [profile.blocks[block].weight_bytes for block in blocks]
        gradients = [profile.blocks[block].gradient_bytes for block in blocks if block not in counted]
        counted.update(blocks)
        segments.append(
            _C.ActivationSegment(
                forward_seconds=figures.forward_seconds * slowness,
                backward_seconds=figures.forward_seconds * slowness * profile.backward_ratio,
                saved_fresh=figures.saved.fresh,
                saved_all=figures.saved.all,
                inputs_fresh=figures.inputs.fresh,
                inputs_all=figures.inputs.all,
                parked_bytes=max(figures.parked_bytes, after),
                forward_bytes=figures.forward_bytes,
                backward_bytes=figures.backward_bytes,
                weight_bytes=sum(weights),
                slot_bytes=max(weights, default=0),
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
