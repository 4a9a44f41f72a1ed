"""Which views of memory are values of their own, and which must be views of it in every stage."""

from __future__ import annotations

from dataclasses import replace

from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.split.rehearsal.record import GlueCall, Key, Made, Structure, Value, View


def settle_views(
    calls: list[GlueCall], values: dict[Key, Value], note_of: dict[Key, Note], views: list[tuple[int, int]]
) -> None:
    """A view of memory that is written to later is made by every stage; what uses it uses the memory's own values.

    That would be right for all views. But gradients of the memory would be added up in another order than in the whole
    model, which rounds otherwise; so a view that can be a value is one.

    Args:
        calls: of the rehearsal; those that make views are changed.
        values: likewise.
        views: numbers of the calls that return views, and their steps.
    """
    settled = [
        number
        for number, step in views
        if any(written > step for key in _keys(calls[number]) for written in note_of[key].writes)
    ]
    gone = {key for number in settled for key in _keys(calls[number])}
    for key in gone:
        view = values[key]
        for other in note_of[key].values:
            if other not in gone and values[other].made < view.last_use:
                values[other] = replace(
                    values[other],
                    last_use=max(values[other].last_use, view.last_use),
                    everywhere=values[other].everywhere or view.everywhere,
                )
        values[key] = replace(view, last_use=view.made, everywhere=False)
    for number in settled:
        structure = calls[number].structure
        if structure is not None:
            leaves = tuple(
                View(values[leaf.key].shape, values[leaf.key].dtype) if isinstance(leaf, Made) else leaf
                for leaf in structure.leaves
            )
            calls[number] = replace(calls[number], structure=Structure(leaves, structure.tree), is_view=True)


def _keys(call: GlueCall) -> list[Key]:
    return [leaf.key for leaf in call.structure.leaves if isinstance(leaf, Made)] if call.structure else []
