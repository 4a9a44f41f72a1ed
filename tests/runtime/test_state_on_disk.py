"""Optimizer state whose home is the disk: the bits of the plain loop, counted bytes, and a disk that fails."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, Checks, Run, SimulatedDevice, errors, optim
from hydra_ext._C.testing import FaultyFiles, FileFault, FileOperation, drain
from hydra_ext.optim.host_optimizer import HostOptimizer
from support.benches import assert_same
from support.runtime.leaving import ends_in
from support.runtime.native import BATCHES, BETWEEN, LAYERS, OPTIMIZERS, STEPS, WIDTH, stack, state, train

DEVICE_BUDGET = 2**19
STATE = 4 * WIDTH * WIDTH  # of one moment of one layer's weight: a multiple of the disk's; biases stay on the host


def on_host(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """What stays there: weights, gradients, and of the state what is small."""
    assert isinstance(optimizer, HostOptimizer)
    small = [size for sizes in optimizer.state_sizes().values() for size in sizes if size < _C.DISK_LEAST_BYTES]
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    return sum(map(in_slot, model.parameters())) + gradients + sum(small)


def in_slot(parameter: nn.Parameter) -> int:
    return -(-parameter.nbytes // _C.PAGE_ALIGNMENT) * _C.PAGE_ALIGNMENT


def budget_for(spilled: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Just enough for so many of the layers to have their state on the disk."""
    assert isinstance(optimizer, HostOptimizer)
    sizes = [size for sizes in optimizer.state_sizes().values() for size in sizes if size >= _C.DISK_LEAST_BYTES]
    layer = sum(sizes) // LAYERS
    return on_host(optimizer, model) + (LAYERS - spilled) * layer + (3 * layer if spilled else 0)


def context_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    spilled: int = LAYERS,
    files: FaultyFiles | None = None,
    poison: bool = True,
) -> hydra_ext.offload:
    return hydra_ext.offload(
        model,
        optimizer,
        budget=DEVICE_BUDGET,
        host_budget=budget_for(spilled, optimizer, model),
        spill_dir=folder,
        blocks=list(model.children()),
        device=SimulatedDevice(),
        activations=None,  # they would share the host budget
        checks=Checks(poison_hosts=poison, spill_files=files),
    )


@contextmanager
def offloaded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    spilled: int = LAYERS,
    files: FaultyFiles | None = None,
) -> Iterator[Run]:
    context = context_of(model, optimizer, folder, spilled=spilled, files=files)
    with context as run:
        yield run
        assert run.report().windows > 0
    assert not list(folder.iterdir())
    for values in optimizer.state.values():
        for value in values.values():
            value.data_ptr()  # its own bytes, on the host


def pair(name: str = "adamw", dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, Any]:
    plain, model = stack(dtype), stack(dtype)
    return plain, OPTIMIZERS[name](plain.parameters()), model, OPTIMIZERS[name](model.parameters())


@pytest.mark.parametrize("spilled", [4, 5, LAYERS])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_gives_the_bits_of_the_plain_one_and_moves_the_state_once_a_step(
    name: str, spilled: int, tmp_path: Path
) -> None:
    plain, theirs, model, ours = pair(name)
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path, spilled=spilled) as run:
        seen = train(model, ours)
        each = spilled * STATE * len(ours._MOMENTS)
        assert run.report().disk_bytes == each
        assert f"{each / 2**20:,.1f} MiB of optimizer state" in str(run.report())
        run.sync()
        report = run.report()
        assert report.disk_bytes == 0
        assert report.disk_written_bytes == STEPS * each
        assert report.disk_read_bytes == STEPS * each  # nothing for the first step, and once for the sync
        assert report.disk_working_bytes <= 3 * each // spilled
        assert report.deferred_updates == STEPS
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_so_does_one_in_bf16_with_masters_and_moments_in_bf16(master: str, tmp_path: Path) -> None:
    plain, model = stack(torch.bfloat16), stack(torch.bfloat16)
    theirs, ours = (
        optim.AdamW(each.parameters(), lr=1e-2, master=master, moments=torch.float32) for each in (plain, model)
    )
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path) as run:
        assert_same(expected, train(model, ours))
        assert run.report().disk_written_bytes > 0
    assert_same(state(plain, theirs), state(model, ours))


