"""What the optimizers of a pipeline's stages keep, put together for one checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from hydra_ext.errors import UnsupportedState
from hydra_ext.pipeline.checkpoint.stage_optimizers import joined

PLACES = {"a": 0, "b": 1, "c": 2}


def captured(kind: str, *groups: tuple[float, list[str]]) -> dict[str, Any]:
    return {
        "class": kind,
        "groups": [{"options": {"lr": rate}, "params": names} for rate, names in groups],
        "state": {name: {"step": 1} for _, names in groups for name in names},
    }


def test_groups_with_the_same_options_are_one_in_the_order_of_the_model() -> None:
    whole = joined([captured("SGD", (0.1, ["c", "b"])), captured("SGD", (0.1, ["a", "b"]))], PLACES)
    assert whole == captured("SGD", (0.1, ["a", "b", "c"]))


def test_no_stages_have_no_state() -> None:
    assert joined([], PLACES) is None


def test_optimizers_of_two_classes_are_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"optimizers of several classes \(Adam, SGD\)"):
        joined([captured("SGD", (0.1, ["a"])), captured("Adam", (0.1, ["b"]))], PLACES)


def test_a_shared_parameter_with_two_rates_is_refused() -> None:
    with pytest.raises(UnsupportedState, match="'a' is on several stages, in groups with different options"):
        joined([captured("SGD", (0.1, ["a"])), captured("SGD", (0.2, ["a"]))], PLACES)
