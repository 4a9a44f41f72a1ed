"""Small samples of a large product of choices, in which every pair or triple of choices occurs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
_Choices = tuple[tuple[str, int], ...]  # names of factors and the indices of their values


def covering_rows(
    factors: Mapping[str, Sequence[Any]], *, strength: int = 2, allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Returns rows with one value of each factor, which contain every allowed combination of ``strength`` values.

    Greedy and deterministic: each row starts from the first combination not yet covered, and every other factor takes
    the value that covers most of the remaining combinations.

    Args:
        factors: The values that each factor can take.
        strength: 2 for every pair, 3 for every triple.
        allowed: Returns false for rows with values that must not occur together. Rows may be incomplete.

    Raises:
        ValueError: An allowed combination cannot be completed to an allowed row.
    """
    uncovered = dict.fromkeys(_combinations(factors, strength, allowed))
    rows: list[Row] = []
    while uncovered:
        chosen = dict(next(iter(uncovered)))
        for name in factors:
            if name not in chosen:
                chosen[name] = _best_value(factors, chosen, name, uncovered, strength, allowed)
        complete = {name: chosen[name] for name in factors}
        for combination in combinations(complete.items(), strength):
            uncovered.pop(combination, None)
        rows.append(_row(factors, complete))
    return rows


def _combinations(
    factors: Mapping[str, Sequence[Any]], strength: int, allowed: Callable[[Row], bool]
) -> list[_Choices]:
    found: list[_Choices] = []
    for names in combinations(factors, strength):
        for indices in product(*(range(len(factors[name])) for name in names)):
            choices = tuple(zip(names, indices, strict=True))
            if allowed(_row(factors, dict(choices))):
                found.append(choices)
    return found


def _best_value(
    factors: Mapping[str, Sequence[Any]],
    chosen: dict[str, int],
    name: str,
    uncovered: dict[_Choices, None],
    strength: int,
    allowed: Callable[[Row], bool],
) -> int:
    order = list(factors)
    best, best_gain = -1, -1
    for index in range(len(factors[name])):
        candidate = {**chosen, name: index}
        if not allowed(_row(factors, candidate)):
            continue
        gain = 0
        for others in combinations(chosen.items(), strength - 1):
            together = sorted((*others, (name, index)), key=lambda choice: order.index(choice[0]))
            gain += tuple(together) in uncovered
        if gain > best_gain:
            best, best_gain = index, gain
    if best < 0:
        raise ValueError(f"no value of {name!r} is allowed beside {_row(factors, chosen)}")
    return best


def _row(factors: Mapping[str, Sequence[Any]], chosen: Mapping[str, int]) -> Row:
    return {name: factors[name][index] for name, index in chosen.items()}
