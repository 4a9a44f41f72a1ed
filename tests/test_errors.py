"""Errors say what they were given, and carry it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hydra_ext import errors
from hydra_ext.errors import HydraError

pytestmark = pytest.mark.every_case

VALUES: dict[str, Any] = {
    "Mapping": {"one": 1},
    "int": 7,
    "str": "a name",
    "Path": Path("a"),
    "tuple": ("one", "two"),
    "bool": True,
}
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HydraError) and kind is not errors.CheckpointRemoved
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_shows_its_message_and_has_its_attributes(kind: type[HydraError]) -> None:
    parameters = inspect.signature(kind.__init__).parameters.values()
    given = {
        each.name: next(value for name, value in VALUES.items() if name in str(each.annotation))
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
    }
    error = kind("what was asked, what was there, what to do", **given)
    assert str(error).endswith("what was asked, what was there, what to do")
    assert {name: getattr(error, name) for name in given} == given


def test_a_checkpoint_that_was_removed_names_its_file() -> None:
    error = errors.CheckpointRemoved(Path("a/step-1"))
    assert "a/step-1" in str(error)
    assert error.file == Path("a/step-1")