def test_a_step_over_microbatches_does_too(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    with offloaded(model, ours, tmp_path) as run:
        for batch in BATCHES:
            wanted = []
            for microbatch in batch.split(2):
                loss = plain(microbatch).pow(2).mean() / 4
                loss.backward()
                wanted.append(loss.detach() * 4)
            optim.clip_grad_norm_(plain.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
            output = run.step(batch.split(2), lambda microbatch: model(microbatch).pow(2).mean(), max_norm=0.1)
            assert torch.equal(output.loss, torch.stack(wanted).mean())
        assert run.report().fallbacks == run.report().refusals == 0
        assert run.report().disk_bytes > 0
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.parametrize("between", BETWEEN)
def test_what_user_code_does_between_steps_it_does_to_a_plain_model(between: str, tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    expected = train(plain, theirs, between=lambda: BETWEEN[between](plain, theirs))
    with offloaded(model, ours, tmp_path) as run:
        seen = train(model, ours, between=lambda: BETWEEN[between](model, ours))
        assert run.report().disk_written_bytes > 0
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


def test_what_was_brought_to_the_host_goes_back_in_the_next_step(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    train(plain, theirs), train(plain, theirs)
    with offloaded(model, ours, tmp_path) as run:
        train(model, ours)
        there = run.report().disk_bytes
        run.sync()
        assert run.report().disk_bytes == 0
        assert all(value.data_ptr() for each in ours.state.values() for value in each.values())
        train(model, ours)
        assert run.report().disk_bytes == there
    assert_same(state(plain, theirs), state(model, ours))


def test_state_that_is_loaded_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    train(plain, theirs)
    saved = copy.deepcopy({"model": plain.state_dict(), "optimizer": theirs.state_dict()})
    with offloaded(model, ours, tmp_path) as run:
        train(model, ours), train(model, ours)
        model.load_state_dict(saved["model"])
        ours.load_state_dict(saved["optimizer"])
        train(model, ours)
        assert run.report().disk_bytes == LAYERS * 2 * STATE
    train(plain, theirs)
    assert_same(state(plain, theirs), state(model, ours))


def test_state_that_is_replaced_is_still_there_for_who_kept_it(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()

    def replace(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        state = optimizer.state[model[2].weight]
        kept: torch.Tensor = state["exp_avg"]
        state["exp_avg"] = torch.ones(WIDTH, WIDTH)
        return kept

    with offloaded(model, ours, tmp_path) as run:
        train(plain, theirs), train(model, ours)
        run.core.update.finish()
        wanted, kept = replace(plain, theirs), replace(model, ours)
        train(plain, theirs), train(model, ours)
        assert torch.equal(kept, wanted)
        assert run.report().disk_bytes == LAYERS * 2 * STATE
    assert_same(state(plain, theirs), state(model, ours))


def test_several_threads_may_read_state_at_once(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    train(plain, theirs)
    with offloaded(model, ours, tmp_path) as run:
        train(model, ours)
        wanted = [value.sum() for each in theirs.state.values() for value in each.values()]
        for _ in range(5):
            with ThreadPoolExecutor(4) as threads:
                read = [
                    threads.submit(lambda: [value.sum() for each in ours.state.values() for value in each.values()])
                    for _ in range(4)
                ]
                assert all(all(map(torch.equal, found.result(), wanted)) for found in read)
            for block, layer in enumerate(model.children()):
                tensors = [tensor for weight in layer.parameters() for tensor in ours.tensors_beside(weight)]
                run.core.moves.settle_state_on_disk(block, tensors)
            assert run.report().disk_bytes == LAYERS * 2 * STATE


def test_with_room_for_all_nothing_is_on_the_disk(tmp_path: Path) -> None:
    _, _, model, ours = pair()
    with offloaded(model, ours, tmp_path, spilled=0) as run:
        train(model, ours)
        assert run.report().disk_written_bytes == 0
        assert "disk" not in str(run.report())


# ---- what does not go -----------------------------------------------------------------------------------------------


def test_a_budget_that_cannot_be_kept_says_what_would_do(tmp_path: Path) -> None:
    _, _, model, ours = pair()
    before = [parameter.clone() for parameter in model.parameters()]

    def within(budget: int) -> hydra_ext.offload:
        return hydra_ext.offload(
            model, ours, budget=DEVICE_BUDGET, host_budget=budget, spill_dir=tmp_path, blocks=list(model.children())
        )

    with pytest.raises(errors.HostBudgetTooSmall, match="host_budget=1024: tensors too small") as caught, within(1024):
        pass
    smallest = caught.value.smallest_budget
    assert smallest <= budget_for(LAYERS, ours, model)
    with pytest.raises(errors.HostBudgetTooSmall) as again, within(smallest - 1):
        pass
    assert again.value.smallest_budget == smallest
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    with within(smallest):
        train(model, ours)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host_budget": "1GiB"}, "host_budget= was given without spill_dir="),
        ({"spill_dir": "there"}, "spill_dir= was given without host_budget="),
    ],
)
def test_one_is_of_no_use_without_the_other(given: dict[str, Any], message: str) -> None:
    _, _, model, ours = pair()
    with pytest.raises(errors.InvalidArgument, match=message):
        hydra_ext.offload(model, ours, budget=DEVICE_BUDGET, **given)


def test_only_state_of_native_optimizers_can_go_there(tmp_path: Path) -> None:
    model = stack()
    theirs = torch.optim.AdamW(model.parameters())
    with pytest.raises(errors.InvalidArgument, match=r"one of hydra_ext\.optim"):
        hydra_ext.offload(model, theirs, budget=DEVICE_BUDGET, host_budget="1GiB", spill_dir=tmp_path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, _, model, ours = pair()
    with pytest.raises(errors.SpillError, match=r"'.*/file/below' cannot be made"):
        hydra_ext.offload(model, ours, budget=DEVICE_BUDGET, host_budget="1GiB", spill_dir=tmp_path / "file" / "below")


# ---- a disk that fails ----------------------------------------------------------------------------------------------


@contextmanager
def failing(
    fail: Callable[[FaultyFiles], None], tmp_path: Path, *, to_the_end: bool = True
) -> Iterator[tuple[Run, nn.Module, Any, FaultyFiles]]:
    """Trained, with nothing on its way to the disk, which will fail; ``to_the_end``: so will leaving the context."""
    files = FaultyFiles()
    _, _, model, ours = pair()
    context = context_of(model, ours, tmp_path, files=files, poison=False)
    with ends_in(errors.SpillError, context) if to_the_end else context as run:
        train(model, ours)
        drain(run.core)
        fail(files)
        yield run, model, ours, files
    assert files.met() > 0
    assert not list(tmp_path.iterdir())


def train_and_wait(run: Run, model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer)
    run.sync()


@pytest.mark.parametrize("nth", range(1, 2 * LAYERS + 1))
@pytest.mark.parametrize("operation", [FileOperation.READ, FileOperation.WRITE])
def test_a_step_whose_state_was_lost_is_an_error_and_not_a_wrong_weight(
    operation: FileOperation, nth: int, tmp_path: Path
) -> None:
    disk = failing(lambda files: files.fail(operation, FileFault.ERROR, nth, error=errno.EIO), tmp_path)
    with disk as (run, model, ours, files):
        with pytest.raises(errors.SpillError, match=r"Input/output error|are lost"):
            train_and_wait(run, model, ours)
        assert files.met() == 1  # the disk is whole again
        with pytest.raises(errors.SpillError):  # to go on from there would be a mistake
            train(model, ours)
    for parameter in model.parameters():
        assert bool(torch.isfinite(parameter).all())


@pytest.mark.parametrize("fault", [FileFault.FLIPPED, FileFault.SHORT])
def test_damage_is_noticed_and_short_reads_are_gone_on_with(fault: FileFault, tmp_path: Path) -> None:
    noticed = fault == FileFault.FLIPPED
    told = pytest.raises(errors.SpillError, match="not what was written") if noticed else nullcontext()
    disk = failing(lambda files: files.fail(FileOperation.READ, fault, 3), tmp_path, to_the_end=noticed)
    with disk as (run, model, ours, _), told:
        train_and_wait(run, model, ours)


def test_a_full_disk_is_told_before_anything_begins_and_with_room_it_does(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    for nth in (1, 2 * LAYERS):
        files = FaultyFiles()
        files.fail(FileOperation.ALLOCATE, FileFault.ERROR, nth, error=errno.ENOSPC)
        full = pytest.raises(errors.SpillError, match="No space left on device")
        with full, offloaded(model, ours, tmp_path, files=files):
            pytest.fail("it was entered")
        assert not ours.state
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path, files=files):
        assert_same(expected, train(model, ours))
        assert files.count(FileOperation.ALLOCATE) == 4 * LAYERS  # none but on entering
    assert_same(state(plain, theirs), state(model, ours))
