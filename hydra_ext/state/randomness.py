"""The states of generators of random numbers: torch's, Python's and numpy's global ones, and the user's own.

Reading Python's state takes 15 microseconds, numpy's 50. Whether a generator has moved is found in less than one, by
comparing the bytes of its object, without interpreting them. States are read and set by public functions only, and are
read only if the bytes have changed since the last read.
"""

from __future__ import annotations

import _random
import copy
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hydra_ext import _C
from hydra_ext.state.foreign import for_each_class

_HEADER: int = object.__basicsize__  # bytes of the reference count and the type, with which every object begins
_TWISTER_BYTES = 2500  # bytes of 624 words and a position


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators of torch that a forward on ``device`` draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]


def is_default(generator: torch.Generator) -> bool:
    """Whether it is one of torch's default generators."""
    return any(generator is other for other in (torch.default_generator, *torch.cuda.default_generators))


class RandomState:
    """The states of generators, as of the last capture. The constructor captures them first.

    numpy imports its generators lazily. Until it does, it has no state to restore.

    Args:
        device: Device of a computation, whose generators of torch are included; None for none of torch's.
        host: Whether Python's and numpy's global generators are included.
        own: Other generators. Objects that are not generators are ignored.
    """

    def __init__(self, device: torch.device | None = None, *, host: bool = True, own: Iterable[Any] = ()) -> None:
        self._generators = generators(device) if device is not None else []
        self._has_host = host
        self._own = [(source, way) for source in own if (way := way_of(type(source))) is not None]
        self.capture()

    def capture(self) -> None:
        self._torch = _C.random_states(self._generators) if self._generators else []
        if self._has_host:
            self._python, self._numpy = _PYTHON.now(), _NUMPY.now()
        self._states = [read(source) for source, (read, _) in self._own]

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._torch, strict=True):
            generator.set_state(state)
        if self._has_host:
            _PYTHON.put(self._python)
            _NUMPY.put(self._numpy)
        for (source, (_, write)), state in zip(self._own, self._states, strict=True):
            write(source, state)

    def now(self) -> RandomState:
        """The present states of the same generators."""
        now = copy.copy(self)
        now.capture()
        return now

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Restores the captured states inside, and the present states afterwards."""
        now = self.now()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    @property
    def host_moved(self) -> bool:
        """Whether Python's or numpy's generator has moved since the capture. Takes about a microsecond."""
        return not (_PYTHON.is_at(self._python) and _NUMPY.is_at(self._numpy))

    def equals_in_torch(self, other: RandomState) -> bool:
        """Whether torch's generators have the same captured states."""
        return all(map(torch.equal, self._torch, other._torch))

    def seed(self, seed: int) -> None:
        """Captures the states that :func:`seed_generators` would set, without moving the generators."""
        now = self.now()
        seed_generators(seed, self._generators, host=self._has_host)
        self.capture()
        now.restore()


def seed_generators(seed: int, generators: Iterable[torch.Generator], *, host: bool = True) -> None:
    """Seeds generators of torch as ``torch.manual_seed(seed)`` does.

    Args:
        host: Whether to seed Python's and numpy's global generators, too. numpy gets the lower 32 bits, its limit.
    """
    for generator in generators:
        generator.manual_seed(seed)
    if host:
        random.seed(seed)
        np.random.seed(seed % 2**32)


@contextmanager
def host_randomness_kept() -> Iterator[None]:
    """Restores the states of Python's and numpy's generators afterwards."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


# ---- generators of the user's own -----------------------------------------------------------------------------------
Way = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]  # functions that read and set a state
_WAYS: dict[type, Way] = {
    torch.Generator: (lambda it: it.get_state(), lambda it, state: it.set_state(state)),
    random.Random: (lambda it: it.getstate(), lambda it, state: it.setstate(state)),
}
_NUMPYS: dict[str, Way] = {
    "RandomState": (lambda it: it.get_state(legacy=False), lambda it, state: it.set_state(state)),
    "BitGenerator": (lambda it: it.state, lambda it, state: setattr(it, "state", state)),
    "Generator": (lambda it: it.bit_generator.state, lambda it, state: setattr(it.bit_generator, "state", state)),
}


@for_each_class
def way_of(kind: type) -> Way | None:
    """How to read and set the state of this class's objects; None if they are not generators, or have no state."""
    if issubclass(kind, random.SystemRandom):
        return None
    module = sys.modules.get("numpy.random")  # not imported here: that is slow, and until then no generator exists
    numpys = {} if module is None else {getattr(module, name): way for name, way in _NUMPYS.items()}
    return next((way for known, way in (_WAYS | numpys).items() if issubclass(kind, known)), None)


def is_of_process(source: Any) -> bool:
    """Whether it is a global generator of Python, numpy or torch."""
    if isinstance(source, torch.Generator):
        return is_default(source)
    numpys = sys.modules.get("numpy.random.mtrand")
    return source is _PYTHONS or (numpys is not None and source is numpys._rand)


# ---- one generator --------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Noted:
    """A state, and the look of the generator when it was last in that state."""

    looks: Any
    state: Any


class _Source:
    """A generator of the process.

    Args:
        look: Returns a value that stays equal as long as the state does.
        read: Returns the state.
        write: Sets the state.
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
            noted.looks = self._look()  # bytes that are not part of the state may differ from before
            self._last = noted


def _bytes_of(value: object, kind: type) -> Callable[[], bytes]:
    """A function that reads the bytes of ``value``, as an object of ``kind``, after its header. It never writes."""
    memory = (ctypes.c_char * (kind.__basicsize__ - _HEADER)).from_address(id(value) + _HEADER)
    return lambda: memory.raw if value is not None else b""  # naming `value` keeps the object alive


_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]


def _python() -> _Source:
    if _random.Random.__basicsize__ < _HEADER + _TWISTER_BYTES:  # the state is not inside the object
        return _Source(random.getstate, random.getstate, random.setstate)
    content = _bytes_of(_PYTHONS, _random.Random)
    return _Source(lambda: (content(), _PYTHONS.gauss_next), random.getstate, random.setstate)


class _Numpy:
    """numpy's global generator, if it has been imported, and the bit generator that it draws from."""

    def __init__(self) -> None:
        self._drawn_from: Any = None
        self._contents: list[Callable[[], bytes]] = []

    def look(self) -> Any:
        module = sys.modules.get("numpy.random.mtrand")
        if module is None:
            return ()
        generator: Any = module._rand  # it holds the second number of a pair of normal ones
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
