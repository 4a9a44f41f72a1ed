"""Tables at home on the disk: rows are read and written there. What fails on the way is told, and loses nothing else.

That the bits are those of the host is shown by test_row_steps.py, whose tests have both homes.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Run
from hydra_ext.errors import HostBudgetTooSmall, InvalidArgument, SpillError
from hydra_ext.optim import SGD, Adam, AdamW
from hydra_ext.runtime.placement.spilling import tables_to_spill
from hydra_ext.tables.disk_home import DiskHome
from support import larger_tables
from support.tables import BUDGET, HOST_BUDGET, ROWS, WIDTH, Recommender, batches, bits, rows_of

ROW = 4 * WIDTH
TABLE = ROWS * ROW
Faults = _C.testing.FaultyFiles
FileFault, FileOperation = _C.testing.FileFault, _C.testing.FileOperation


def offloaded(model: nn.Module, optimizer: Any, folder: Path, files: Any = None, **options: Any) -> hydra_ext.offload:
    checks = hydra_ext.Checks(spill_files=files)
    given = {"budget": BUDGET, "host_budget": HOST_BUDGET, "spill_dir": folder, "device": "simulated", **options}
    return hydra_ext.offload(model, optimizer, checks=checks, **given)


def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    loss = nn.functional.mse_loss(model(batch), batch["target"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def model_of(seed: int = 5, **options: Any) -> Recommender:
    torch.manual_seed(seed)
    return Recommender(sparse=False, **options)


def homes(run: Run) -> list[Any]:
    return [table.disk for table in run.tables]


def caught_up(given: list[Any], *, decays: bool) -> int:
    """Rows that are behind when a batch looks them up: without decay only those that were stepped before."""
    count = 0
    for name in ("one", "indices"):
        seen = [set(batch[name].tolist()) for batch in given]
        for number in range(1, len(seen)):
            met = set().union(*seen[:number])
            count += len((seen[number] if decays else seen[number] & met) - seen[number - 1])
    return count


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_what_moves_is_counted_and_is_the_rows(kind: Any, tmp_path: Path) -> None:
    """A step reads the rows of a lookup, the moments of those that are behind, and all of those that it changes."""
    model, given = model_of(), batches(4)
    optimizer = kind(model.parameters(), lr=0.1)
    tensors = 1 if kind is SGD else 3
    with offloaded(model, optimizer, tmp_path) as run:
        before = run.report().tables
        assert before is not None
        assert before.disk.written_bytes == before.disk.nbytes == 2 * TABLE
        assert before.disk.read_bytes == 0
        for batch in given:
            step(model, optimizer, batch)
        after = run.report().tables
        assert after is not None
        rows = rows_of(given, unique=True)
        behind = 0 if kind is SGD else caught_up(given, decays=kind is AdamW)
        assert after.disk.read_bytes == (rows + (tensors - 1) * behind + tensors * rows) * ROW
        assert after.disk.written_bytes - before.disk.written_bytes == tensors * rows * ROW
        assert after.disk.nbytes == 2 * tensors * TABLE
        assert [home.whole_reads for home in homes(run)] == [0, 0]
        assert f"{2 * tensors * TABLE / 2**20:.1f} MiB on the disk" in str(run.report())
    assert not list(tmp_path.iterdir())
    assert model.one.weight.untyped_storage().nbytes() == TABLE


def test_rows_at_rest_do_not_move_when_all_catch_up(tmp_path: Path) -> None:
    model, given = model_of(), batches(64)
    optimizer = Adam(model.parameters(), lr=0.1)
    with offloaded(model, optimizer, tmp_path) as run:
        for batch in given[:-1]:
            step(model, optimizer, batch)
        before = run.report().tables
        step(model, optimizer, given[-1])
        after = run.report().tables
        assert before is not None
        assert after is not None
        assert [table.steps.caught_up for table in run.tables] == [1, 1]  # type: ignore[union-attr]
    met = sum(len({row for batch in given for row in batch[name].tolist()}) for name in ("one", "indices"))
    assert after.disk.written_bytes - before.disk.written_bytes <= (met + rows_of(given[-1:], unique=True)) * 3 * ROW
    assert met < ROWS // 4


def test_the_process_holds_what_the_budgets_say(tmp_path: Path) -> None:
    plain, seen = larger_tables.observe(None), larger_tables.observe(tmp_path)
    assert seen.losses == plain.losses
    assert seen.sums == plain.sums
    assert len(set(plain.losses)) == larger_tables.STEPS
    assert seen.on_disk == larger_tables.WHOLE >= 10 * larger_tables.HOST_BUDGET
    assert seen.whole_reads == 0
    assert seen.peak <= larger_tables.MOST


def test_the_largest_tables_leave_first_and_no_more_than_must() -> None:
    sizes = [10 * _C.DISK_LEAST_BYTES, 30 * _C.DISK_LEAST_BYTES, 20 * _C.DISK_LEAST_BYTES, 10]
    assert tables_to_spill(sizes, 0) == []
    assert tables_to_spill(sizes, 1) == [1]
    assert tables_to_spill(sizes, 31 * _C.DISK_LEAST_BYTES) == [1, 2]
    assert tables_to_spill(sizes, 2**40) == [1, 2, 0], "small ones stay"


def test_tables_stay_on_the_host_where_there_is_room(tmp_path: Path) -> None:
    model = model_of()
    optimizer = AdamW(model.parameters())
    with offloaded(model, optimizer, tmp_path, host_budget=8 * TABLE) as run:
        step(model, optimizer, batches(1)[0])
        assert homes(run) == [None, None]
        report = run.report().tables
        assert report is not None
        assert report.disk.nbytes == 0
        assert report.stepped_by_rows == report.names


def test_a_table_that_steps_as_a_whole_moves_whole(tmp_path: Path) -> None:
    """Its moments are not fp32, so a step would need all of it on the host."""
    plain, model = model_of(), model_of()
    optimizers = [AdamW(each.parameters(), lr=0.1, moments=torch.bfloat16) for each in (plain, model)]
    with offloaded(model, optimizers[1], tmp_path, budget=3 * TABLE, host_budget=12 * TABLE) as run:
        for batch in batches(2):
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
        assert not run.tables
    assert bits(model.one.weight.detach()).equal(bits(plain.one.weight.detach()))


def test_a_model_is_evaluated_by_rows_without_an_optimizer(tmp_path: Path) -> None:
    plain, model = model_of(), model_of()
    (batch,) = batches(1)
    with torch.no_grad(), offloaded(model, None, tmp_path) as run:
        assert model(batch).equal(plain(batch))
        assert run.report().tables.disk.read_bytes == rows_of([batch], unique=True) * ROW  # type: ignore[union-attr]
        assert model.one.weight[3:5].equal(plain.one.weight[3:5])
        assert [home.whole_reads for home in homes(run)] == [1, 0]
    assert type(model.one.weight) is nn.Parameter


def test_norms_that_shorten_rows_write_them_there(tmp_path: Path) -> None:
    plain, model = model_of(max_norm=2.0), model_of(max_norm=2.0)
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    with offloaded(model, optimizers[1], tmp_path) as run:
        for batch in batches(4):
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
        assert [home.whole_reads for home in homes(run)] == [0, 0]
        assert run.report().tables.rows_written_back_bytes > 0  # type: ignore[union-attr]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))


def test_a_table_that_something_else_can_read_stays_on_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = model_of(), model_of()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    view = model.one.weight.detach()
    with caplog.at_level(logging.WARNING), offloaded(model, optimizers[1], tmp_path) as run:
        for batch in batches(3):
            step(plain, optimizers[0], batch)
            step(model, optimizers[1], batch)
            assert view.equal(plain.one.weight)
        assert [home.is_away(table.host) for home, table in zip(homes(run), run.tables, strict=True)] == [False, True]
        del view
        step(model, optimizers[1], batches(1)[0])
        assert homes(run)[0].is_away(run.tables[0].host), "as soon as nothing else can"
    assert sum("stays on the host" in record.message for record in caplog.records) == 1


def test_moments_from_before_go_there_and_come_back(tmp_path: Path) -> None:
    plain, model = model_of(), model_of()
    optimizers = [Adam(each.parameters(), lr=0.1) for each in (plain, model)]
    for batch in batches(6):
        step(plain, optimizers[0], batch)
    for part in (batches(6)[:3], batches(6)[3:]):
        with offloaded(model, optimizers[1], tmp_path) as run:
            for batch in part:
                step(model, optimizers[1], batch)
            assert run.report().tables.disk.nbytes == 6 * TABLE  # type: ignore[union-attr]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))
        for name, value in optimizers[0].state[other].items():
            assert bits(optimizers[1].state[one][name]).equal(bits(value))


def test_state_that_is_loaded_inside_goes_there_with_the_next_step(tmp_path: Path) -> None:
    plain, model = model_of(), model_of()
    optimizers = [Adam(each.parameters(), lr=0.1) for each in (plain, model)]
    step(plain, optimizers[0], batches(1)[0])
    with offloaded(model, optimizers[1], tmp_path) as run:
        step(model, optimizers[1], batches(2)[1])
        model.load_state_dict(plain.state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for batch in batches(3):
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
        assert run.report().tables.disk.nbytes == 6 * TABLE  # type: ignore[union-attr]


def test_checkpoints_are_written_and_read_without_bringing_tables_home(tmp_path: Path) -> None:
    plain = model_of()
    reference = AdamW(plain.parameters(), lr=0.1)
    given = batches(5)
    losses = [step(plain, reference, batch) for batch in given]
    for first, last in ((0, 3), (3, 5)):
        model = model_of(seed=first + 1 if first else 5)
        optimizer = AdamW(model.parameters(), lr=0.1)
        with offloaded(model, optimizer, tmp_path / "spill") as run:
            assert (run.load(tmp_path / "saved") is None) == (first == 0)
            assert all(home.is_away(table.host) for home, table in zip(homes(run), run.tables, strict=True))
            for number in range(first, last):
                assert step(model, optimizer, given[number]).equal(losses[number])
            reads = [home.whole_reads for home in homes(run)]
            run.save(tmp_path / "saved")
            assert [home.whole_reads for home in homes(run)] == reads
            assert run.report().tables.disk.nbytes == 6 * TABLE  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_table_that_is_trained_later_steps_as_a_whole(kind: Any, tmp_path: Path) -> None:
    """It had no gradient on entering, so native steps read its memory, which has to be there."""
    plain, model = model_of(), model_of()
    optimizers = [kind(each.parameters(), lr=0.1) for each in (plain, model)]
    step(plain, optimizers[0], batches(1)[0])
    step(model, optimizers[1], batches(1)[0])  # its moments are there before
    for each in (plain, model):
        each.one.weight.requires_grad_(False)
    with offloaded(model, optimizers[1], tmp_path):
        for number, batch in enumerate(batches(4)):
            if number == 2:
                for each in (plain, model):
                    each.one.weight.requires_grad_(True)
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))


def test_another_native_optimizer_finds_the_tables_on_the_host(tmp_path: Path) -> None:
    plain, model = model_of(), model_of()
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    with offloaded(model, None, tmp_path):
        for batch in batches(2):
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))


def test_the_files_end_with_the_context(tmp_path: Path) -> None:
    def files() -> int:
        links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return sum(link.startswith(str(tmp_path)) for link in links)

    model = model_of()
    optimizer = AdamW(model.parameters())
    with offloaded(model, optimizer, tmp_path) as run:
        step(model, optimizer, batches(1)[0])
        assert files() >= 6
        before = run.report().tables
    assert files() == 0, "although the run is still there"
    after = run.report().tables
    assert before is not None
    assert after is not None
    assert after.disk.nbytes == 0
    assert after.disk.read_bytes >= before.disk.read_bytes + 6 * TABLE


def test_rows_are_read_ahead_and_no_number_changes(tmp_path: Path) -> None:
    plain, model, files = model_of(), model_of(), Faults()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    given = batches(4)
    hints = []
    with offloaded(model, optimizers[1], tmp_path, files) as run:
        for number, batch in enumerate(given):
            for later in given[number + 1 : number + 2]:
                before = files.hints()
                hydra_ext.read_ahead({model.one: later["one"], model.bags: later["indices"]})
                hints.append(files.hints() - before)
            moved = run.report().tables.disk.read_bytes  # type: ignore[union-attr]
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
            assert run.report().tables.disk.read_bytes > moved  # type: ignore[union-attr]
    assert hints[0] >= 2, "of the weights alone, before the first step"
    assert min(hints[1:]) >= 6
    hydra_ext.read_ahead({model.one: given[0]["one"]})  # outside there is nothing to do


def test_what_cannot_be_read_ahead_is_told(tmp_path: Path) -> None:
    model = model_of()
    with offloaded(model, None, tmp_path):
        with pytest.raises(InvalidArgument, match=r"a Linear.*nn\.Embedding"):
            hydra_ext.read_ahead({model.bottom: torch.tensor([1])})
        with pytest.raises(IndexError, match="out of range"):
            hydra_ext.read_ahead({model.one: torch.tensor([ROWS])})


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_full_disk_is_told_on_entering_and_changes_nothing(nth: int, tmp_path: Path) -> None:
    plain, model = model_of(), model_of()
    optimizer, files = AdamW(model.parameters()), Faults()
    files.fail(FileOperation.ALLOCATE, FileFault.ERROR, nth, error=errno.ENOSPC)
    with pytest.raises(SpillError, match="no room"), offloaded(model, optimizer, tmp_path, files):
        pass
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(one) is nn.Parameter
        assert bits(one.detach()).equal(bits(other.detach()))
    with offloaded(model, optimizer, tmp_path, files):
        step(model, optimizer, batches(1)[0])


def test_a_budget_below_what_is_kept_of_rows_says_what_is_needed(tmp_path: Path) -> None:
    model = model_of()
    optimizer = AdamW(model.parameters())
    with pytest.raises(HostBudgetTooSmall) as caught, offloaded(model, optimizer, tmp_path, host_budget=100_000):
        pass
    with offloaded(model, optimizer, tmp_path, host_budget=caught.value.needed):
        step(model, optimizer, batches(1)[0])


def test_what_a_failed_move_has_left_is_in_no_new_moment(tmp_path: Path) -> None:
    files = Faults()
    weight = torch.rand(40_000, 16)
    home = DiskHome(weight, 1, str(tmp_path), files)
    moment = torch.rand(40_000, 16)
    files.fail(FileOperation.WRITE, FileFault.ERROR, 2, error=errno.EIO)
    with pytest.raises(SpillError):
        home.leave(moment, strict=True)
    assert not home.is_away(moment)
    del moment
    assert not home.new(weight).count_nonzero()
    home.close()


@pytest.mark.parametrize("fault", [FileFault.ERROR, FileFault.FLIPPED])
def test_a_read_that_fails_may_be_tried_again(fault: Any, tmp_path: Path) -> None:
    plain, model, files = model_of(), model_of(), Faults()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    with offloaded(model, optimizers[1], tmp_path, files):
        for batch in batches(3):
            files.fail(FileOperation.READ, fault, 2, error=errno.EIO)
            with pytest.raises(SpillError):
                model(batch)
            assert step(model, optimizers[1], batch).equal(step(plain, optimizers[0], batch))
    assert files.met() == 3
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))


@pytest.mark.cases(3)
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 6, 12, 24])
def test_a_read_that_fails_in_a_step_leaves_rows_of_before(nth: int, tmp_path: Path) -> None:
    plain, model, files = model_of(), model_of(), Faults()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    first, second = batches(2)
    with offloaded(model, optimizers[1], tmp_path, files):
        step(model, optimizers[1], first)
        step(plain, optimizers[0], first)
        before = [table.detach().clone() for table in (plain.one.weight, plain.bags.weight)]
        nn.functional.mse_loss(model(second), second["target"]).backward()
        files.fail(FileOperation.READ, FileFault.ERROR, nth, error=errno.EIO)
        with pytest.raises(SpillError, match="reading"):
            optimizers[1].step()
        step(plain, optimizers[0], second)
        tables = zip((model.one, model.bags), (plain.one, plain.bags), before, strict=True)
        for module, after, old in tables:
            weight = module.weight.detach()
            new = (weight == after.weight).all(1)
            assert (new | (weight == old).all(1)).all()


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 40])
def test_rows_that_could_not_be_written_are_lost_and_all_others_are_right(nth: int, tmp_path: Path) -> None:
    """Wherever an update fails, a row is what it was, or what it would be, or raises: never a part of both."""
    plain, model, files = model_of(), model_of(), Faults()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    first, second = batches(2)
    context = offloaded(model, optimizers[1], tmp_path, files)
    context.__enter__()
    step(model, optimizers[1], first)
    step(plain, optimizers[0], first)
    before = [table.detach().clone() for table in (plain.one.weight, plain.bags.weight)]
    nn.functional.mse_loss(model(second), second["target"]).backward()
    files.fail(FileOperation.WRITE, FileFault.ERROR, nth, error=errno.EIO)
    with pytest.raises(SpillError, match="writing"):
        optimizers[1].step()
    step(plain, optimizers[0], second)
    lost = seen = 0
    named = {*second["one"].tolist(), *second["indices"].tolist(), *range(0, ROWS, 97)}
    with torch.no_grad():
        for module, after, old in zip((model.one, model.bags), (plain.one, plain.bags), before, strict=True):
            for row in named:
                try:
                    found = module(torch.tensor([[row]])).flatten()
                except SpillError:
                    lost += 1
                else:
                    assert found.equal(after.weight[row]) or found.equal(old[row])
                    seen += 1
    assert 0 < lost < seen
    with pytest.raises(SpillError, match="is lost"):
        sum(parameter.sum() for parameter in (model.one.weight, model.bags.weight))
    with pytest.raises(SpillError, match="is lost"):
        context.__exit__(None, None, None)
    with pytest.raises(SpillError, match="were lost when its context ended"):
        sum(parameter.sum() for parameter in (model.one.weight, model.bags.weight))
    with pytest.raises(SpillError, match="were lost when its context ended"):
        offloaded(model, optimizers[1], tmp_path).__enter__()


def test_a_checkpoint_replaces_what_was_lost(tmp_path: Path) -> None:
    plain, model, files = model_of(), model_of(), Faults()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    given = batches(3)
    with offloaded(model, optimizers[1], tmp_path / "spill", files) as run:
        for batch in given[:2]:
            step(plain, optimizers[0], batch)
            step(model, optimizers[1], batch)
        run.save(tmp_path / "saved")
        nn.functional.mse_loss(model(given[2]), given[2]["target"]).backward()
        files.fail(FileOperation.WRITE, FileFault.ERROR, 2, error=errno.EIO)
        with pytest.raises(SpillError, match="writing"):
            optimizers[1].step()
        with pytest.raises(SpillError, match="is lost"):
            model.one.weight.sum() + model.bags.weight.sum()
        run.load(tmp_path / "saved")
        assert step(model, optimizers[1], given[2]).equal(step(plain, optimizers[0], given[2]))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))
