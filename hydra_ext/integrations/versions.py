"""Versions of other libraries that the integrations need."""

from __future__ import annotations

import re
from importlib import metadata

from hydra_ext.errors import MissingDependency


def expect_version(library: str, least: str, *, what: str) -> None:
    """
    Raises:
        MissingDependency: the library is not installed, or older than ``least``.
    """
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError as error:
        raise MissingDependency(
            f'{what} needs {library}, which is not installed: pip install "{library}>={least}"'
        ) from error
    if _numbers(found) < _numbers(least):
        raise MissingDependency(
            f'{what} needs {library} {least}, and {found} is installed: pip install "{library}>={least}"'
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Of its release: what follows them, such as rc1, is left out."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
