"""What a sampled run leaves out: against counting by hand, and with pytest as it collects."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from support.sampling import MOST, cover

TESTS = """
import pytest

class Object:
    pass

@pytest.mark.parametrize("number", range(9))
def test_list(number):
    pass

@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("number", range(4))
def test_matrix(number, letter):
    pass

@pytest.mark.parametrize(("same", "thing"), [(1, Object()), (1, Object()), (1, Object())])
def test_objects(same, thing):
    pass

@pytest.mark.every_case
@pytest.mark.parametrize("number", range(5))
def test_every(number):
    pass

@pytest.mark.cases(1)
@pytest.mark.parametrize("number", range(5))
def test_one(number):
    pass

@pytest.mark.cases(3)
@pytest.mark.parametrize("number", range(5))
def test_three(number):
    pass

@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.full), 1, 2, 3])
def test_with_a_long_one(number):
    pass

def test_without_parameters():
    pass
"""
INI = "[pytest]\naddopts = -m 'not full'\nmarkers =\n    every_case\n    cases\n    full\n"


def cells(*factors: int) -> list[frozenset[tuple[str, int]]]:
    """All combinations of so many values, as they are written."""
    return [frozenset((f"factor {at}", value) for at, value in enumerate(row)) for row in product(*map(range, factors))]


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(9, 3, [0, 4, 8]), (9, 2, [0, 8]), (9, 1, [0]), (2, 3, [0, 1]), (4, 9, [0, 1, 2, 3])],
)
def test_of_a_list_they_lie_far_apart(count: int, most: int, expected: list[int]) -> None:
    assert cover(cells(count), most) == expected


@pytest.mark.every_case
@pytest.mark.parametrize("factors", [(3, 3), (2, 4), (4, 2, 3), (2, 2, 2, 2), (1, 5)])
def test_every_value_occurs_in_as_few_as_the_longest_factor_has(factors: tuple[int, ...]) -> None:
    whole = cells(*factors)
    chosen = cover(whole, max(factors))
    assert len(chosen) == max(factors)
    assert frozenset().union(*(whole[index] for index in chosen)) == frozenset().union(*whole)


def test_what_has_nothing_new_is_not_chosen() -> None:
    assert cover(cells(2, 2), 3) == [0, 3]


class Collected:
    """The tests that a run collects and those that it deselects, by name."""

    def __init__(self) -> None:
        self.chosen: list[str] = []
        self.deselected: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += [item.name for item in items]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.chosen = [item.name for item in session.items]


def collect(request: pytest.FixtureRequest, folder: Path, *options: str) -> Collected:
    """With the options of this run's conftest."""
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert conftest is not None
    # By a name of its own, since a module that was imported by the same name would be taken for it.
    (folder / f"test_of_{folder.name}.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(INI)
    collected = Collected()
    without = ("cacheprovider", "unraisableexception", "threadexception", "faulthandler", "terminal", "xdist")
    places = [f"--rootdir={folder}", f"-c{folder / 'pytest.ini'}", "--import-mode=importlib", "--capture=no"]
    pytest.main(
        [*places, "--collect-only", *(f"-pno:{name}" for name in without), *options, str(folder)],
        plugins=[conftest, collected],
    )
    return collected


def test_a_sampled_run_keeps_order_and_markers_and_says_what_it_leaves_out(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert MOST == 2
    seen = collect(request, tmp_path, "--sample")
    assert seen.chosen == [
        *("test_list[0]", "test_list[8]", "test_matrix[0-a]", "test_matrix[3-c]"),
        *("test_objects[1-thing0]", "test_objects[1-thing2]"),
        *(f"test_every[{number}]" for number in range(5)),
        *(
            "test_one[0]",
            "test_three[0]",
            "test_three[2]",
            "test_three[4]",
            "test_with_a_long_one[1]",
            "test_with_a_long_one[3]",
            "test_without_parameters",
        ),
    ]
    whole = collect(request, tmp_path)
    assert set(seen.chosen) | set(seen.deselected) == set(whole.chosen) | set(whole.deselected)


def test_without_the_option_every_case_runs(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seen = collect(request, tmp_path)
    assert seen.deselected == ["test_with_a_long_one[0]"]
    assert len(seen.chosen) == 9 + 12 + 3 + 5 + 5 + 5 + 3 + 1


def test_the_parts_of_a_sampled_run_are_its_whole(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    parts = [collect(request, tmp_path, "--sample", f"--shard={number}/2").chosen for number in (1, 2)]
    whole = collect(request, tmp_path, "--sample").chosen
    assert [*parts[0], *parts[1]] == [*whole[::2], *whole[1::2]]
