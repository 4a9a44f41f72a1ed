"""The budget inside torch's allocator: room for allocations of any size, streams, figures, and what is refused."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import optim
from hydra_ext.errors import BudgetTooSmall, InvalidBudget, InvalidDevice, StateError
from support.gpu import EMULATED, assert_same, mean_of_squares, offloaded, train, train_plain

MIB = 2**20


class Spread(nn.Module):
    """Layers of 4 MiB each. The output is that of the last one, ``spread`` times."""

    def __init__(self, *, layers: int = 60, spread: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(layers)])
        self.spread = spread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[None] * torch.linspace(0.5, 1, self.spread, device=x.device)[:, None, None]


def test_an_activation_of_any_size_finds_room_while_blocks_hold_it() -> None:
    """The first steps fill the budget with weights. Then the output takes a seventh of it, and backward five more."""
    budget, rows = 192 * MIB, 16
    model = Spread()
    data = [torch.randn(rows, 1024) for _ in range(6)]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        large = any(torch.equal(batch.cpu(), each) for each in data[2:5])
        model.spread = budget // 7 // batch.nbytes if large else 1
        return mean_of_squares(model, batch)

    expected = train_plain(model, data, loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offloaded(model, optimizer, budget=budget) as run:
        found = train(model, optimizer, data, loss_of)
        report = run.report()
        assert report.spills > 0
        assert report.peak_bytes <= budget
    assert_same(found, expected)


def test_once_the_order_is_known_nothing_is_thrown_out_for_an_allocation() -> None:
    """Activations of many sizes, which torch's allocator rounds and splits."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(24)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at, layer in enumerate(self.layers):
                rows = 64 + 293 * (at % 5)
                x = torch.cat([torch.tanh(layer(x[:rows])), x[rows:]])
            return x

    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with offloaded(model, optimizer, budget=330 * MIB) as run:
        seen = []
        for batch in torch.randn(7, 1300, 1024):
            train(model, optimizer, [batch], mean_of_squares)
            report = run.report()
            seen.append((report.spills, torch.cuda.memory_stats()["num_alloc_retries"], report.loads))
    spills, retries, loads = zip(*seen, strict=True)
    assert spills[-1] == spills[3], spills
    assert retries[-1] == retries[3], retries
    assert len({after - before for before, after in itertools.pairwise(loads[3:])}) == 1, loads


