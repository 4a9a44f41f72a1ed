"""A mutation of the engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineMutation:
    """A text that occurs exactly once in a file of csrc/, and its replacement."""

    file: str
    before: str
    after: str
    breaks: str
    cpp: str = ""  # GoogleTest filter of the C++ tests to try first; they need no torch
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
        """Returns the reason why the mutation cannot be made: the engine has changed since the table was written."""
        path = root / self.file
        count = path.read_text().count(self.before) if path.exists() else 0
        return None if count == 1 else f"{self.file}: {self.before!r} occurs {count} times, not once"
