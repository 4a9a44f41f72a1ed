"""What a module has beside its parameters, as it was before a call: for a second call that is to give the same.

Batch statistics are written without a new version, so that small buffers are taken to have changed always; large ones
are trusted to their version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hydra_ext.state.randomness import OwnRandomness

_SMALL = 2**20  # bytes
_ABSENT: Any = object()
_PLAIN = (bool, int, float, str, type(None))

Hold = Callable[[Tensor], Callable[[], Tensor]]  # keeps a tensor somewhere, and gives it back when it is asked for


def may_have_changed(buffer: Tensor, version: int) -> bool:
    return buffer._version != version or buffer.nbytes <= _SMALL


class ModuleState:
    """The buffers and attributes of a module, and of those inside it, as they are when this is made.

    Of attributes: what the call itself sets, all numbers, flags and texts, and the states of generators of random
    numbers. What is inside a list, a dictionary or another object is not looked at.

    Attributes:
        trusted: buffers that are not copied, and their versions.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [names for inner in module.modules() for names in (inner.__dict__, inner._buffers)]
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = [(names, dict(names)) for names in held]
        self._copies = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
        self._generators = OwnRandomness(value for names, _ in self._before for value in names.values())
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._values: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.trusted: list[tuple[Tensor, int]] = []

    def drop_unchanged(self, hold: Hold) -> None:
        """After the call: tensors that it has changed are held by ``hold``, the others are not kept."""
        for names, before in self._before:
            for name in before.keys() | names.keys():
                value = before.get(name, _ABSENT)
                if isinstance(value, _PLAIN):
                    self._names.append((names, name, value))
                elif names.get(name, _ABSENT) is not value:
                    self._names.append((names, name, _held(value, hold) if isinstance(value, Tensor) else value))
        for buffer, version, value in self._copies:
            if may_have_changed(buffer, version):
                self._values.append((buffer, hold(value)))
            else:
                self.trusted.append((buffer, version))
        self._before.clear()
        self._copies.clear()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module is as noted meanwhile, and afterwards as it is now."""
        generators_now = self._generators.now()
        names_now = [(names, name, names.get(name, _ABSENT)) for names, name, _ in self._names]
        values_now = [(buffer, buffer.detach().clone()) for buffer, _ in self._values]
        for names, name, value in self._names:
            _set(names, name, value.tensor() if isinstance(value, _Held) else value)
        for buffer, noted in self._values:
            buffer.data.copy_(noted())  # no new version: other graphs hold the buffer
        self._generators.restore()
        try:
            yield
        finally:
            generators_now.restore()
            for buffer, now in values_now:
                buffer.data.copy_(now)
            for names, name, value_now in names_now:
                _set(names, name, value_now)


@dataclass(frozen=True)
class _Held:
    tensor: Callable[[], Tensor]


def _held(value: Tensor, hold: Hold) -> _Held:
    if not value.requires_grad:
        return _Held(hold(value))
    # Not with the graph that made it: that would hold the one of the call before, and so on.
    taken = hold(value.detach())
    return _Held(lambda: taken().detach().requires_grad_())


def _set(names: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    else:
        names[name] = value
