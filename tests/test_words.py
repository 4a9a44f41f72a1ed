"""Words that the project does not use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "words.txt"
NOT_KEPT = {
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".venv",
    "__pycache__",
    "build",
    "dist",
}
BANNED = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def texts(folder: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Of all files that the project keeps, but for the list."""
    for path in sorted(folder.iterdir()):
        if path.name in NOT_KEPT or path == LIST:
            continue
        if path.is_dir():
            yield from texts(path)
            continue
        with suppress(UnicodeDecodeError):  # of a picture
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_banned_words_are_not_used() -> None:
    assert len(BANNED) >= 4
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, BANNED))})\b", re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
