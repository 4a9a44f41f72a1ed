"""A model's segments, as the planner of activations takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydra_ext import _C
from hydra_ext.policy import Compress, GivenPolicies, Keep, Offload
from hydra_ext.profile import ModuleFigures, Profile

_LEAST_GAIN = 1.5  # a segment that saves less than this many times its inputs is not worth a second forward
_LEAST_BYTES = 2**16
_NESTED_SHARE = 0.8  # of what a segment saves: pieces that need more are not worth a third forward
_AGAIN = (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)


@dataclass(frozen=True, kw_only=True)
class Coding:
    """What it takes to compress what a segment saves in one microbatch.

    Attributes:
        stream_bytes: Of all that is fresh, with what is not compressed.
        seconds: To compress and to decode.
    """

    stream_bytes: int
    seconds: float


CodingOf = Callable[[Sequence[str], int], Coding | None]
"""Gives the coding of modules that save so many fresh bytes together; None if nothing of theirs was compressed."""


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A second forward in pieces: what they save is dropped again, and each runs once more in its own backward.

    Attributes:
        pieces: Modules inside of the segment.
        nbytes: That are there at once: inputs of pieces, what the largest one saves, and what is saved outside of them.
        seconds: Of the second forward, and of the third ones.
    """

    pieces: tuple[str, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """What a planner may do with what a segment saves.

    Attributes:
        recompute: Where it may run again in backward.
        options: The only ones that its policy leaves; None for all.
        coding: None if it may not be compressed.
        nested: How it runs again; None for in one piece.
    """

    recompute: _C.RecomputeScope = _C.RecomputeScope.NEVER
    options: tuple[_C.ActivationOption, ...] | None = None
    coding: Coding | None = None
    nested: Nested | None = None


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
        freedom: What a planner may do with what it saves.
    """

    figures: ModuleFigures
    backward_seconds: float
    weight_bytes: int
    slot_bytes: int
    live_gradient_bytes: int
    gradient_bytes: int
    freedom: Freedom = Freedom()

    @property
    def name(self) -> str:
        return self.figures.name

    @property
    def again_bytes(self) -> int:
        """What a second forward saves."""
        nested = self.freedom.nested
        return max(self.figures.saved.fresh, self.figures.saved.all) if nested is None else nested.nbytes

    @property
    def again_seconds(self) -> float:
        """Time of a second forward, with the third ones of pieces."""
        nested = self.freedom.nested
        return _again_seconds(self.figures) if nested is None else nested.seconds

    def core(self) -> _C.ActivationSegment:
        """The same for the planner."""
        figures, coding = self.figures, self.freedom.coding
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
            recompute=self.freedom.recompute,
            stream_bytes=None if coding is None else coding.stream_bytes,
            coding_seconds=0.0 if coding is None else coding.seconds,
            options=self.freedom.options,
            second=(self.again_bytes, self.again_seconds),
        )


def segments_of(
    profile: Profile,
    names: Sequence[str],
    *,
    recompute: bool = True,
    slowness: float = 1.0,
    given: GivenPolicies = GivenPolicies(),  # noqa: B008 - frozen
    coding_of: CodingOf = lambda names, nbytes: None,
) -> list[Segment]:
    """The segments of a cut.

    Args:
        profile: What one microbatch costs.
        names: The cut, as :func:`hydra_ext.profile.cuts_of` gives it.
        recompute: Whether segments may run again in backward.
        slowness: Seconds of compute for each one of the profile.
        given: Policies of the user.
        coding_of: Gives the coding of segments that may be compressed.
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
                    again_seconds=_again_seconds(figures) * slowness,
                    parked_bytes=max(figures.parked_bytes, after),
                ),
                backward_seconds=figures.forward_seconds * slowness * profile.backward_ratio,
                weight_bytes=sum(weights),
                slot_bytes=slot_bytes,
                live_gradient_bytes=live_gradient_bytes,
                gradient_bytes=sum(gradients),
                freedom=_freedom(profile, figures, given, coding_of, recompute=recompute),
            )
        )
    return segments


def needs_again(profile: Profile, figures: ModuleFigures) -> int:
    """Bytes that a segment's second forward saves, in pieces if these are fewer."""
    may_run_again = _scope(figures) != _C.RecomputeScope.NEVER
    nested = _nested(profile, figures, 1.0) if may_run_again else None
    return figures.saved.fresh if nested is None else nested.nbytes


def in_pieces(profile: Profile, segments: Sequence[Segment], slowness: float) -> list[Segment] | None:
    """The same segments, which run again in pieces where that takes less memory; None if it does nowhere."""
    found = []
    for segment in segments:
        may_run_again = segment.freedom.recompute != _C.RecomputeScope.NEVER
        nested = _nested(profile, segment.figures, slowness) if may_run_again else None
        found.append(replace(segment, freedom=replace(segment.freedom, nested=nested)))
    return found if any(segment.freedom.nested is not None for segment in found) else None


def _nested(profile: Profile, figures: ModuleFigures, slowness: float) -> Nested | None:
    is_module = profile.place_of(figures.name) is None
    names = [child.name for child in profile.children(figures.name)] if is_module else profile.members(figures.name)
    pieces = [profile.modules[piece] for name in dict.fromkeys(names) for piece in _pieces(profile, name)]
    if not pieces:
        return None
    outside = figures.saved.all - sum(piece.saved.fresh for piece in pieces)
    inputs = sum(piece.inputs.all for piece in pieces)
    nbytes = max(0, outside) + inputs + max(piece.saved.all for piece in pieces)
    if nbytes > _NESTED_SHARE * figures.saved.all:
        return None
    # The segment's own seconds are scaled already.
    seconds = _again_seconds(figures) + slowness * sum(map(_again_seconds, pieces))
    return Nested(pieces=tuple(piece.name for piece in pieces), nbytes=nbytes, seconds=seconds)


def _pieces(profile: Profile, name: str) -> list[str]:
    """The outermost of a module and those inside it that are worth another forward."""
    if _scope(profile.modules[name]) != _C.RecomputeScope.NEVER:
        return [name]
    return [piece for child in profile.children(name) for piece in _pieces(profile, child.name)]


def _freedom(
    profile: Profile, figures: ModuleFigures, given: GivenPolicies, coding_of: CodingOf, *, recompute: bool
) -> Freedom:
    members = profile.members(figures.name)
    policy = given.policy_of(members[0])  # of all of them: a segment follows one policy
    if given.recomputes(figures.name):
        inputs = {Keep: _AGAIN[:1], Offload: _AGAIN[1:]}.get(type(policy), _AGAIN)
        return Freedom(recompute=_C.RecomputeScope.IN_ROUNDS, options=inputs)
    if isinstance(policy, Keep):
        return Freedom(options=(_C.ActivationOption.KEEP,))
    if isinstance(policy, Offload):
        return Freedom(options=(_C.ActivationOption.OFFLOAD,))
    return Freedom(
        recompute=_scope(figures) if recompute else _C.RecomputeScope.NEVER,
        coding=coding_of(members, figures.saved.fresh) if isinstance(policy, Compress) else None,
    )


def _again_seconds(figures: ModuleFigures) -> float:
    return figures.forward_seconds if figures.again_seconds is None else figures.again_seconds


def _scope(figures: ModuleFigures) -> _C.RecomputeScope:
    saved = figures.saved.fresh
    if (
        not figures.name
        or not figures.is_repeatable
        or saved < _LEAST_BYTES
        or saved <= _LEAST_GAIN * figures.inputs.fresh
    ):
        return _C.RecomputeScope.NEVER
    return _C.RecomputeScope.IN_ROUNDS
