"""Blocks whose home is the GPU are updated there by our kernels: the bits of the host's update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext import optim
from support.gpu import jitter, offloaded, sleepy

MIB = 2**20
STEPS = 6


def stack(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024, dtype=dtype) for _ in range(6)])


# Small enough for fp16 to stay finite.
RATE = 1e-3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=RATE),
    "adamw, fp32 master": lambda parameters: optim.AdamW(parameters, lr=RATE, master="fp32"),
    "adamw, bf16 moments": lambda parameters: optim.AdamW(parameters, lr=RATE, moments=torch.bfloat16),
    "adam": lambda parameters: optim.Adam(parameters, lr=RATE, weight_decay=0.1),
    "sgd": lambda parameters: optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True),
}


def train_with_updates_on_the_host(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor, max_norm: float
) -> list[torch.Tensor]:
    on_gpu = copy.deepcopy(model).cuda()
    seen = []
    for batch in batches:
        with torch.no_grad():
            for host, device in zip(model.parameters(), on_gpu.parameters(), strict=True):
                device.copy_(host)
        loss = on_gpu(batch.cuda()).pow(2).mean()
        loss.backward()
        for host, device in zip(model.parameters(), on_gpu.parameters(), strict=True):
            host.grad = None if device.grad is None else device.grad.cpu()
            device.grad = None
        seen += [loss.detach().cpu(), optim.clip_grad_norm_(model.parameters(), max_norm)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_on_the_gpu_gives_the_bits_of_one_on_the_host(name: str, dtype: torch.dtype) -> None:
    plain, model = stack(dtype), stack(dtype)
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    batches = torch.randn(STEPS, 32, 1024).to(dtype)
    expected = train_with_updates_on_the_host(plain, theirs, batches, 1e-2)
    seen = []
    with offloaded(model, ours, budget=1024 * MIB) as run:
        for batch in batches:
            loss = model(batch).pow(2).mean()
            loss.backward()
            seen += [loss.detach().cpu(), optim.clip_grad_norm_(model.parameters(), 1e-2)]
            ours.step()
            ours.zero_grad()
        report = run.report()
        assert len(report.homes) == report.blocks
        assert report.homes_moved_bytes > 0
    for step, (a, b) in enumerate(zip(seen, expected, strict=True)):
        assert torch.equal(a, b), f"step {step // 2}: {a.item()} and {b.item()}"
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in ours.state[a].items():
            assert torch.equal(value, theirs.state[b][key]), key


def test_blocks_leave_the_gpu_for_activations_that_grow() -> None:
    plain, model = stack(torch.float32), stack(torch.float32)
    theirs, ours = OPTIMIZERS["adamw"](plain.parameters()), OPTIMIZERS["adamw"](model.parameters())
    few, many = torch.randn(4, 32, 1024), torch.randn(2, 2048, 1024)
    expected = [
        *train_with_updates_on_the_host(plain, theirs, few, 1e-2),
        *train_with_updates_on_the_host(plain, theirs, many, 1e-2),
    ]
    seen = []
    with offloaded(model, ours, budget=160 * MIB) as run:
        for batch in [*few, *many]:
            loss = model(batch).pow(2).mean()
            loss.backward()
            seen += [loss.detach().cpu(), optim.clip_grad_norm_(model.parameters(), 1e-2)]
            ours.step()
            ours.zero_grad()
        assert run.core.homes.statistics.settled > 0
        assert run.core.homes.statistics.returned > 0
    for a, b in zip(seen, expected, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["backward", "the update", "the whole step"])
def test_homes_follow_a_users_side_stream(where: str) -> None:
    """What runs there is late. The user has not ordered the streams: gradients and weights are the host's to them."""
    plain, model = stack(torch.float32), stack(torch.float32)
    theirs, ours = OPTIMIZERS["adamw"](plain.parameters()), OPTIMIZERS["adamw"](model.parameters())
    batches = torch.randn(STEPS, 32, 1024)
    expected = train_with_updates_on_the_host(plain, theirs, batches, 1e-2)
    side, seen = torch.cuda.Stream(), []
    with offloaded(model, ours, budget=1024 * MIB) as run:
        for batch in batches:
            with torch.cuda.stream(side) if where != "the update" else nullcontext():
                loss = model(batch).pow(2).mean()
                torch.cuda._sleep(100_000_000)
                loss.backward()
            with torch.cuda.stream(side) if where != "backward" else nullcontext():
                seen += [loss.detach(), optim.clip_grad_norm_(model.parameters(), 1e-2)]
                torch.cuda._sleep(100_000_000)
                ours.step()
                ours.zero_grad()
        torch.cuda.synchronize()
        assert run.core.homes.statistics.settled > 0
    for step, (a, b) in enumerate(zip(seen, expected, strict=True)):
        assert torch.equal(a.cpu(), b), f"step {step // 2}: {a.item()} and {b.item()}"
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_part_of_a_gradient_is_added_when_the_part_of_another_stream_is_there() -> None:
    """The first backward is late on its stream, and the second one on another does not wait for it."""
    model = stack(torch.float32)
    plain = copy.deepcopy(model).cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.0)  # so that both models keep their weights
    first, second = torch.randn(2, 32, 1024)
    for part in (first, second):
        plain(part.cuda()).pow(2).mean().backward()
    expected = [parameter.grad.cpu() for parameter in plain.parameters()]  # type: ignore[union-attr]
    side = torch.cuda.Stream()
    with offloaded(model, optimizer, budget=1024 * MIB) as run:
        for _ in range(3):
            model(first).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.cuda.stream(side):
            loss = model(first).pow(2).mean()
            torch.cuda._sleep(400_000_000)
            loss.backward()
        del loss  # and with it what torch knows of the side stream
        model(second).pow(2).mean().backward()
        assert run.core.homes.statistics.settled > 0
        assert run.core.homes.statistics.returned == 0
        found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def fill_small_memory() -> list[torch.Tensor]:
    """Takes all that torch keeps for small tensors, and lets torch reserve no more."""
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    now = torch.cuda.memory_stats()
    free = now["reserved_bytes.small_pool.current"] - now["allocated_bytes.small_pool.current"]
    return [torch.empty(512, dtype=torch.uint8, device="cuda") for _ in range(free // 512)]


def test_a_norm_finds_room_that_blocks_at_home_hold() -> None:
    """Blocks at home have to make room for the norm of their own gradients."""
    norms: list[torch.Tensor] = []

    def work() -> None:
        model = stack(torch.float32)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        with offloaded(model, optimizer, budget=1024 * MIB) as run:
            fraction = torch.cuda.get_per_process_memory_fraction()
            for _ in range(3):
                model(torch.ones(32, 1024)).pow(2).mean().backward()
                norms.append(optim.clip_grad_norm_(model.parameters(), 1e-2))
                optimizer.step()
                optimizer.zero_grad()
            model(torch.ones(32, 1024)).pow(2).mean().backward()
            norms.append(optim.clip_grad_norm_(model.parameters(), float("inf")))
            assert run.core.homes.statistics.returned == 0
            held = fill_small_memory()
            norms.append(optim.clip_grad_norm_(model.parameters(), float("inf")))
            assert run.core.homes.statistics.returned > 0
            torch.cuda.set_per_process_memory_fraction(fraction)
            del held

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert len(norms) == 5
    assert torch.equal(norms[3], norms[4])


SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 9))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_homes_wait_for_what_the_gpu_still_does(name: str, seed: int) -> None:
    """Compute and lanes are late at random. Each gradient is summed of two, read, and dropped now and then."""
    plain, model = stack(torch.float32), stack(torch.float32)
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    batches = torch.randn(STEPS, 2, 32, 1024)
    on_gpu = copy.deepcopy(plain).cuda()
    expected, seen = [], []
    for step, batch in enumerate(batches):
        with torch.no_grad():
            for host, device in zip(plain.parameters(), on_gpu.parameters(), strict=True):
                device.copy_(host)
        for part in batch:
            loss = on_gpu(part.cuda()).pow(2).mean()
            loss.backward()
            expected.append(loss.detach().cpu())
        for host, device in zip(plain.parameters(), on_gpu.parameters(), strict=True):
            host.grad, device.grad = device.grad.cpu(), None  # type: ignore[union-attr]
        expected.append(optim.clip_grad_norm_(plain.parameters(), 1e-2))
        if step % 3 != 2:
            theirs.step()
        theirs.zero_grad()
    sleepy(model, seed)
    with offloaded(model, ours, budget=1024 * MIB) as run, jitter(run, seed):
        for step, batch in enumerate(batches):
            for part in batch:
                loss = model(part).pow(2).mean()
                loss.backward()
                seen.append(loss.detach().cpu())
            seen.append(optim.clip_grad_norm_(model.parameters(), 1e-2))
            if step % 3 != 2:
                ours.step()
            ours.zero_grad()
        assert run.core.homes.statistics.settled > 0
    for at, (a, b) in enumerate(zip(seen, expected, strict=True)):
        assert torch.equal(a, b), f"value {at}: {a.item()} and {b.item()}"
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in ours.state[a].items():
            assert torch.equal(value, theirs.state[b][key]), key
