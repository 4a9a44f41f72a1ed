"""A real GPU for tests. Without a GPU a test that needs one fails; it is never skipped."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import hydra_ext
from hydra_ext import Checks, Run, _build_info

# Whether the GPU is the emulated one, which is slow.
EMULATED = "emulated_cuda" in sys.modules

# A few milliseconds on current devices: far longer than the copies of these models.
_LONGEST_SLEEP_CYCLES = 20_000_000
_LONGEST_DELAY = 3e-4  # seconds, of each operation


def require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail(f"this test needs a GPU, and torch {torch.__version__} finds none")
    if _build_info.CUDA != "ON":
        pytest.fail(f"this test needs hydra_ext with CUDA; this one was built with HYDRA_CUDA={_build_info.CUDA}")
    return torch.device("cuda", torch.cuda.current_device())


def on_stream(pointer: int) -> Any:
    """Enters a stream that the backend names by its handle."""
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream())


@contextmanager
def jitter(run: Run, seed: int) -> Iterator[None]:
    """Delays both lanes at random times. :func:`sleepy` delays compute."""
    backend = run._place._backend  # type: ignore[attr-defined]
    streams = [backend.to_device_stream, backend.to_host_stream]
    ended = Event()

    def delay() -> None:
        chance = random.Random(seed)
        while not ended.wait(chance.random() * 2e-3):
            with on_stream(chance.choice(streams)):
                torch.cuda._sleep(chance.randrange(_LONGEST_SLEEP_CYCLES))
                torch.cuda.current_stream().synchronize()  # so that delays do not pile up

    thread = Thread(target=delay)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def late(run: Run, model: nn.Module, seed: int | None) -> Iterator[None]:
    """Delays copies and compute at random times; with None nothing. The emulated machine delays each operation."""
    if seed is None:
        yield
    elif EMULATED:
        machine = sys.modules["emulated_cuda"]
        machine.set_delays(_LONGEST_DELAY, seed)
        try:
            yield
        finally:
            machine.set_delays(0.0, 0)
    else:
        with jitter(run, seed):
            hooks = sleepy(model, seed)
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()


def sleepy(model: nn.Module, seed: int) -> list[RemovableHandle]:
    """Makes modules of the model delay compute at random before they run."""
    chance = random.Random(seed)

    def delay(_module: nn.Module, _inputs: object) -> None:
        if chance.random() < 0.3:
            torch.cuda._sleep(chance.randrange(_LONGEST_SLEEP_CYCLES))

    return [module.register_forward_pre_hook(delay) for module in model.modules()]


@dataclass
class Trace:
    """The results of a training run, on the host."""

    losses: list[torch.Tensor] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mean_of_squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], loss_of: Step) -> Trace:
    trace = Trace()
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.detach().cpu())
    trace.state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return trace


def train_plain(model: nn.Module, batches: list[torch.Tensor], loss_of: Step, *, lr: float = 0.05) -> Trace:
    """The reference: forward and backward on the GPU, and the update on the host, as in the offloaded run."""
    plain = copy.deepcopy(model)
    on_gpu = copy.deepcopy(model).cuda()
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr, momentum=0.9)
    trace = Trace()
    for batch in batches:
        loss = loss_of(on_gpu, batch.cuda())
        loss.backward()
        for host, device in zip(plain.parameters(), on_gpu.parameters(), strict=True):
            host.grad = None if device.grad is None else device.grad.cpu()
            device.grad = None
        optimizer.step()
        with torch.no_grad():
            for host, device in zip(plain.parameters(), on_gpu.parameters(), strict=True):
                device.copy_(host)
        trace.losses.append(loss.detach().cpu())
    trace.state = {name: value.detach().cpu().clone() for name, value in on_gpu.state_dict().items()}
    return trace


@contextmanager
def offloaded(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, budget: int | str, poison: bool = True
) -> Iterator[Run]:
    checks = Checks(poison_hosts=poison)
    with hydra_ext.offload(model, optimizer, budget=budget, device="cuda", checks=checks) as run:
        yield run
        assert run.core.gate.opens > 0, "nothing ran on the device"
        assert not run.core.gate.open
        assert run.core.pager.pins == 0
    assert run.core.pager.resident_bytes == 0


def assert_same(found: Trace, expected: Trace) -> None:
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert torch.equal(a, b), f"loss of step {step}: {a.item()} and {b.item()}"
    assert found.state.keys() == expected.state.keys()
    different = [name for name, value in found.state.items() if not torch.equal(value, expected.state[name])]
    assert not different, different
