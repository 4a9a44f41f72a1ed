"""The states of generators of random numbers: torch's, Python's and numpy's global ones, and the user's own.

Python takes 15 microseconds to say its state, numpy 50. Whether a generator has moved is seen in less than one: the
bytes of the object that it is are compared, and what they mean does not matter. States are read and set by the public
functions alone, and read only where the bytes have changed since they were read last.
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


class RandomState:
    """The states of generators, as they were captured last: at first when this was made.

    numpy imports its generators late: while it has not, there is nothing of it to restore.

    Args:
        device: of a computation whose generators of torch are among them; None for none of torch's.
        host: whether Python's and numpy's global ones are.
        own: others; what is no generator is left out.
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
        """Of the same generators."""
        now = copy.copy(self)
        now.capture()
        return now

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The generators are meanwhile as they were, and afterwards where they are now."""
        now = self.now()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    @property
    def host_moved(self) -> bool:
        """Whether Python's generator or numpy's is elsewhere than it was. Takes about a microsecond."""
        return not (_PYTHON.is_at(self._python) and _NUMPY.is_at(self._numpy))

    def equals_in_torch(self, other: RandomState) -> bool:
        """Whether torch's generators were in the same states."""
        return all(map(torch.equal, self._torch, other._torch))

    def seed(self, seed: int) -> None:
        """Captures what :func:`seed_generators` would leave; the generators stay where they are."""
        now = self.now()
        seed_generators(seed, self._generators, host=self._has_host)
        self.capture()
        now.restore()


def seed_generators(seed: int, generators: Iterable[torch.Generator], *, host: bool = True) -> None:
    """As ``torch.manual_seed(seed)`` does; ``host``: and as ``random.seed(seed)``, and ``numpy.random.seed`` with the
    lower 32 bits, which is all that it takes."""
    for generator in generators:
        generator.manual_seed(seed)
    if host:
        random.seed(seed)
        np.random.seed(seed % 2**32)


@contextmanager
def host_randomness_kept() -> Iterator[None]:
    """Python's and numpy's states are afterwards where they were."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


# ---- generators of the user's own -----------------------------------------------------------------------------------
Way = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]  # what reads a state, and what sets it
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
    """None where objects of this class are no generators, or such as have no state."""
    if issubclass(kind, random.SystemRandom):
        return None
    module = sys.modules.get("numpy.random")  # takes long to import, and without it there are none
    numpys = {} if module is None else {getattr(module, name): way for name, way in _NUMPYS.items()}
    return next((way for known, way in (_WAYS | numpys).items() if issubclass(kind, known)), None)


def is_of_process(source: Any) -> bool:
    """Whether it is a global one of Python's, numpy's or torch's."""
    if isinstance(source, torch.Generator):
        return is_default(source)
    numpys = sys.modules.get("numpy.random.mtrand")
    return source is _PYTHONS or (numpys is not None and source is numpys._rand)


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


_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]


def _python() -> _Source:
    if _random.Random.__basicsize__ < _HEADER + _TWISTER_BYTES:  # its state is elsewhere
        return _Source(random.getstate, random.getstate, random.setstate)
    content = _bytes_of(_PYTHONS, _random.Random)
    return _Source(lambda: (content(), _PYTHONS.gauss_next), random.getstate, random.setstate)


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
