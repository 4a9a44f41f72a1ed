"""Random states of the process: noted, put back, and whether something was drawn since."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hydra_ext.state.randomness import HostRandomness, RandomState, TorchRandomness, host_randomness_kept

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "bits": lambda: random.getrandbits(32),
    "bytes": lambda: random.randbytes(3),
    "shuffle": lambda: random.sample(range(64), 64),
    "gauss": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(7) or random.random(),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy permutation": lambda: np.random.permutation(9).tolist(),
    "numpy bytes": lambda: np.random.bytes(3),
    "numpy seed": lambda: np.random.seed(7) or np.random.rand(),
}


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    python, numpy, drawn_from = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    yield
    random.setstate(python)
    np.random.set_bit_generator(drawn_from)
    np.random.set_state(numpy)


@pytest.mark.parametrize("draws", [0, 1, 311, 624])
@pytest.mark.parametrize("name", DRAWS)
def test_what_was_drawn_is_drawn_again(name: str, draws: int) -> None:
    random.seed(1)
    np.random.seed(1)
    for _ in range(draws):
        DRAWS[name]()
        random.getrandbits(32)
        np.random.rand()
    host = HostRandomness()
    assert not host.moved
    first = DRAWS[name]()
    assert host.moved
    host.restore()
    assert not host.moved
    assert DRAWS[name]() == first


@pytest.mark.parametrize("name", ["gauss", "numpy normal"])
def test_the_second_of_a_pair_of_normal_numbers_counts(name: str) -> None:
    DRAWS[name]()
    host = HostRandomness()
    first = DRAWS[name]()
    assert host.moved
    host.restore()
    assert DRAWS[name]() == first


def test_one_that_was_noted_again_goes_to_the_later_state() -> None:
    host = HostRandomness()
    random.random()
    host.note()
    assert not host.moved
    first = random.random(), np.random.rand()
    host.restore()
    assert (random.random(), np.random.rand()) == first


def test_states_of_several_moments_are_kept_apart() -> None:
    moments, drawn = [], []
    for _ in range(3):
        moments.append(HostRandomness())
        drawn.append((random.random(), np.random.randn()))
    for moment, numbers in [*zip(moments, drawn, strict=True)][::-1]:
        moment.restore()
        assert (random.random(), np.random.randn()) == numbers


def test_another_generator_behind_numpys_is_followed() -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    host = HostRandomness()
    assert not host.moved
    first = np.random.rand()
    assert host.moved
    host.restore()
    assert np.random.rand() == first


def test_nothing_that_is_only_looked_at_counts() -> None:
    host = HostRandomness()
    random.getstate()
    np.random.get_state()
    random.Random(3).random()
    np.random.default_rng(3).random()
    torch.rand(3)
    assert not host.moved


def test_torchs_are_among_all_three() -> None:
    state = RandomState(torch.device("cpu"))
    first = torch.rand(3), random.random(), np.random.rand()
    state.restore()
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(first[0], again[0])
    assert first[1:] == again[1:]


def test_a_seed_is_noted_and_nothing_moves() -> None:
    before = torch.get_rng_state()
    noted = TorchRandomness([torch.default_generator])
    noted.seed(5)
    assert torch.equal(torch.get_rng_state(), before)
    noted.restore()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    torch.set_rng_state(before)


def test_both_are_kept_over_an_error() -> None:
    host = HostRandomness()

    @host_randomness_kept()
    def failing() -> None:
        random.random()
        np.random.rand()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not host.moved


def test_numpys_generators_may_be_imported_later() -> None:
    program = """
import sys
from hydra_ext.state.randomness import HostRandomness
import numpy
for name in [name for name in sys.modules if name.startswith("numpy.random")]:
    del sys.modules[name]  # as where nothing has used them
host = HostRandomness()
assert not host.moved
host.restore()
assert "numpy.random" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
