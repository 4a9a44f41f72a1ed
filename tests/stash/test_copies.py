"""A stash's copies under a host limit: what memory has no room for goes to the disk, and comes back bit for bit."""

from __future__ import annotations

import errno
import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hydra_ext import _C, SimulatedDevice
from hydra_ext._C.testing import FaultyFiles, FileFault, FileOperation
from hydra_ext.errors import SpillError
from hydra_ext.runtime.placement import devices
from support.stash.stashed import assert_same, gradients

ROWS, WIDTH, LAYERS = 64, 128, 6
SAVED = 4 * ROWS * WIDTH  # bytes of one interval; a layer saves two
LIMIT = 6 * SAVED  # half of what a pass saves
PAGE = 4096
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2], ids=["synchronous", "late-1", "late-2"])


class Limited:
    """A stash that keeps nothing on the device, and little in host memory."""

    def __init__(
        self, folder: Path, seed: int | None = None, limit: int = LIMIT, files: _C.FileOperations | None = None
    ) -> None:
        self.place = devices.choose(
            SimulatedDevice() if seed is None else SimulatedDevice(asynchronous=True, seed=seed)
        )
        self.arena = self.place.make_arena()
        self.core = _C.Stash(backend=self.place.make_backend(), arena=self.arena, device=self.place.device, budget=1)
        self.core.limit_host(limit, str(folder), files)
        self.peak = 0

    def pack(self, tensor: Tensor) -> _C.SavedTensor:
        saved = self.core.pack(tensor)
        self.peak = max(self.peak, self.arena.mapped_bytes)
        return saved

    def unpack(self, saved: _C.SavedTensor) -> Tensor:
        tensor = self.core.unpack(saved)
        self.peak = max(self.peak, self.arena.mapped_bytes)
        return tensor


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


@SEEDS
@pytest.mark.parametrize("limit", [5 * PAGE, 3 * SAVED, LIMIT, 100 * SAVED])
def test_memory_stays_below_the_limit_and_nothing_changes(seed: int | None, limit: int, tmp_path: Path) -> None:
    model, x = make()
    expected = gradients(model, lambda: model(x).square().mean())
    stash = Limited(tmp_path, seed, limit)
    for _ in range(2):
        found = gradients(model, lambda: model(x).square().mean(), saved_tensors_hooks(stash.pack, stash.unpack))
        assert_same(found, expected)
    gc.collect()
    figures = stash.core.statistics()
    copies = stash.core.copies()
    assert 0 < stash.peak <= copies.peak_host_bytes <= limit
    assert (copies.written_bytes > 0) == (limit < 2 * LAYERS * SAVED)
    assert copies.read_bytes <= copies.written_bytes  # what the graph's end still has alive is not read
    assert (copies.read_bytes > 0) == (copies.written_bytes > 0)
    assert figures.to_host_bytes == figures.saved_bytes
    assert figures.held_bytes == copies.host_bytes == copies.disk_bytes == 0
    assert not list(tmp_path.iterdir())


@SEEDS
def test_tensors_of_all_sizes_come_back_in_any_order(seed: int | None, tmp_path: Path) -> None:
    draws = random.Random(seed)
    stash = Limited(tmp_path, seed, limit=20 * PAGE)
    for _ in range(4):
        given = [torch.randn(draws.choice([300, 1024, 1025, 5000, 40_000])) for _ in range(12)]
        kept = [stash.pack(each.clone()) for each in given]
        for index in draws.sample(range(12), 12):
            assert torch.equal(stash.unpack(kept[index]), given[index])
        assert stash.core.copies().disk_bytes > 0
        kept.clear()
        assert stash.core.statistics().host_bytes == stash.core.copies().disk_bytes == 0
    assert stash.peak <= 20 * PAGE


def on_disk(stash: Limited, count: int = 6) -> tuple[list[Tensor], list[_C.SavedTensor]]:
    given = [torch.randn(ROWS, WIDTH) for _ in range(count)]
    return given, [stash.pack(each.clone()) for each in given]


