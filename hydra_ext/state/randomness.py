"""The random states of a process: torch's, that of Python's ``random``, and that of numpy's global generator.

Generators of the user's own (``random.Random``, ``numpy.random.default_rng``, ``torch.Generator``) are not among them:
:class:`OwnRandomness` holds those that it is given.

Python takes 15 microseconds to say its state, numpy 50. Whether a generator has moved is seen in less than one: the
bytes of the object that it is are compared, and what they mean does not matter. States are read and set by the public
functions alone, and read only where the bytes have changed since they were read last.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hydra_ext import _C

_HEADER: int = object.__basicsize__  # references and type: what every object begins with
_TWISTER_BYTES = 2500  # of 624 words and a position


def generators(device: torch.device) -> list[torch.Generator]:
    """Those of torch that a forward on ``device`` draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]


def is_default(generator: torch.Generator) -> bool:
    """Whether it is one of torch's own."""
    return any(generator is other for other in (torch.default_generator, *torch.cuda.default_generators))


class TorchRandomness:
    """The states of torch's ``generators``, as they were noted last: at first when this was made."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self.note()

    def note(self) -> None:
        self._states = _C.random_states(self._generators)

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def equals(self, other: TorchRandomness) -> bool:
        """Whether both noted the same states."""
        return all(map(torch.equal, self._states, other._states))

    def seed(self, seed: int) -> None:
        """Notes what ``torch.manual_seed(seed)`` would leave. The generators stay where they are."""
        now = _C.random_states(self._generators)
        for generator in self._generators:
            generator.manual_seed(seed)
        self.note()
        for generator, state in zip(self._generators, now, strict=True):
            generator.set_state(state)


class HostRandomness:
    """The states of Python's ``random`` and of numpy's global generator, as they were noted last: at first when this
    was made. numpy imports its generators late: while it has not, there is nothing to restore."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        self._python, self._numpy = _PYTHON.now(), _NUMPY.now()

    @property
    def moved(self) -> bool:
        """Whether a generator is elsewhere than it was. Takes about a microsecond."""
        return not (_PYTHON.is_at(self._python) and _NUMPY.is_at(self._numpy))

    def restore(self) -> None:
        _PYTHON.put(self._python)
        _NUMPY.put(self._numpy)


class RandomState:
    """All three, for a computation on ``device``, as they were noted last: at first when this was made.

    Attributes:
        torch: those of torch's generators.
        host: those of Python's and numpy's.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = TorchRandomness(generators(device))
        self.host = HostRandomness()

    def note(self) -> None:
        self.torch.note()
        self.host.note()

    def restore(self) -> None:
        self.torch.restore()
        self.host.restore()


class OwnRandomness:
    """The states of generators that are not the process's, as they were when this was made.

    Args:
        values: any; what is no generator is left out.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        ways = _ways()
        found = [value for value in values if is_generator(value)]
        self._states = [(ways[type(value)][1], value, ways[type(value)][0](value)) for value in found]

    def restore(self) -> None:
        for put, value, state in self._states:
            put(value, state)

    def now(self) -> OwnRandomness:
        """Of the same generators."""
        return OwnRandomness([value for _, value, _ in self._states])


def seed_host_randomness(seed: int) -> None:
    """``random.seed(seed)``, and ``numpy.random.seed`` with the lower 32 bits, which is all that it takes."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def host_randomness_kept() -> Iterator[None]:
    """Python's and numpy's states are afterwards where they were."""
    before = HostRandomness()
    try:
        yield
    finally:
        before.restore()


# ---- generators of the user's own -----------------------------------------------------------------------------------
_Way = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]  # what reads a state, and what sets it
_WAYS: dict[type, _Way] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
}
_NUMPYS: dict[str, _Way] = {
    "Generator": (lambda it: it.bit_generator.state, lambda it, state: setattr(it.bit_generator, "state", state)),
    "RandomState": (lambda it: it.get_state(legacy=False), lambda it, state: it.set_state(state)),
}


def is_generator(value: Any) -> bool:
    """Whether it is one that :class:`OwnRandomness` knows."""
    return type(value) in _ways()


def _ways() -> dict[type, _Way]:
    module = sys.modules.get("numpy.random")
    if module is not None and module.Generator not in _WAYS:
        _WAYS.update({getattr(module, name): way for name, way in _NUMPYS.items()})
    return _WAYS


# ---- one generator --------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Noted:
    """A state, and what the generator looked like when it was in it last."""

    looks: Any
    state: Any


class _Source:
    """A generator of the process.

    Args:
        look: gives something that is equal as long as the state is.
        read: gives the state.
        write: takes it.
    """

    def __init__(self, look: Callable[[], Any], read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._look = look
        self._read = read
        self._write = write
        self._last = _Noted(None, None)

    def now(self) -> _Noted:
        looks, last = self._look(), self._last
        if looks != last.looks:
            last = self._last = _Noted(looks, self._read())
        return last

    def is_at(self, noted: _Noted) -> bool:
        return bool(self._look() == noted.looks)

    def put(self, noted: _Noted) -> None:
        if noted.state is not None and not self.is_at(noted):
            self._write(noted.state)
            noted.looks = self._look()  # what the state does not depend on may look otherwise
            self._last = noted


def _bytes_of(value: object, kind: type) -> Callable[[], bytes]:
    """What gives those that ``value`` has as an object of ``kind``, behind its header. Only read, never written."""
    memory = (ctypes.c_char * (kind.__basicsize__ - _HEADER)).from_address(id(value) + _HEADER)
    return lambda: memory.raw if value is not None else b""  # holds the object whose memory it is


def _python() -> _Source:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    if _random.Random.__basicsize__ < _HEADER + _TWISTER_BYTES:  # its state is elsewhere
        return _Source(random.getstate, random.getstate, random.setstate)
    content = _bytes_of(generator, _random.Random)
    return _Source(lambda: (content(), generator.gauss_next), random.getstate, random.setstate)


class _Numpy:
    """The global generator of numpy, if it has been imported, and whatever it draws from."""

    def __init__(self) -> None:
        self._drawn_from: Any = None
        self._contents: list[Callable[[], bytes]] = []

    def look(self) -> Any:
        module = sys.modules.get("numpy.random.mtrand")
        if module is None:
            return ()
        generator: Any = module._rand  # with the second half of a pair of normal numbers
        drawn_from = generator._bit_generator
        if drawn_from is not self._drawn_from:
            self._drawn_from = drawn_from
            kind = type(drawn_from)
            known = kind is getattr(module, "_MT19937", None) and kind.__basicsize__ >= _HEADER + _TWISTER_BYTES
            self._contents = [_bytes_of(each, type(each)) for each in (generator, drawn_from)] if known else []
        if not self._contents:
            return repr(generator.get_state(legacy=False))
        return [content() for content in self._contents]

    def read(self) -> Any:
        module = sys.modules.get("numpy.random")
        return None if module is None else module.get_state(legacy=False)

    def write(self, state: Any) -> None:
        sys.modules["numpy.random"].set_state(state)


_PYTHON = _python()
_numpy = _Numpy()
_NUMPY = _Source(_numpy.look, _numpy.read, _numpy.write)
