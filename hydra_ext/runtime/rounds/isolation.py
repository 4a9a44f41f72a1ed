"""What of the process belongs to one microbatch while it runs.

Microbatches of a round take turns in one process. Swapped with them are torch's random state, process-wide switches,
and the attributes that forwards set on the model's modules. Of an attribute each microbatch sees what it set itself,
else what the nearest microbatch before it set, as it would in a loop.

Two functions of torch are replaced while a round runs, and have an effect in fibers only: ``nn.Module.__setattr__``,
which tells of attributes, and ``torch.set_autocast_cache_enabled``, which would share casts between microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hydra_ext.runtime.rounds import fibers
from hydra_ext.runtime.rounds.order import Order
from hydra_ext.state.randomness import HostRandomness, TorchRandomness, generators
from hydra_ext.tracing import not_traced

_ABSENT: Any = object()
Key = tuple[nn.Module, str]

# Pairs of what reads a switch and what sets it: those that contexts set for the length of a call.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


class Surroundings:
    """The switches and torch's random state, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._random = TorchRandomness(generators(device))
        self._note_switches()

    def note(self) -> None:
        self._random.note()
        self._note_switches()

    def _note_switches(self) -> None:
        self._switches = [read() for read, _ in _SWITCHES]

    def restore(self) -> None:
        self._random.restore()
        for (read, write), value in zip(_SWITCHES, self._switches, strict=True):
            if read() != value:
                write(value)

    def seed(self, seed: int) -> None:
        """As after ``torch.manual_seed(seed)``."""
        self._random.seed(seed)


class DrawOrder:
    """Whether the microbatches of a round draw from Python's and numpy's generators in the order of a loop.

    These generators are one for the process, and no microbatch has one of its own: in a loop the second goes on where
    the first has stopped. In a round that is so only if none draws after a later one has.

    Attributes:
        turns: how many of them have drawn.
        conflict: whether the order was another one.
    """

    def __init__(self) -> None:
        self._host = HostRandomness()
        self._latest = 0
        self.turns = 0
        self.conflict = False

    def end_turn(self, index: int) -> None:
        if self._host.moved:
            self._host.note()
            self.turns += 1
            self.conflict = self.conflict or index < self._latest
            self._latest = max(index, self._latest)


class Attributes:
    """What the microbatches of one round set on the model's modules.

    Attributes:
        conflict: why the round cannot be equal to a loop; empty when nothing speaks against it.
    """

    def __init__(self, model: nn.Module, order: Order) -> None:
        self._order = order
        self._modules = set(model.modules())
        self._before: dict[Key, Any] = {}
        self._values: dict[Key, dict[int, Any]] = {}
        self._this_turn: set[Key] = set()
        self.conflict = ""

    def begin_turn(self, index: int) -> None:
        self._this_turn.clear()
        for key, values in self._values.items():
            earlier = [other for other in values if other <= index]
            _set(key, values[max(earlier)] if earlier else self._before[key])

    def end_turn(self, index: int, *, keep: bool) -> None:
        """``keep``: what the turn set counts; else it was a repetition."""
        for key, values in self._values.items():
            if keep and index in values:
                values[index] = _get(key)

    def finish(self) -> None:
        """The modules are as after a loop: the last microbatch's values stay."""
        for key, values in self._values.items():
            _set(key, values[max(values)])

    def undo(self) -> None:
        """The modules are as before the round."""
        for key, value in self._before.items():
            _set(key, value)

    @not_traced
    def note_write(self, index: int, module: nn.Module, name: str, value: Any) -> None:
        if module not in self._modules or isinstance(value, (nn.Parameter, nn.Module)) or name in module._buffers:
            return
        key = (module, name)
        values = self._values.setdefault(key, {})
        self._before.setdefault(key, _get(key))
        again = index in values and key not in self._this_turn
        if again and _may_add_up(value) and any(other > index for other in values):
            # A later microbatch may have started from a value that was not the last one.
            self.conflict = f"{type(module).__name__}.{name} is set by several calls of each microbatch"
        values.setdefault(index, value)
        self._this_turn.add(key)

    @not_traced
    def note_visit(self, index: int, place: int) -> None:
        self._order.note_visit(place, index)


def _may_add_up(value: Any) -> bool:
    """Whether a forward may have made the value from what the microbatch before it left: counters, averages."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _get(key: Key) -> Any:
    module, name = key
    return module.__dict__.get(name, _ABSENT)


def _set(key: Key, value: Any) -> None:
    module, name = key
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


# ---- replaced functions ---------------------------------------------------------------------------------------------

_lock = threading.Lock()
_users: set[object] = set()
_plain_setattr: Any = nn.Module.__setattr__
_plain_set_cache: Any = torch.set_autocast_cache_enabled


@not_traced
def _setattr(module: nn.Module, name: str, value: Any) -> None:
    fiber = fibers.current()
    if fiber is not None:
        fiber.attributes.note_write(fiber.index, module, name, value)
    _plain_setattr(module, name, value)


@not_traced
def _set_cache(enabled: bool) -> None:
    _plain_set_cache(enabled and fibers.current() is None)


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Replaces the functions; the last one to leave puts them back, unless somebody replaced ours meanwhile."""
    global _plain_setattr, _plain_set_cache
    user = object()
    try:
        with _lock:
            _users.add(user)
            if nn.Module.__setattr__ is not _setattr:
                _plain_setattr, nn.Module.__setattr__ = nn.Module.__setattr__, _setattr  # type: ignore[method-assign,assignment]
            if torch.set_autocast_cache_enabled is not _set_cache:
                _plain_set_cache, torch.set_autocast_cache_enabled = torch.set_autocast_cache_enabled, _set_cache
        yield
    finally:
        with _lock:
            _users.discard(user)
            if not _users:
                if nn.Module.__setattr__ is _setattr:
                    nn.Module.__setattr__ = _plain_setattr  # type: ignore[method-assign]
                if torch.set_autocast_cache_enabled is _set_cache:
                    torch.set_autocast_cache_enabled = _plain_set_cache
