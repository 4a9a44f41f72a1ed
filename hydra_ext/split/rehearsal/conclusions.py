"""Concludes from a rehearsal's notes what every cut would carry, and which cuts are impossible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from torch import nn

from hydra_ext.errors import SplitError
from hydra_ext.split.rehearsal.events import EventDraft
from hydra_ext.split.rehearsal.notes import Root
from hydra_ext.split.rehearsal.record import Boundary, Event, Key, Rehearsal, Value
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.rehearsal.usage import Usage
from hydra_ext.split.state.lasting import Lasting


def concluded(
    recorder: Recorder,
    drafts: Sequence[EventDraft],
    blocks: Mapping[str, nn.Module],
    signature: Hashable,
    lasting: Lasting,
    training: tuple[bool, ...],
) -> Rehearsal:
    events = tuple(_event(draft, usage) for draft, usage in zip(drafts, recorder.usages, strict=True))
    boundaries = [Boundary(), *(_boundary(recorder, events, b) for b in range(1, len(events))), Boundary()]
    return Rehearsal(
        events=events,
        calls=tuple(recorder.calls),
        values=dict(recorder.values.known),
        boundaries=tuple(boundaries),
        everywhere=_names(recorder.everywhere.roots, "parameter"),
        blocks=tuple(blocks),
        signature=signature,
        rewritten=_names(recorder.everywhere.writes, "buffer") | _names(recorder.everywhere.writes, "parameter"),
        lasting=lasting,
        training=training,
    )


def _event(draft: EventDraft, usage: Usage) -> Event:
    if draft.structure is None:
        raise SplitError(f"block {draft.name} did not return")
    return Event(
        name=draft.name,
        step=draft.step,
        calls_before=draft.calls_before,
        structure=draft.structure,
        written=draft.written,
        inner=tuple(draft.inner),
        attributes=tuple(draft.attributes),
        parameters=_names(usage.roots, "parameter"),
        buffers=_names(usage.roots | usage.writes | usage.sets, "buffer"),
        writes=_names(usage.writes, "buffer") | _names(usage.writes, "parameter"),
        sets=_names(usage.sets, "buffer"),
    )


def _names(roots: set[Root], kind: str) -> frozenset[str]:
    return frozenset(name for root, name in roots if root == kind)


def _boundary(recorder: Recorder, events: Sequence[Event], number: int) -> Boundary:
    step = events[number].step
    live = sorted(
        (value for value in recorder.values.known.values() if value.made < step <= _needed_until(value, step)),
        key=lambda value: (value.made, value.key),
    )
    copied = frozenset(value.key for value in live if recorder.values.note_of[value.key].foreign)
    reasons = [refusal.reason for refusal in recorder.cuts.refusals if refusal.holds_at(step)]
    reasons += _torn_graphs(live)
    reasons += _torn_memory(recorder, live, step)
    reasons += _torn_frames(recorder, step)
    reasons += _torn_state(events, number, _names(recorder.everywhere.roots, "buffer"))
    return Boundary(tuple(value.key for value in live), copied, tuple(reasons))


def _needed_until(value: Value, step: int) -> int:
    return max(value.last_use, step) if value.everywhere else value.last_use


def _written_from(recorder: Recorder, key: Key, step: int) -> bool:
    return any(written >= step for written in recorder.values.note_of[key].writes)


def _torn_graphs(live: Sequence[Value]) -> list[str]:
    torn = [str(value.key) for value in live if value.attached_later]
    if not torn:
        return []
    return [
        f"the graph of {', '.join(torn)} is made around the call, not inside it: by a reentrant checkpoint (use "
        "checkpoint(..., use_reentrant=False)), or by a torch.autograd.Function that calls blocks or runs between "
        "them (apply it in a block, or cut after the next block)"
    ]


def _torn_memory(recorder: Recorder, live: Sequence[Value], step: int) -> list[str]:
    """Values that share memory arrive as separate tensors, so the memory may not be written to after the cut."""
    note_of = recorder.values.note_of
    sharing: dict[int, list[Value]] = defaultdict(list)
    for value in live:
        sharing[id(note_of[value.key])].append(value)
    return [
        f"the memory of {' and '.join(str(value.key) for value in values)} is written to after the cut, where each "
        "value has a copy of its own: write to a clone() instead"
        for values in sharing.values()
        if (len(values) > 1 or note_of[values[0].key].foreign) and _written_from(recorder, values[0].key, step)
    ]


def _torn_frames(recorder: Recorder, step: int) -> list[str]:
    if any(min(steps) < step <= max(steps) for steps in recorder.cuts.frames.values()):
        return ["it lies inside one checkpoint, which runs again as a whole: use a checkpoint for each block"]
    return []


def _torn_state(events: Sequence[Event], number: int, everywhere: frozenset[str]) -> list[str]:
    """Every stage has its own buffers, and only the stage whose event writes to a buffer has the right numbers."""
    written = frozenset().union(*(event.writes for event in events))
    before = frozenset().union(*(event.buffers | event.parameters for event in events[:number]))
    after = frozenset().union(*(event.buffers | event.parameters for event in events[number:]))
    torn = sorted(written & ((before & after) | everywhere))
    return [f"{', '.join(torn)} is used on both sides of the cut, and written by one of them"] if torn else []
