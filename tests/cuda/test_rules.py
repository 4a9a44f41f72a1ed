"""What only a GPU shows: waits of the host, streams, devices, the allocator, capture, forks."""

from __future__ import annotations

import copy
import multiprocessing
import os
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

from hydra_ext.errors import StateError
from support.gpu import EMULATED, assert_same, mean_of_squares, offloaded, on_stream, train, train_plain

MIB = 2**20
BUDGET = 256 * MIB
LONG_SLEEP = 200_000_000


def deep(width: int = 2048, layers: int = 24) -> nn.Sequential:
    """384 MiB."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])


def hold_back_gradients(run: object) -> None:
    with on_stream(run._place._backend.to_host_stream):  # type: ignore[attr-defined]
        torch.cuda._sleep(LONG_SLEEP)


def plain_gradients(model: nn.Module, batch: torch.Tensor, times: int) -> list[torch.Tensor]:
    plain = copy.deepcopy(model).cuda()
    for _ in range(times):
        mean_of_squares(plain, batch.cuda()).backward()
    return [parameter.grad.cpu() for parameter in plain.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "as_it_is"])
@pytest.mark.parametrize("times", [1, 3], ids=["one_backward", "accumulation_of_three"])
def test_gradients_are_there_when_backward_returns(times: int, poison: bool) -> None:
    model, batch = deep(), torch.randn(8, 2048)
    expected = plain_gradients(model, batch, times)
    with offloaded(model, None, budget=BUDGET, poison=poison) as run:
        for _ in range(times):
            loss = mean_of_squares(model, batch)
            hold_back_gradients(run)
            loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        found = [parameter.grad for parameter in model.parameters()]
        assert torch.equal(norm, torch.nn.utils.get_total_norm(expected))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "as_it_is"])
def test_an_optimizer_step_right_after_backward_writes_no_weight_that_is_still_read(poison: bool) -> None:
    model, data = deep(), [torch.randn(8, 2048) for _ in range(6)]
    expected = train_plain(model, data, mean_of_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offloaded(model, optimizer, budget=BUDGET, poison=poison) as run:
        with on_stream(run._place._backend.to_device_stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(LONG_SLEEP)
        found = train(model, optimizer, data, mean_of_squares)
    assert_same(found, expected)


@pytest.mark.parametrize("where", ["the_whole_loop", "the_forward_only"])
def test_a_users_side_stream_changes_nothing(where: str) -> None:
    model, data = deep(), [torch.randn(8, 2048) for _ in range(4)]
    expected = train_plain(model, data, mean_of_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    side = torch.cuda.Stream()

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG_SLEEP // 20)
            loss = mean_of_squares(model, batch)
        torch.cuda.current_stream().wait_stream(side)
        return loss

    with offloaded(model, optimizer, budget=BUDGET):
        if where == "the_whole_loop":
            with torch.cuda.stream(side):
                found = train(model, optimizer, data, mean_of_squares)
        else:
            found = train(model, optimizer, data, loss_of)
    assert_same(found, expected)


def test_microbatches_of_a_round_run_on_the_callers_stream() -> None:
    model, side = deep(layers=4), torch.cuda.Stream()
    seen: list[torch.cuda.Stream] = []

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_stream())
        return mean_of_squares(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with offloaded(model, optimizer, budget=BUDGET) as run, torch.cuda.stream(side):
        for step in torch.randn(2, 3, 8, 2048):
            run.step(list(step), loss_of)
        assert run.report().rounds > 0
    assert seen == [side] * 6


class Late(nn.Module):
    """64 MiB that another stream reads late. Then this one takes `noise` times a layer's memory and writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(4)])
        self.noise = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        home, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(home)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * LONG_SLEEP)
            for layer in self.layers:
                x = layer(x)
        for _ in range(self.noise):
            torch.full((2048, 2048), float("nan"), device="cuda")
        home.wait_stream(side)
        return x


def test_memory_of_a_block_is_not_used_again_while_another_stream_reads_it() -> None:
    """The layer that makes room has been left, and this stream has not waited for the other one."""
    model, x = Late(), torch.randn(8, 2048)
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(x.cuda()).cpu()
        torch.cuda.empty_cache()
        with offloaded(model, None, budget=79 * MIB) as run:
            for noise in (0, 0, 2, 2):
                model.noise = noise
                assert torch.equal(model(x).cpu(), expected)
            assert run.report().spills > 0


