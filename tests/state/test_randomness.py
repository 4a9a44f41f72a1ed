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

from hydra_ext.state.randomness import RandomState, host_randomness_kept

pytestmark = pytest.mark.every_case

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
    host = RandomState()
    assert not host.host_moved
    first = DRAWS[name]()
    assert host.host_moved
    host.restore()
    assert not host.host_moved
    assert DRAWS[name]() == first


@pytest.mark.parametrize("name", ["gauss", "numpy normal"])
def test_the_second_of_a_pair_of_normal_numbers_counts(name: str) -> None:
    DRAWS[name]()
    host = RandomState()
    first = DRAWS[name]()
    assert host.host_moved
    host.restore()
    assert DRAWS[name]() == first


def test_one_that_was_noted_again_goes_to_the_later_state() -> None:
    host = RandomState()
    random.random()
    host.capture()
    assert not host.host_moved
    first = random.random(), np.random.rand()
    host.restore()
    assert (random.random(), np.random.rand()) == first


def test_states_of_several_moments_are_kept_apart() -> None:
    moments, drawn = [], []
    for _ in range(3):
        moments.append(RandomState())
        drawn.append((random.random(), np.random.randn()))
    for moment, numbers in [*zip(moments, drawn, strict=True)][::-1]:
        moment.restore()
        assert (random.random(), np.random.randn()) == numbers


def test_another_generator_behind_numpys_is_followed() -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    host = RandomState()
    assert not host.host_moved
    first = np.random.rand()
    assert host.host_moved
    host.restore()
    assert np.random.rand() == first


def test_nothing_that_is_only_looked_at_counts() -> None:
    host = RandomState()
    random.getstate()
    np.random.get_state()
    random.Random(3).random()
    np.random.default_rng(3).random()
    torch.rand(3)
    assert not host.host_moved


def test_torchs_are_among_all_three() -> None:
    state = RandomState(torch.device("cpu"))
    first = torch.rand(3), random.random(), np.random.rand()
    state.restore()
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(first[0], again[0])
    assert first[1:] == again[1:]


def test_a_seed_is_noted_and_nothing_moves() -> None:
    before = torch.get_rng_state()
    noted = RandomState(torch.device("cpu"), host=False)
    noted.seed(5)
    assert torch.equal(torch.get_rng_state(), before)
    noted.restore()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    torch.set_rng_state(before)


def test_a_seed_is_noted_of_pythons_and_numpys_too() -> None:
    host = RandomState()
    seeded = RandomState()
    seeded.seed(2**40 + 3)
    assert not host.host_moved
    with seeded.in_place():
        drawn = random.random(), np.random.rand()
    assert not host.host_moved
    random.seed(2**40 + 3)
    np.random.seed(3)
    assert drawn == (random.random(), np.random.rand())


class OwnRandom(random.Random):
    pass


OWN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (torch.Generator(), lambda it: float(torch.rand((), generator=it))),
    "python": (OwnRandom(3), lambda it: it.random()),
    "numpy": (np.random.default_rng(3), lambda it: it.random()),
    "numpy's bits": (np.random.PCG64(3), lambda it: it.random_raw()),
    "numpy's older ones": (np.random.RandomState(3), lambda it: it.rand()),
}


@pytest.mark.parametrize("name", OWN)
def test_generators_of_the_users_own(name: str) -> None:
    source, draw = OWN[name]
    state = RandomState(host=False, own=[source, 3, None, random.SystemRandom()])
    first, second = draw(source), draw(source)
    with state.in_place():
        assert draw(source) == first
    third = draw(source)
    state.restore()
    assert [draw(source) for _ in range(3)] == [first, second, third]


def test_both_are_kept_over_an_error() -> None:
    host = RandomState()

    @host_randomness_kept()
    def failing() -> None:
        random.random()
        np.random.rand()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not host.host_moved


@pytest.mark.full
def test_numpys_generators_may_be_imported_later() -> None:
    program = """
import sys
from hydra_ext.state.randomness import RandomState
import numpy
for name in [name for name in sys.modules if name.startswith("numpy.random")]:
    del sys.modules[name]  # as where nothing has used them
host = RandomState()
assert not host.host_moved
host.restore()
assert "numpy.random" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
