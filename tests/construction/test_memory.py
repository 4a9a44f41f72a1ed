"""What building in parts takes of memory, counted below torch."""

from __future__ import annotations

import pytest

from support.construction.construction_memory import Held, observe
from support.runtime.hooked_run import build_hook

CONSTANT = 2**20  # buffers, twice, and small parameters


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Held]:
    return observe(build_hook(tmp_path_factory.mktemp("hook")))


@pytest.mark.full
@pytest.mark.parametrize("model", ["library", "files", "copies"])
def test_filling_takes_what_is_filled_and_the_largest_parameter(held: dict[str, Held], model: str) -> None:
    seen = held[model]
    assert seen.ordinary_peak >= seen.whole > 1.9e8, "the hook saw nothing"
    assert 0 < seen.filled < seen.whole / 2
    assert seen.filled <= seen.fill_left <= seen.filled + CONSTANT
    # The layer that the others are copies of is kept until they are.
    copied_from = seen.whole // 4 if model == "copies" else 0
    assert seen.fill_peak <= seen.filled + seen.largest + copied_from + CONSTANT


@pytest.mark.full
@pytest.mark.parametrize("model", ["library", "files", "copies"])
def test_materialize_takes_the_largest_parameter_and_leaves_nothing(held: dict[str, Held], model: str) -> None:
    seen = held[model]
    copied = seen.largest if model == "copies" else 0
    assert seen.materialize_peak <= seen.largest + copied + CONSTANT
    assert seen.materialize_left <= CONSTANT


@pytest.mark.full
def test_the_system_gets_back_what_is_not_filled(held: dict[str, Held]) -> None:
    seen = held["library"]
    kept_by_the_c_library = 64 * 2**20
    assert seen.resident_after_materialize <= kept_by_the_c_library
    assert seen.filled / 2 <= seen.resident_after_fill <= seen.filled + kept_by_the_c_library


@pytest.mark.full
def test_conversions_inside_the_constructor_keep_one_parameter_in_both_forms(held: dict[str, Held]) -> None:
    seen = held["converted"]
    assert seen.ordinary_peak >= 2 * seen.whole, "all in the first form"
    # What is filled is kept from the start, in twice the bytes; drawing and scaling takes two more parameters.
    assert seen.fill_peak <= 2 * seen.filled + 2 * 2 * seen.largest + CONSTANT
    assert seen.filled <= seen.fill_left <= seen.filled + CONSTANT
    assert seen.materialize_peak <= 2 * 2 * seen.largest + CONSTANT
