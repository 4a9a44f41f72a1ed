"""The threads of microbatches compute as the caller's thread does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from support.benches import ROOMY, assert_same


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def seen_in_fibers(look: Callable[[torch.Tensor], Any]) -> list[Any]:
    """What ``look`` gives for the output of each of two microbatches."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: list[Any] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        found.append(look(output))
        return output.pow(2).sum()

    with hydra_ext.offload(model, optimizer, budget=ROOMY) as run:
        run.step([*INPUTS], work, round_size=2)
    return found


def seen_in_a_loop(look: Callable[[torch.Tensor], Any]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    return [look(model(x)) for x in INPUTS]


INPUTS = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))


def spectrum(output: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(output) * 0.37, n=32).detach().clone()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_last_bits_of_ffts(threads: int) -> None:
    torch.set_num_threads(threads)
    assert_same(seen_in_a_loop(spectrum), seen_in_fibers(spectrum))


def test_the_number_is_the_callers_and_that_of_later_threads_stays() -> None:
    torch.set_num_threads(1)
    in_a_thread(lambda: torch.set_num_threads(3))
    assert (torch.get_num_threads(), in_a_thread(torch.get_num_threads)) == (1, 3)
    assert seen_in_fibers(lambda _: torch.get_num_threads()) == [1, 1]
    assert (torch.get_num_threads(), in_a_thread(torch.get_num_threads)) == (1, 3)


@pytest.mark.parametrize("flushes", [False, True])
def test_denormal_numbers(flushes: bool) -> None:
    torch.set_flush_denormal(flushes)

    def tiny(output: torch.Tensor) -> bool:
        return bool((torch.full_like(output, 1e-38).detach() * 0.01).count_nonzero())

    assert seen_in_a_loop(tiny) == seen_in_fibers(tiny) == [not flushes] * 2
