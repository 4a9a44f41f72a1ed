"""What a rehearsal knows of tensors is kept by their memory, and keeps none of it."""

from __future__ import annotations

import torch

from hydra_ext.state.memory import ByStorage, Undo


def test_views_are_known_by_the_memory_they_share() -> None:
    notes: ByStorage[str] = ByStorage()
    whole = torch.zeros(4, 4)
    notes.put(whole, "known")
    assert notes.get(whole[1:, 2]) == "known"
    assert notes.get(whole.clone()) is None


def test_memory_that_is_gone_is_not_taken_for_new_memory_and_is_forgotten() -> None:
    notes: ByStorage[int] = ByStorage()
    for number in range(50):
        notes.put(torch.zeros(8), number)
    assert all(notes.get(torch.zeros(8)) is None for _ in range(50))
    assert len(list(notes.contents())) == 50
    kept = torch.zeros(8)
    notes.put(kept, 50)
    notes.purge()
    assert list(notes.contents()) == [50]


def test_tensors_without_storage_are_known_by_themselves() -> None:
    notes: ByStorage[str] = ByStorage()
    sparse = torch.eye(3).to_sparse()
    notes.put(sparse, "known")
    notes.purge()
    assert notes.get(sparse) == "known"


def test_a_write_is_undone_in_the_whole_memory() -> None:
    whole = torch.arange(6.0)
    undo = Undo()
    undo.before_write(whole[:2])
    whole.fill_(7)
    undo.before_write(whole)
    undo.restore()
    assert torch.equal(whole, torch.arange(6.0))
