"""A few cases of each parametrized test, which have as many of its parameters' values as so few can have."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest

MOST = 2  # cases of one test that does not say how many
_PLAIN = (str, bytes, bool, int, float, type(None))

_Value = tuple[str, Hashable]  # a parameter's name, and which value it has


def sampled(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests of a sampled run, in their order: at most :data:`MOST` cases of each, or what its marker says.

    Which ones depends on a test's cases alone: not on their order among other tests, and not on the process.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if getattr(item, "callspec", None) and not item.get_closest_marker("every_case"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        cases.sort(key=lambda case: _place(case.callspec))
        marker = cases[0].get_closest_marker("cases")
        most = marker.args[0] if marker else MOST
        kept = cover([_values(case.callspec) for case in cases], most)
        left_out.update(case for index, case in enumerate(cases) if index not in kept)
    return [item for item in items if item not in left_out]


def cover(cases: Sequence[frozenset[_Value]], most: int) -> list[int]:
    """Returns the indices of at most ``most`` cases: greedily those with most new values, as far apart as can be.

    Of a list these are the first one, the last one, the one in the middle. A case that has nothing new is not chosen.
    """
    chosen: list[int] = []
    missing = frozenset[_Value]().union(*cases)
    while missing and len(chosen) < most:
        # Of equally good ones the first, whose index is negated since the largest is sought.
        best = max(
            range(len(cases)),
            key=lambda index: (
                len(cases[index] & missing),
                min((abs(index - other) for other in chosen), default=0),
                -index,
            ),
        )
        chosen.append(best)
        missing -= cases[best]
    return sorted(chosen)


def _place(callspec: Any) -> tuple[int, ...]:
    """Where a case stands among the others of its test, as they are written."""
    return tuple(callspec.indices.values())


def _values(callspec: Any) -> frozenset[_Value]:
    """Equal numbers and texts are one value wherever they are written, and so are other objects at the same place."""
    return frozenset(
        (name, (type(value), value) if isinstance(value, _PLAIN) else callspec.indices[name])
        for name, value in callspec.params.items()
    )
