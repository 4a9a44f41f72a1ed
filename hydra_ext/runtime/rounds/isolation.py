"""Process state that belongs to one microbatch while it runs.

Microbatches of a round take turns in one process. Each turn swaps in torch's random state, process-wide switches, and
the attributes that forwards set on the model's modules. A microbatch sees the value of an attribute that it set itself,
else the value that the nearest earlier microbatch set, as in a loop.

Two functions of torch are replaced while a round runs. ``nn.Module.__setattr__`` reports attributes set in fibers and
in backwards. ``torch.set_autocast_cache_enabled`` keeps the cache off in fibers, as it would share casts between
microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.call_state import is_repeating
from hydra_ext.runtime.rounds import fibers
from hydra_ext.runtime.rounds.order import Order
from hydra_ext.runtime.rounds.undoing.accesses import ABSENT, Key
from hydra_ext.state.randomness import RandomState
from hydra_ext.tracing import not_traced

_PLAIN = (bool, int, float, str)

# Functions that read and set process-wide switches: those that context managers set for the duration of a call.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


class Surroundings:
    """The process-wide switches and random states, as they are now.

    Args:
        device: Device of the computation.
        host: Whether Python's and numpy's random states are included, beside torch's.
    """

    def __init__(self, device: torch.device, *, host: bool = False) -> None:
        self._random = RandomState(device, host=host)
        self._note_switches()

    def note(self) -> None:
        self._random.capture()
        self._note_switches()

    def has_switches_of(self, other: Surroundings) -> bool:
        return bool(self._switches == other._switches)

    def _note_switches(self) -> None:
        self._switches = [read() for read, _ in _SWITCHES]

    def restore(self) -> None:
        self._random.restore()
        for (read, write), value in zip(_SWITCHES, self._switches, strict=True):
            if read() != value:
                write(value)

    def seed(self, seed: int) -> None:
        """Sets the noted random state to that after ``torch.manual_seed(seed)``."""
        self._random.seed(seed)


class Attributes:
    """Attributes that the microbatches of one round set on the model's modules.

    Args:
        model: Model whose modules are covered.
        order: Listener for reads and calls of sites.
        alone: Whether the round has a single microbatch, so that no attribute is swapped.

    Attributes:
        set_late: Whether a backward has set an attribute to another value than it had.
    """

    def __init__(self, model: nn.Module, order: Order, *, alone: bool) -> None:
        self._order = order
        self._alone = alone
        self._modules = set(model.modules())
        self._before: dict[Key, Any] = {}
        self._values: dict[Key, dict[int, Any]] = {}
        self._this_turn: set[Key] = set()
        self._seen: dict[Key, dict[int, list[Any]]] = {}  # values that a microbatch has read before it set its own
        self._read: set[Key] = set()
        self._several: set[Key] = set()  # attributes that a microbatch has set again after a later one has
        self._late: dict[Key, Any] = {}  # attributes that the backward under way has set, with their values before
        self.set_late = False

    def begin_turn(self, index: int, *, backward: bool) -> None:
        self._this_turn.clear()
        if not self._alone:
            for key in self._values:
                _set(key, self._expected(key, index + 1))
        if backward:
            _in_backward.append(self)

    def end_turn(self, index: int, *, keep: bool) -> None:
        """``keep``: whether values that the turn set are kept. A repetition's and a backward's are not."""
        for key, values in self._values.items():
            if keep and index in values:
                values[index] = _get(key)
        if self in _in_backward:
            _in_backward.remove(self)
            self.set_late = self.set_late or any(not _same(_get(key), was) for key, was in self._late.items())
            self._late.clear()

    def _expected(self, key: Key, index: int) -> Any:
        """The attribute's value in a loop at the beginning of this microbatch."""
        earlier = [other for other in self._values[key] if other < index]
        return self._values[key][max(earlier)] if earlier else self._before[key]

    def finish(self) -> None:
        """Leaves the modules as after a loop, with the last microbatch's values."""
        if not self._alone:
            for key, values in self._values.items():
                _set(key, values[max(values)])

    def undo(self) -> None:
        """Restores the modules' attributes from before the round."""
        for key, value in self._before.items():
            _set(key, value)

    def conflict(self) -> str:
        """The reason, after the forward, why the round cannot act as a loop; empty if there is none."""
        for key in self._values:
            module, name = key
            seen = self._seen.get(key, {}).items()
            if any(not _same(value, self._expected(key, index)) for index, values in seen for value in values):
                return f"{type(module).__name__}.{name} is set by a microbatch after a later one has read it"
            if key in self._several - self._read:
                return f"{type(module).__name__}.{name} is set by several calls of each microbatch"
        return ""

    def keys(self) -> set[Key]:
        """The attributes that were set."""
        return set(self._values)

    @not_traced
    def note_write(self, index: int, module: nn.Module, name: str, value: Any) -> None:
        if not self._counts(module, name, value):
            return
        key = (module, name)
        values = self._values.setdefault(key, {})
        self._before.setdefault(key, _get(key))
        again = index in values and key not in self._this_turn
        if again and _may_add_up(value) and any(other > index for other in values):
            # A later microbatch may have started from a value that was not the last one.
            self._several.add(key)
        values.setdefault(index, value)
        self._this_turn.add(key)

    @not_traced
    def note_read(self, index: int, module: nn.Module, name: str) -> None:
        key = (module, name)
        self._order.note_read(key, index)
        if module not in self._modules or name in module._buffers or self._alone:
            return
        self._read.add(key)
        if index not in self._values.get(key, ()):
            value = _get(key)
            seen = self._seen.setdefault(key, {}).setdefault(index, [])
            if not seen or not _same(seen[-1], value):
                seen.append(value)

    def note_late(self, module: nn.Module, name: str, value: Any) -> None:
        """Called when a backward sets an attribute."""
        if self._counts(module, name, value):
            self._late.setdefault((module, name), _get((module, name)))

    def _counts(self, module: nn.Module, name: str, value: Any) -> bool:
        of_state = not isinstance(value, (nn.Parameter, nn.Module)) and name not in module._buffers
        return of_state and module in self._modules

    @not_traced
    def note_visit(self, index: int, place: int) -> None:
        self._order.note_visit(place, index)