@pytest.mark.parametrize("fault", [FileFault.ERROR, FileFault.FLIPPED])
def test_a_read_that_fails_raises_and_may_be_tried_again(fault: FileFault, tmp_path: Path) -> None:
    files = FaultyFiles()
    stash = Limited(tmp_path, limit=5 * PAGE, files=files)
    given, saved = on_disk(stash)
    stash.core.statistics()  # waits
    files.fail(FileOperation.READ, fault, 2, error=errno.EIO)
    with pytest.raises(SpillError, match="spill_dir"):
        stash.unpack(saved[-1])
    for each, kept in zip(given, saved, strict=True):
        assert torch.equal(stash.unpack(kept), each)
    assert files.met() == 1


def test_what_cannot_be_written_stays_on_the_device(tmp_path: Path) -> None:
    files = FaultyFiles()
    stash = Limited(tmp_path, limit=5 * PAGE, files=files)
    first = stash.pack(torch.ones(ROWS, WIDTH))
    stash.core.statistics()
    files.fail(FileOperation.WRITE, FileFault.ERROR, 3, error=errno.EIO)
    given, saved = on_disk(stash)
    assert all(torch.equal(stash.unpack(kept), each) for each, kept in zip(given, saved, strict=True))
    assert torch.equal(stash.unpack(first), torch.ones(ROWS, WIDTH))
    assert files.met() == 1
    saved.clear()
    assert stash.core.statistics().stayed == 1
    again, saved = on_disk(stash)  # the same extents, written anew
    assert all(torch.equal(stash.unpack(kept), each) for each, kept in zip(again, saved, strict=True))


def test_a_full_disk_raises_where_a_tensor_is_saved_and_loses_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    stash = Limited(tmp_path, limit=5 * PAGE, files=files)
    given, saved = on_disk(stash, 1)
    files.fail(FileOperation.ALLOCATE, FileFault.ERROR, 1, error=errno.ENOSPC)
    with pytest.raises(SpillError, match="Free some room, name another folder, or give a larger host_budget"):
        on_disk(stash, 1)
    more, others = on_disk(stash)
    for each, kept in zip([*given, *more], [*saved, *others], strict=True):
        assert torch.equal(stash.unpack(kept), each)


def test_on_a_full_disk_room_of_much_larger_copies_is_used_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    stash = Limited(tmp_path, limit=100 * PAGE, files=files)  # in chunks of ten pages
    host = [stash.pack(torch.ones(25 * PAGE // 4)) for _ in range(2)]
    large = stash.pack(torch.ones(10 * PAGE // 4))
    stash.core.statistics()
    del large
    files.fail(FileOperation.ALLOCATE, FileFault.ERROR, 1, persistent=True, error=errno.ENOSPC)
    given = torch.randn(300)
    saved = stash.pack(given.clone())
    stash.core.statistics()
    assert stash.core.copies().disk_bytes == 10 * PAGE
    assert torch.equal(stash.unpack(saved), given)
    assert len(host) == 2


def test_without_room_for_a_page_on_its_way_nothing_leaves(tmp_path: Path) -> None:
    stash = Limited(tmp_path, limit=5 * PAGE - 1)
    given, saved = on_disk(stash)
    assert all(torch.equal(stash.unpack(kept), each) for each, kept in zip(given, saved, strict=True))
    assert stash.core.copies().written_bytes == stash.core.copies().peak_host_bytes == 0


def test_a_copy_outlives_the_stash(tmp_path: Path) -> None:
    stash = Limited(tmp_path, limit=5 * PAGE)
    model, x = make()
    with saved_tensors_hooks(stash.pack, stash.unpack):
        loss = model(x).square().mean()
    stash.core.close()
    backward: Callable[[], None] = loss.backward  # type: ignore[assignment]
    backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert_same(found, [parameter.grad for parameter in model.parameters()])  # type: ignore[list-item, arg-type]
