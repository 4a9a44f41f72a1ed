"""A rank that fails, or goes another way than the others: every rank is told, and none averages anything wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.replicas.replicated import differences, train_together
from support.replicas.replicated_failures import FAILING, errors_of, fail_and_go_on, run_out_and_go_on
from support.replicas.replicated_undone import EVERY_BLOCK, Normed, train_each
from support.rounds.running_out import LAYERS

OTHER = "RankFailed: rank 1 has failed in this step"


@pytest.mark.cases(1)
@pytest.mark.parametrize("round_size", [2, 1])
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_an_error_on_one_rank_is_an_error_on_all_and_the_next_step_is_equal(
    fault: str, round_size: int, tmp_path: Path
) -> None:
    expected = train_together(FAILING)
    first, second = run_ranks(fail_and_go_on, fault, round_size, folder=tmp_path)
    assert first[0].startswith(OTHER)
    assert second[0] == f"Broken: in the {fault}"
    if (fault, round_size) == ("forward", 2):
        assert not any(first[1] + second[1])  # nothing was accumulated
    for (_, _, seen), plain in zip((first, second), expected, strict=True):
        assert differences(seen["parameters"], plain["parameters"]) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fault", "times", "sizes", "retries"),
    [
        ("forward", 1, (None, None), [0, 1]),  # before the ranks have met
        ("backward", 1, (None, None), [0, 1]),  # likewise: it is that of the last piece of a round of two
        ("backward", 2, (None, None), [1, 2]),
        ("backward", 2, (2, None), [1, 2]),  # the other rank makes its round of two again
    ],
)
def test_a_rank_that_runs_out_of_memory_makes_all_of_them_make_the_step_again(
    fault: str, times: int, sizes: tuple[int | None, int | None], retries: list[int], tmp_path: Path
) -> None:
    expected = train_together(FAILING)
    found = run_ranks(run_out_and_go_on, fault, times, sizes, folder=tmp_path)
    for (error, _, seen), plain in zip(found, expected, strict=True):
        assert error == ""
        assert differences(seen["parameters"], plain["parameters"]) == []
    assert [counted for _, counted, _ in found] == retries


@pytest.mark.full
@pytest.mark.parametrize(("fault", "sizes"), [("forward", (None, None)), ("backward", (None, 2))])
def test_by_default_all_ranks_make_it_again_too(
    fault: str, sizes: tuple[int | None, int | None], tmp_path: Path
) -> None:
    expected = train_together(FAILING)
    found = run_ranks(run_out_and_go_on, fault, 1, sizes, "auto", folder=tmp_path)
    for (error, _, seen), plain in zip(found, expected, strict=True):
        assert error == ""
        assert differences(seen["parameters"], plain["parameters"]) == []
    assert found[1][1] >= 1


WAYS: dict[str, Any] = {
    "auto": {"activations": "auto"},
    "kept": {"recompute": False},
    "recomputed": {"recompute": True},
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", EVERY_BLOCK)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_runs_out_of_memory_at_any_block_leaves_all_of_them_as_if_it_had_not(
    way: str, where: str, failing: int, tmp_path: Path
) -> None:
    job, cases = Normed(**WAYS[way]), EVERY_BLOCK[where]
    expected = train_together(job)
    found = run_ranks(train_each, job, failing, cases, folder=tmp_path)
    for case, *ranks in zip(cases, *found, strict=True):
        for (_, _, seen), plain in zip(ranks, expected, strict=True):
            kinds = plain.keys() - {"gradients"}  # ours are clipped in the update
            assert [each for kind in sorted(kinds) for each in differences(seen[kind], plain[kind], kind)] == [], case
        failures, retries, _ = ranks[failing]
        assert (failures, retries > 0) == (1, True), case
        if way != "auto":  # whose rounds depend on measurements
            has_met = where == "backward" and case.block < LAYERS  # the head goes backward before the ranks meet
            assert [counted for _, counted, _ in ranks] == [1 if has_met or rank == failing else 0 for rank in (0, 1)]


@pytest.mark.full
def test_a_rank_that_has_no_memory_for_any_round_is_an_error_on_all(tmp_path: Path) -> None:
    expected = train_together(FAILING)
    first, second = run_ranks(run_out_and_go_on, "backward", 3, (None, None), folder=tmp_path)
    assert first[0].startswith(OTHER)
    assert second[0].startswith("OutOfMemoryError: scripted: the device is out of memory. run.step tried rounds down")
    for (_, _, seen), plain in zip((first, second), expected, strict=True):
        assert differences(seen["parameters"], plain["parameters"]) == []


@pytest.mark.parametrize(
    ("script", "first", "second"),
    [
        ("data", [OTHER, ""], ["Broken: of the data", ""]),
        (
            "update",
            ["", "ReplicasDiffer: the ranks have gone different ways: some ranks have made more steps"],
            ["Broken: in the update", "ReplicasDiffer: the ranks have gone different ways: some ranks have made more"],
        ),
        *[
            (script, [f"ReplicasDiffer: the ranks have gone different ways: {reason}"] * 1, None)
            for script, reason in (("places", "some ranks are in run.step"), ("frozen", "the ranks train different"))
        ],
        ("steps inside", ["StateError: something wrote to 'transformer.ln_f.bias' during the backward"], None),
        ("late", ["StateError: the gradient of 'transformer.ln_f.bias' was averaged", "", ""], None),
        ("graph", ["StateError: the gradient of 'transformer.ln_f"], None),
        ("no_sync", ["StateError: run.step() averages gradients", ""], None),
    ],
)
def test_what_ranks_must_not_do_is_found(
    script: str, first: list[str], second: list[str] | None, tmp_path: Path
) -> None:
    found = run_ranks(errors_of, script, folder=tmp_path)
    for errors, expected in zip(found, (first, second or first), strict=True):
        assert len(errors) == len(expected)
        pairs = list(zip(errors, expected, strict=True))
        assert all(bool(error) is bool(start) and error.startswith(start) for error, start in pairs), errors
