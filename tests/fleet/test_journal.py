"""The journal: what it keeps, and what becomes of it when a write or a process ends in the middle."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_ext.errors import FleetInUse, JournalError
from hydra_ext.fleet.journal import Journal, read_only


def opened(folder: Path) -> list[Any]:
    journal = Journal(folder)
    journal.close()
    return list(journal.entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.write("entry", number=number)
    journal.close()
    return tmp_path


def test_entries_come_back_and_the_journal_is_held_once(folder: Path) -> None:
    journal = Journal(folder)
    assert [entry["number"] for entry in journal.entries] == [0, 1, 2]
    with pytest.raises(FleetInUse, match="another process runs a fleet"):
        Journal(folder)
    assert read_only(folder) == journal.entries
    journal.close()


@given(st.integers(0, 120))
def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(size: int) -> None:
    with TemporaryDirectory() as name:
        journal = Journal(Path(name))
        for number in range(3):
            journal.write("entry", number=number)
        text = journal.path.read_bytes()[:size]
        journal.close()
        journal.path.write_bytes(text)
        again = Journal(Path(name))
        again.write("last")
        again.close()
        assert [entry.get("number") for entry in opened(Path(name))] == [*range(text.count(b"\n")), None]


def test_damage_elsewhere_is_an_error_that_names_the_line(folder: Path) -> None:
    path = folder / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"number":1', b'"number":7'))
    with pytest.raises(JournalError, match=r"line 2 of .* is damaged"):
        opened(folder)


def test_a_full_disk_leaves_the_journal_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes a part of the line, and then nothing."""
    journal, write, calls = Journal(folder), os.write, [0]

    def short(descriptor: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(JournalError, match="No space left on device"):
            journal.write("entry", number=3)
    journal.write("entry", number=4)
    journal.close()
    assert [entry["number"] for entry in opened(folder)] == [0, 1, 2, 4]