def test_settled_blocks_stay_while_the_activations_are_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with offloaded(model, optimizer, budget=192 * MIB) as run:
        moved = []
        for batch in torch.randn(12, 64, 1024):
            mean_of_squares(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(run.report().homes_moved_bytes)
        assert run.core.homes.statistics.settled > 0
        assert run.core.homes.statistics.returned == 0
    assert moved[-1] == moved[4], moved


def test_room_is_made_before_torch_has_to_refuse() -> None:
    """Blocks of 18 MiB, each in memory of its own, hold the budget. A tensor fits where one of them was."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(10)])
    with offloaded(model, None, budget=128 * MIB) as run, torch.no_grad():
        model(torch.randn(8, 2048))
        refusals, spills = torch.cuda.memory_stats()["num_ooms"], run.report().spills
        tensors = [torch.empty(16 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        assert run.report().spills > spills
        assert torch.cuda.memory_stats()["num_ooms"] == refusals
        del tensors


def test_memory_that_blocks_hold_is_found_from_another_stream() -> None:
    """torch's allocator reuses memory on its own stream only, until it has been released."""
    budget = 192 * MIB
    model = Spread()
    side = torch.cuda.Stream()
    with offloaded(model, None, budget=budget), torch.no_grad():
        model(torch.randn(8, 1024))
        model(torch.randn(8, 1024))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ones = torch.ones(budget // 2, dtype=torch.uint8, device="cuda")
            total = int(ones.sum())
        torch.cuda.current_stream().wait_stream(side)
        assert total == budget // 2


def test_free_pieces_together_serve_an_allocation_larger_than_each() -> None:
    """Every other piece of a large segment is free. What is asked next fits into the budget, and into no piece."""
    budget, piece = 1536 * MIB, 60 * MIB
    model = Spread(layers=64)
    with offloaded(model, torch.optim.SGD(model.parameters(), lr=0.1), budget=budget) as run:
        mean_of_squares(model, torch.randn(16, 1024)).backward()
        run.sync()
        held = torch.cuda.memory_allocated()
        assert held > 64 * 4 * MIB
        torch.empty(16 * piece, dtype=torch.uint8, device="cuda")  # freed at once: the segment of all pieces
        pieces = [torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(16)]
        pieces = pieces[::2]
        before = run.report().spills
        large = torch.empty(7 * piece, dtype=torch.uint8, device="cuda")
        report = run.report()
        assert report.spills == before
        assert report.peak_bytes <= budget
        del pieces, large


@pytest.mark.parametrize("budget", [64 * MIB, 1536 * MIB])
def test_settings_of_the_allocator_are_as_before(budget: int) -> None:
    """Segments are expandable meanwhile where the budget is large."""
    before = _settings()
    model = nn.Linear(4, 4)
    with offloaded(model, None, budget=budget):
        model(torch.ones(4))
        assert _is_expandable() == ("expandable_segments:True" in _settings()) == (budget > 1024 * MIB)
    assert _settings() == before
    assert not _is_expandable()


def test_segments_stay_expandable_until_the_last_large_budget_ends() -> None:
    before = _settings()
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    with offloaded(last, None, budget=1536 * MIB):
        last(torch.ones(4))
        with offloaded(first, None, budget=1536 * MIB):
            first(torch.ones(4))
        assert _is_expandable()
    assert _settings() == before
    assert not _is_expandable()


def test_expandable_segments_stay_off_if_the_user_says_so() -> None:
    before = _settings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        model = nn.Linear(4, 4)
        with offloaded(model, None, budget=1536 * MIB):
            model(torch.ones(4))
            assert _settings() == "expandable_segments:False"
            assert not _is_expandable()
        assert _settings() == "expandable_segments:False"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def _is_expandable() -> bool:
    """Whether a new segment is."""
    torch.cuda.empty_cache()
    memory = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    segments = {segment["address"]: segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    return bool(segments[max(address for address in segments if address <= memory.data_ptr())])


def _settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


def test_slots_are_of_the_home_stream_whatever_stream_brings_them() -> None:
    """A slot goes back behind all its uses, and only in the order of the home stream."""
    model = nn.Linear(1024, 1024)
    with offloaded(model, None, budget=64 * MIB) as run, torch.no_grad():
        with torch.cuda.stream(torch.cuda.Stream()):
            model(torch.randn(8, 1024))
        large = [
            segment["stream"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and block["size"] >= 4 * MIB
        ]
        assert large == [run._place._backend.home_stream]  # type: ignore[attr-defined]


def test_torch_may_reserve_the_sum_of_the_budgets_of_open_runs() -> None:
    def limit() -> float:
        return torch.cuda.get_per_process_memory_fraction() * torch.cuda.mem_get_info()[1] / MIB

    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with offloaded(first, None, budget=96 * MIB):
        first(torch.ones(4))
        with offloaded(second, None, budget=64 * MIB):
            second(torch.ones(4))
            assert limit() == pytest.approx(160)
        assert limit() == pytest.approx(96)


def test_an_allocation_above_the_budget_throws_nothing_out() -> None:
    budget = 128 * MIB
    model = Spread(layers=20)
    with offloaded(model, None, budget=budget) as run, torch.no_grad():
        model(torch.randn(8, 1024))
        held, asked = run.core.pager.resident_bytes, torch.cuda.memory_stats()
        assert held > budget // 2
        with pytest.raises(torch.OutOfMemoryError, match=r"more than the budget .*other tensors .* unused"):
            torch.empty(budget + 1, dtype=torch.uint8, device="cuda")
        now = torch.cuda.memory_stats()
        assert (run.report().evictions, run.core.pager.resident_bytes) == (0, held)
        for figure in ("num_alloc_retries", "num_ooms"):
            assert now[figure] == asked[figure], figure
        largest = torch.empty(budget - 8 * MIB, dtype=torch.uint8, device="cuda")  # may fit, and so makes room
        assert run.report().spills > 0
        del largest
        model(torch.randn(8, 1024))


def test_a_use_asks_for_memory_ahead_until_it_is_refused() -> None:
    """Memory that the plan counts on is in use. Each refusal costs torch's cache, so each use of a block has one."""
    budget = 96 * MIB
    wide = [nn.Linear(1024, 2048) if at % 2 == 0 else nn.Linear(2048, 1024) for at in range(6)]
    narrow = [nn.Linear(1024, 256) if at % 2 == 0 else nn.Linear(256, 1024) for at in range(24)]
    layers = [*wide, *narrow]
    model = nn.Sequential(*layers)
    refused: list[int] = []
    with hydra_ext.offload(model, None, budget=budget, device="cuda", blocks=layers, activations=None) as run:
        with torch.no_grad():
            model(torch.randn(8, 1024))
            model(torch.randn(8, 1024))
            for layer in layers:
                layer.register_forward_pre_hook(
                    lambda *_: refused.append(torch.cuda.memory_stats()["num_alloc_retries"])
                )
            beside = torch.empty(70 * MIB, dtype=torch.uint8, device="cuda")
            model(torch.randn(8, 1024))
        assert run.report().loads == 2 * len(layers)
        del beside
    of_uses = [after - before for before, after in itertools.pairwise(refused)]
    assert max(of_uses) == 1, of_uses


def test_slots_count_as_what_they_take_of_the_allocator() -> None:
    """The state of a block is 32 MiB and 16 KiB, and takes 34 MiB."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(2)])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with offloaded(model, optimizer, budget=512 * MIB) as run:
        backend = run._place._backend  # type: ignore[attr-defined]
        for batch in torch.randn(4, 8, 2048):
            mean_of_squares(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(run.report().homes) == 2
        assert backend.memory().slots >= 2 * (18 + 34) * MIB
    assert backend.memory().slots == 0


def test_no_room_is_made_under_capture() -> None:
    """What makes room waits for copies, and would spoil the capture."""
    model = Spread(layers=20)
    with offloaded(model, None, budget=64 * MIB) as run, torch.no_grad():
        model(torch.randn(8, 1024))
        torch.cuda.synchronize()
        held = run.core.pager.resident_bytes
        assert held > 32 * MIB
        with pytest.raises(torch.OutOfMemoryError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
        assert (run.report().spills, run.core.pager.resident_bytes) == (0, held)
        torch.cuda.synchronize()
        model(torch.randn(8, 1024))


def test_a_run_opens_while_an_allocation_waits_for_room() -> None:
    first = "import support.emulated_first\n" if EMULATED else ""
    body = "from support import allocations\nallocations.open_a_run_while_an_allocation_waits()\n"
    subprocess.run([sys.executable, "-c", first + body], check=True, timeout=60)


def test_the_users_peak_spans_the_run() -> None:
    model = nn.Linear(1024, 1024)
    with offloaded(model, None, budget=96 * MIB), torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        passing = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        del passing
        for _ in range(2):
            model(torch.randn(8, 1024))
        assert torch.cuda.max_memory_allocated() >= 40 * MIB


@pytest.mark.two_gpus
def test_the_current_device_stays_current() -> None:
    model = nn.Linear(1024, 1024)
    with hydra_ext.offload(model, None, budget=64 * MIB, device="cuda:1"):
        assert torch.cuda.current_device() == 0
        with torch.no_grad():
            assert model(torch.randn(8, 1024)).device.index == 1
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 0


def test_peak_bytes_are_those_of_the_run() -> None:
    before = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del before
    torch.cuda.empty_cache()
    model = nn.Linear(1024, 1024)
    with offloaded(model, None, budget=64 * MIB) as run, torch.no_grad():
        model(torch.randn(8, 1024))
        assert 0 < run.report().peak_bytes <= 64 * MIB


# ---- what is refused, before anything has changed --------------------------------------------------------------------


def test_memory_that_the_process_holds_already_is_named() -> None:
    held = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    model = nn.Linear(1024, 1024)
    pointer = model.weight.data_ptr()
    with pytest.raises(BudgetTooSmall, match=r"reserved 60\.00 MiB") as raised:
        hydra_ext.offload(model, None, budget=62 * MIB, device="cuda").__enter__()
    assert raised.value.needed > 64 * MIB
    assert model.weight.data_ptr() == pointer
    del held
    with offloaded(model, None, budget=62 * MIB), torch.no_grad():
        model(torch.randn(8, 1024))


def test_budgets_that_together_pass_the_device_are_refused() -> None:
    _, total = torch.cuda.mem_get_info()
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    with offloaded(first, None, budget=int(total * 0.6)), torch.no_grad():
        first(torch.randn(8, 64))
        with pytest.raises(InvalidBudget, match="other"):
            hydra_ext.offload(second, None, budget=int(total * 0.6), device="cuda").__enter__()
    with offloaded(second, None, budget=int(total * 0.6)), torch.no_grad():
        second(torch.randn(8, 64))


def test_another_allocator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(InvalidDevice, match="cudaMallocAsync"):
        hydra_ext.offload(nn.Linear(8, 8), None, budget=64 * MIB, device="cuda").__enter__()


def test_a_run_is_not_opened_under_capture() -> None:
    model = nn.Linear(8, 8)
    offload = hydra_ext.offload(model, None, budget=64 * MIB, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(StateError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        offload.__enter__()
    torch.cuda.synchronize()
    with offloaded(model, None, budget=64 * MIB), torch.no_grad():
        model(torch.randn(8, 8))


def test_an_out_of_memory_error_says_what_the_device_holds() -> None:
    model = Spread(layers=20)
    with offloaded(model, None, budget=64 * MIB), torch.no_grad():
        model(torch.randn(8, 1024))
        with pytest.raises(torch.OutOfMemoryError, match=r"other tensors .* unused") as raised:
            model(torch.randn(2**15, 1024))
        assert "64.00 MiB" in str(raised.value)
        model(torch.randn(8, 1024))
