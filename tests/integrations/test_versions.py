"""Libraries that are missing or too old."""

from __future__ import annotations

from importlib import metadata

import pytest

from hydra_ext.errors import MissingDependency
from hydra_ext.integrations.versions import expect_version


@pytest.mark.parametrize(
    ("found", "least", "is_enough"),
    [
        ("1.1", "1.1", True),
        ("1.1.0rc1", "1.1", True),
        ("1.10", "1.9", True),
        ("1.9", "1.10", False),
        ("0.34.2", "1.1", False),
        ("5.23.0", "4.50", True),
    ],
)
def test_versions_are_compared_as_numbers(
    found: str, least: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: found)
    if is_enough:
        expect_version("library", least, what="This")
        return
    with pytest.raises(MissingDependency, match=f'This needs library {least}, and {found} is installed: pip install "'):
        expect_version("library", least, what="This")


def test_a_library_that_is_missing_is_told_with_the_command() -> None:
    with pytest.raises(MissingDependency, match=r'not installed: pip install "no-such-library>=1\.0"'):
        expect_version("no-such-library", "1.0", what="This")