class Twice(nn.Module):
    """Multiplies by one weight on two streams. The caller has to wait for the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024) / 32)

    def forward(self, x: torch.Tensor, side: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
        here = nn.functional.linear(x, self.weight)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * LONG_SLEEP)
            return here, nn.functional.linear(x, self.weight)


def test_a_copy_of_autocast_is_there_for_each_stream_that_reads_it() -> None:
    """The model is left before the late stream has read the copy. Backward casts it again on this stream."""
    side = torch.cuda.Stream()

    def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        home, x = torch.cuda.current_stream(), x.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            here, there = model(x, side)
            noise = [torch.full((1024, 1024), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            home.wait_stream(side)
        loss = here.float().square().mean() + there.float().square().mean()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * LONG_SLEEP)
        # A retained graph keeps what both streams read.
        (gradient,) = torch.autograd.grad(loss, [x], retain_graph=True)
        torch.cuda.synchronize()
        del noise
        return [each.detach().cpu() for each in (here, there, gradient)]

    model, x = Twice(), torch.randn(64, 1024, device="cuda")
    plain = copy.deepcopy(model).cuda()
    expected = results(plain, x)
    assert torch.equal(expected[0], expected[1])
    del plain
    torch.cuda.empty_cache()
    with offloaded(model, None, budget=BUDGET):
        for _ in range(2):
            found = results(model, x)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("on_side", [False, True], ids=["main_stream", "side_stream"])
@pytest.mark.parametrize("grad", [False, True], ids=["without_gradients", "with_gradients"])
def test_a_pinned_input_may_be_written_when_the_forward_has_returned(grad: bool, on_side: bool) -> None:
    stream = torch.cuda.Stream() if on_side else torch.cuda.current_stream()
    model, batch = deep(width=512, layers=2), torch.randn(64, 512).pin_memory()
    before = batch.clone()
    with (
        torch.cuda.stream(stream),
        offloaded(model, None, budget=BUDGET, poison=False),
        torch.set_grad_enabled(grad),
    ):
        expected = model(batch).detach().cpu()
        for _ in range(2):
            torch.cuda._sleep(2 * LONG_SLEEP)
            found = model(batch)
            batch.fill_(float("nan"))
            assert torch.equal(found.detach().cpu(), expected)
            batch.copy_(before)


def test_two_threads_at_the_budget_do_not_lock_each_other_out() -> None:
    models = [deep(layers=16), deep(layers=16)]
    ended: list[int] = []

    def work(index: int, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with offloaded(model, optimizer, budget=BUDGET):
            train(model, optimizer, [torch.randn(256, 2048) for _ in range(5)], mean_of_squares)
        ended.append(index)

    threads = [Thread(target=work, args=pair, daemon=True) for pair in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert sorted(ended) == [0, 1]


def test_a_gradient_scaler_skips_the_step_of_an_infinite_gradient() -> None:
    model, batch = deep(layers=4), torch.randn(8, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    with offloaded(model, optimizer, budget=BUDGET):
        for infinite in (False, True, False, True):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.scale(mean_of_squares(model, batch)).backward()
            if infinite:
                next(model.parameters()).grad[0, 0] = float("inf")
            torch.cuda._sleep(LONG_SLEEP)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert changed is not infinite


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
def test_a_recurrent_model_trains_equal_and_keeps_its_storages() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(256, 256, num_layers=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    model = Last()
    data = [torch.randn(12, 4, 256) for _ in range(3)]
    expected = train_plain(model, data, mean_of_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offloaded(model, optimizer, budget=BUDGET) as run:
        faces = run.core.blocks.faces()
        storages = [face.untyped_storage()._cdata for face in faces]
        found = train(model, optimizer, data, mean_of_squares)
        assert [face.untyped_storage()._cdata for face in faces] == storages
    assert_same(found, expected)


def test_capturing_a_forward_into_a_graph_is_refused() -> None:
    model, batch = deep(layers=2), torch.randn(8, 2048, device="cuda")
    with offloaded(model, None, budget=BUDGET) as run, torch.no_grad():
        model(batch)
        with pytest.raises(StateError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(batch)
        torch.cuda.synchronize()
        assert run.core.pager.pins == 0
        model(batch)


def test_the_budget_is_what_torch_reserves_and_ends_with_the_context() -> None:
    model, data = deep(), [torch.randn(64, 2048) for _ in range(20)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with offloaded(model, optimizer, budget=BUDGET) as run:
        retries = []
        for batch in data:
            train(model, optimizer, [batch], mean_of_squares)
            assert torch.cuda.memory_reserved() <= BUDGET
            retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
        assert EMULATED or run._place._backend.memory().outside > 0  # type: ignore[attr-defined] # the context
    assert retries[-1] == retries[3], "the allocator goes on running out of memory after the order is known"
    torch.cuda.empty_cache()
    big = torch.empty(2 * BUDGET, dtype=torch.uint8, device="cuda")
    assert big.nbytes == 2 * BUDGET


def test_an_activation_that_can_never_fit_raises_out_of_memory_and_training_goes_on() -> None:
    model = deep(layers=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with offloaded(model, optimizer, budget=BUDGET):
        train(model, optimizer, [torch.randn(8, 2048)], mean_of_squares)
        with pytest.raises(torch.OutOfMemoryError):
            mean_of_squares(model, torch.randn(20_000, 2048))
        train(model, optimizer, [torch.randn(8, 2048)], mean_of_squares)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _in_a_child(queue: object) -> None:
    queue.put(_resident_bytes())  # type: ignore[attr-defined]


def test_forked_workers_get_no_copy_of_a_pinned_arena() -> None:
    width = 2048 if EMULATED else 4096
    model = deep(width=width, layers=32)  # 2 GiB; emulated half a GiB
    with offloaded(model, None, budget=BUDGET), torch.no_grad():
        model(torch.randn(1, width))
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        workers = [context.Process(target=_in_a_child, args=(queue,)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=60)
        assert all(worker.exitcode == 0 for worker in workers)
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        assert all(queue.get() <= _resident_bytes() - 0.9 * parameters for _ in workers)
        model(torch.randn(1, width))