def _may_add_up(value: Any) -> bool:
    """Whether a forward may have computed the value from the previous microbatch's, as counters and averages are."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    plain = type(one) is type(other) and isinstance(one, _PLAIN)
    return one is other or (plain and bool(one == other))


def _get(key: Key) -> Any:
    module, name = key
    return module.__dict__.get(name, ABSENT)


def _set(key: Key, value: Any) -> None:
    module, name = key
    if value is ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


class TrainedParameters:
    """Which of the model's parameters each microbatch of one round trains.

    A forward may set ``requires_grad``, as one that chooses an adapter does. Each turn, also of the backward, sees what
    its microbatch has set. A microbatch begins with what the one before it has set.

    Args:
        blocks: The model's blocks.
        alone: Whether the round has a single microbatch, so that nothing is swapped.
    """

    def __init__(self, blocks: _C.ModelBlocks, *, alone: bool) -> None:
        self._blocks = blocks
        self._alone = alone
        self._began: dict[int, bytes] = {}
        self._own: dict[int, bytes] = {}

    def begin_turn(self, index: int) -> None:
        if self._alone:
            return
        if index not in self._own:
            before = self._own[index - 1] if index else self._blocks.trained()
            self._began[index] = self._own[index] = before
        self._blocks.set_trained(self._own[index])

    def end_turn(self, index: int, *, keep: bool) -> None:
        """``keep``: whether what the turn has set is kept."""
        if keep and not self._alone:
            self._own[index] = self._blocks.trained()

    def finish(self) -> None:
        """Sets what a loop would leave. Called before the window closes."""
        if self._own:
            self._blocks.set_trained(self._own[max(self._own)])

    def undo(self) -> None:
        """Sets what was set before the round. Called before the window closes."""
        if self._began:
            self._blocks.set_trained(self._began[0])

    def conflict(self) -> str:
        """The reason, after the forward, why the round cannot act as a loop; empty if there is none."""
        if any(began != self._own[index - 1] for index, began in self._began.items() if index):
            return "a microbatch sets requires_grad of parameters after a later one has begun"
        return ""


# ---- replaced functions ---------------------------------------------------------------------------------------------

_lock = threading.Lock()
_users: set[object] = set()
_in_backward: list[Attributes] = []  # attributes of the rounds whose backward runs now
_plain_setattr: Any = nn.Module.__setattr__
_plain_set_cache: Any = torch.set_autocast_cache_enabled


@not_traced
def _setattr(module: nn.Module, name: str, value: Any) -> None:
    fiber = fibers.current()
    if fiber is not None:
        fiber.attributes.note_write(fiber.index, module, name, value)
    elif _in_backward and not is_repeating():
        for attributes in _in_backward:
            attributes.note_late(module, name, value)
    _plain_setattr(module, name, value)


class _OfThread(threading.local):
    """``keeps_casts``: whether autocast may keep casts for the thread."""

    keeps_casts = True


_local = _OfThread()


def keep_no_casts() -> None:
    """Keeps autocast's cache off in the calling thread from now on, while functions are replaced.

    The cache is the process's, and whichever thread leaves its autocast empties it. So a thread that takes turns with
    others would lose casts, and the graph nodes that they share, at a time that depends on the others.
    """
    _local.keeps_casts = False
    _plain_set_cache(False)


@not_traced
def _set_cache(enabled: bool) -> None:
    _plain_set_cache(enabled and _local.keeps_casts and fibers.current() is None)


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Replaces the functions. The last user to leave restores them, unless they were replaced again meanwhile."""
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
