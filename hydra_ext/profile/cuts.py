"""Cuts of a model into segments: modules that are called once, one after the other, and save for backward.

A cut is found by what modules save, so no names or types of layers are needed. It goes from the model down. A module
is a segment if it is called once and saves at most the cut's limit, has no modules inside, or saves most of its bytes
itself. Each size of what a module saves is a limit.
"""

from __future__ import annotations

from hydra_ext.profile.figures import ModuleFigures, Profile

_OWN_SHARE = 0.5  # of saved bytes: a module that saves more than this outside its children is not cut


def cuts_of(profile: Profile) -> list[tuple[str, ...]]:
    """Up to four cuts, each the names of its segments in the order of their calls.

    They are the balanced one, whose inputs together with its largest segment are the fewest bytes, one coarser, one
    finer, and the finest. A model without such modules is one segment.
    """
    limits = {figures.saved.fresh for figures in profile.modules.values() if figures.calls == 1}
    found: dict[tuple[str, ...], int] = {}
    for limit in sorted(limits, reverse=True):
        segments = _cut(profile, limit)
        names = tuple(segment.name for segment in segments)
        largest = max((segment.saved.fresh for segment in segments), default=0)
        found.setdefault(names, sum(segment.inputs.fresh for segment in segments) + largest)
    ordered = [names for names in found if names]
    if not ordered:
        return [("",)]
    best = min(range(len(ordered)), key=lambda at: found[ordered[at]])
    finest = len(ordered) - 1
    chosen = dict.fromkeys((best, max(0, best - 1), min(finest, best + 1), finest))
    return [ordered[at] for at in chosen]


def _cut(profile: Profile, limit: int) -> list[ModuleFigures]:
    segments: list[ModuleFigures] = []

    def visit(figures: ModuleFigures) -> None:
        inner = profile.children(figures.name)
        in_one_piece = (
            figures.saved.fresh <= limit
            or not inner
            or sum(_saved_inside(profile, child) for child in inner) < _OWN_SHARE * figures.saved.fresh
        )
        if figures.name and figures.calls == 1 and in_one_piece:
            segments.append(figures)
            return
        for child in inner:
            visit(child)

    visit(profile.modules[""])
    return sorted(segments, key=lambda figures: figures.order)


def _saved_inside(profile: Profile, figures: ModuleFigures) -> int:
    if figures.calls:
        return figures.saved.fresh
    return sum(_saved_inside(profile, child) for child in profile.children(figures.name))
