"""What a mutation of the engine is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineMutation:
    """A text that stands exactly once in a file of csrc/, and what is put in its place."""

    file: str
    before: str
    after: str
    breaks: str
    cpp: str = ""  # GoogleTest's filter for the C++ tests to try first; those see no torch
    python: tuple[str, ...] = ()  # the Python tests to try after those

    @property
    def key(self) -> str:
        return hashlib.sha256("\n".join((self.file, self.before, self.after)).encode()).hexdigest()[:12]

    @property
    def change(self) -> tuple[str, ...]:
        return (
            *(f"- {line.strip()}" for line in self.before.splitlines()),
            *(f"+ {line.strip()}" for line in self.after.splitlines()),
        )

    def place(self, root: Path) -> str:
        text = (root / self.file).read_text()
        return f"{self.file}:{text.count(chr(10), 0, text.index(self.before)) + 1}"

    def fault(self, root: Path) -> str | None:
        """Why it cannot be made: the engine has changed under the table."""
        path = root / self.file
        count = path.read_text().count(self.before) if path.exists() else 0
        return None if count == 1 else f"{self.file}: {self.before!r} stands there {count} times, not once"
