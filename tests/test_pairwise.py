"""The sampler that the parity matrix relies on, against counting by hand."""

from itertools import combinations, product

import pytest

from support.pairwise import Row, covering_rows

FACTORS = {"a": [1, 2, 3, 4], "b": ["x", "y", "z"], "c": [False, True], "d": [False, True], "e": [0.5, 1.5, 2.5]}


def _missing(rows: list[Row], strength: int) -> set[tuple[tuple[str, object], ...]]:
    wanted = set()
    for names in combinations(FACTORS, strength):
        for values in product(*(FACTORS[name] for name in names)):
            wanted.add(tuple(zip(names, values, strict=True)))
    return wanted - {found for row in rows for found in combinations(row.items(), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_of_that_many_values_meets_in_some_row(strength: int) -> None:
    rows = covering_rows(FACTORS, strength=strength)
    assert all(list(row) == list(FACTORS) for row in rows)
    assert _missing(rows, strength) == set()
    assert _missing(rows[:-1], strength), "the last row covers nothing of its own"


def test_a_pairwise_sample_is_far_smaller_than_the_product() -> None:
    # 12 is the product of the two largest factors and so the least that any sample needs.
    assert 12 <= len(covering_rows(FACTORS)) <= 16


def test_the_same_choices_give_the_same_rows() -> None:
    assert covering_rows(FACTORS) == covering_rows(FACTORS)


def test_what_is_not_allowed_never_meets_and_all_else_does() -> None:
    def allowed(row: Row) -> bool:
        return not (row.get("a") == 1 and row.get("b") == "x")

    rows = covering_rows(FACTORS, allowed=allowed)
    assert all(allowed(row) for row in rows)
    assert _missing(rows, 2) == {(("a", 1), ("b", "x"))}


def test_choices_that_cannot_be_completed_are_an_error() -> None:
    with pytest.raises(ValueError, match="no value of 'c' is allowed"):
        covering_rows({"a": [1], "b": [1], "c": [1]}, allowed=lambda row: len(row) < 3)
