"""Cuts of a model into segments, one after the other, that save for backward.

A cut is found by what modules save, so no names or types of layers are needed. It goes from the model down. A module
is a segment if it is called once and saves at most the cut's limit, has no modules inside, or saves most of its bytes
itself. Each size of what a module saves is a limit; of many sizes some are.

Other cuts have groups: consecutive children of an ``nn.Sequential`` that saves more than the limit. Such a chain is cut
where it is narrow: before a call that takes fewer bytes than the one before it. Pieces above the limit are cut again,
where that leaves the fewest bytes between them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from hydra_ext.policy import GivenPolicies
from hydra_ext.profile.figures import Chain, ModuleFigures, Profile

_OWN_SHARE = 0.5  # of saved bytes: a module that saves more than this outside its children is not cut
_MOST_LIMITS = 48  # of sizes that modules save: a mixture of experts has one for each expert
_MOST_SEGMENTS = 1000  # of a cut: more are no better, and take the planner long
_HALVINGS = 12  # of what a model saves: limits of groups
_LEAST_LIMIT = 2**16  # bytes

Cut = tuple[str, ...]


def cuts_of(profile: Profile, *, groups: bool = True, given: GivenPolicies = GivenPolicies()) -> list[Cut]:  # noqa: B008 - frozen
    """Up to eight cuts, each the names of its segments in the order of their calls.

    Four are of modules: the balanced one, whose inputs together with its largest segment are the fewest bytes, one
    coarser, one finer, and the finest. A model without such modules is one segment. With ``groups`` there are four with
    groups, if the model has any: the balanced one, one coarser, and two finer.

    A segment follows one policy: a module is cut if others inside have policies of their own, and one that a user wants
    to be recomputed is not.
    """
    ordered, best = _of_modules(profile, given)
    if not ordered:
        return [("",)]
    finest = len(ordered) - 1
    chosen = dict.fromkeys(ordered[at] for at in (best, max(0, best - 1), min(finest, best + 1), finest))
    if groups and profile.chains:
        grouped, best = _of_groups(profile, given)
        grouped_at = [at for at in (best, best - 1, best + 1, best + 2) if 0 <= at < len(grouped)]
        chosen.update(dict.fromkeys(grouped[at] for at in grouped_at if any(map(profile.place_of, grouped[at]))))
    return [*chosen]


def balanced_cut(profile: Profile, needs: Callable[[ModuleFigures], int], *, given: GivenPolicies) -> Cut:
    """Of all cuts, with groups and without, the one whose inputs and neediest segment are the fewest bytes together.

    ``needs`` gives the bytes that a segment needs in its second forward. In :func:`cuts_of` it is what it saves.
    """
    cuts = [*_of_modules(profile, given)[0], *(_of_groups(profile, given)[0] if profile.chains else [])]

    def nbytes(cut: Cut) -> int:
        segments = [*map(profile.segment, cut)]
        return sum(segment.inputs.fresh for segment in segments) + max(map(needs, segments))

    return min(cuts, key=nbytes, default=("",))


def _of_modules(profile: Profile, given: GivenPolicies) -> tuple[list[Cut], int]:
    sizes = sorted({figures.saved.fresh for figures in profile.modules.values() if figures.calls == 1}, reverse=True)
    places = range(min(len(sizes), _MOST_LIMITS))
    limits = [sizes[place * (len(sizes) - 1) // max(1, len(places) - 1)] for place in places]
    return _ordered(profile, given, limits, lambda figures, limit: None)


def _of_groups(profile: Profile, given: GivenPolicies) -> tuple[list[Cut], int]:
    whole = profile.modules[""].saved.fresh
    halves = [half for half in (whole >> times for times in range(1, _HALVINGS)) if half >= _LEAST_LIMIT]
    return _ordered(profile, given, halves, lambda figures, limit: _pieces(profile, given, figures.name, limit))


_Divide = Callable[[ModuleFigures, int], "list[str] | None"]
"""Cuts a module into groups, or gives None if it is to be cut into the modules inside."""


def _ordered(profile: Profile, given: GivenPolicies, limits: list[int], divide: _Divide) -> tuple[list[Cut], int]:
    """The cuts by these limits, and the number of the balanced one."""
    found: dict[Cut, int] = {}
    for limit in limits:
        segments = [profile.segment(name) for name in _cut(profile, given, limit, divide)]
        segments.sort(key=lambda figures: figures.order)
        largest = max((segment.saved.fresh for segment in segments), default=0)
        names = tuple(segment.name for segment in segments)
        found.setdefault(names, sum(segment.inputs.fresh for segment in segments) + largest)
    ordered = [names for names in found if 0 < len(names) <= _MOST_SEGMENTS]
    return ordered, min(range(len(ordered)), key=lambda at: found[ordered[at]], default=0)


def _cut(profile: Profile, given: GivenPolicies, limit: int, divide: _Divide) -> list[str]:
    segments: list[str] = []

    def visit(figures: ModuleFigures) -> None:
        if len(segments) > _MOST_SEGMENTS:
            return  # the cut is not taken
        inner = profile.children(figures.name)
        is_whole = given.recomputes(figures.name)
        in_one_piece = is_whole or (
            not given.has_inside(figures.name)
            and (
                figures.saved.fresh <= limit
                or not inner
                or sum(_saved_inside(profile, child) for child in inner) < _OWN_SHARE * figures.saved.fresh
            )
        )
        if figures.name and figures.calls == 1 and in_one_piece:
            segments.append(figures.name)
            return
        if is_whole:  # called several times
            return
        pieces = divide(figures, limit)
        if pieces is None:
            pieces = [child.name for child in inner]
        for name in pieces:
            if profile.place_of(name) is None:
                visit(profile.modules[name])
            else:
                segments.append(name)

    visit(profile.modules[""])
    return segments


def _saved_inside(profile: Profile, figures: ModuleFigures) -> int:
    if figures.calls:
        return figures.saved.fresh
    return sum(_saved_inside(profile, child) for child in profile.children(figures.name))


def _pieces(profile: Profile, given: GivenPolicies, name: str, limit: int) -> list[str] | None:
    """A chain in groups. A child with modules inside that saves more than the limit is a piece itself."""
    chain = profile.chains.get(name)
    if chain is None:
        return None
    names = []
    for first, end in _narrowed(chain):
        for begin, after in _within(chain, given, first, end, limit):
            child = chain.links[begin].figures
            is_large = child.saved.fresh > limit and bool(profile.children(child.name))
            by_itself = after - begin == 1 and (is_large or given.has_any(child.name))
            is_module = by_itself and profile.modules[child.name].calls == 1
            names.append(child.name if is_module else chain.name_of(begin, after))
    return [name for name in names if name in profile.modules or profile.place_of(name) is not None]


def _narrowed(chain: Chain) -> list[tuple[int, int]]:
    taken = [link.figures.inputs.all for link in chain.links]
    cuts = [at for at, (before, size) in enumerate(pairwise(taken), 1) if size < before]
    return [*pairwise([0, *cuts, len(taken)])]


def _within(chain: Chain, given: GivenPolicies, first: int, end: int, limit: int) -> list[tuple[int, int]]:
    """A piece of a chain, cut so that groups can run again and save at most the limit: the fewest bytes between them.

    Of cuts with as few bytes, one with the fewest groups, and of these the one whose second forwards are the shortest:
    a group's second forward ends before what it does after its last tensor is saved.
    """
    links = chain.links
    may_join = [link.figures.is_repeatable and not given.has_any(link.figures.name) for link in links]
    saved = [0, *accumulate(chain.own_bytes(at) for at in range(len(links)))]
    ran = [0.0, *accumulate(link.figures.forward_seconds for link in links)]
    saves = [0.0]  # by end: the moment of the last saved tensor before it
    for at, link in enumerate(links):
        again = link.figures.again_seconds
        saves.append(saves[-1] if again is None else ran[at] + again)
    # By end: bytes, groups, seconds, begin of the last one.
    best: dict[int, tuple[int, int, float, int]] = {first: (0, 0, 0.0, first)}
    for after in range(first + 1, end + 1):
        for begin in range(after - 1, first - 1, -1):
            if after - begin > 1:
                if saved[after] - saved[begin] > limit or not may_join[begin]:
                    break
                if links[begin].intact_until < after or not may_join[after - 1]:
                    continue
            size, groups, seconds, _ = best[begin]
            seconds += max(0.0, saves[after] - ran[begin])
            found = size + links[begin].figures.inputs.all, groups + 1, seconds, begin
            best[after] = min(best.get(after, found), found)
    pieces = []
    while end > first:
        begin = best[end][-1]
        pieces.append((begin, end))
        end = begin
    return pieces[::-1]
