"""What the host holds while a model without memory moves into the arena, by the system's own account."""

from __future__ import annotations

import pytest

from support.construction.materialized_memory import Taken, observe

MIB = 2**20
MAPPED = 64 * MIB  # of files, at a time
FREED = 64 * MIB  # and not the system's yet
SMALL = 16 * MIB  # whatever else: what a constructor makes beside parameters, buffers, the C library's own


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Taken]:
    return observe(tmp_path_factory.mktemp("weights"))


@pytest.mark.full
def test_from_files_it_is_the_homes_and_a_block_and_what_is_mapped(taken: dict[str, Taken]) -> None:
    seen = taken["files"]
    assert seen.peak > seen.arena > 250 * MIB, "it was not seen"
    assert seen.peak <= seen.arena + seen.largest_block + MAPPED + SMALL


@pytest.mark.full
def test_drawn_at_once_it_is_no_more_since_what_waits_takes_the_place_of_its_homes(taken: dict[str, Taken]) -> None:
    seen = taken["numbers"]
    assert seen.peak > seen.arena > 250 * MIB, "it was not seen"
    assert seen.peak <= seen.arena + seen.largest_block + seen.largest_parameter + FREED + SMALL


@pytest.mark.full
@pytest.mark.parametrize("source", ["files", "numbers"])
def test_the_homes_are_as_large_as_the_parameters(source: str, taken: dict[str, Taken]) -> None:
    seen = taken[source]
    assert seen.arena == seen.expected_arena
    assert seen.foreign == 0
