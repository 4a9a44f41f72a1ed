"""The arguments of the root's call, on the device for as long as it lasts.

A forward may write to what it is given: append to a list, put a state into a dictionary, add to a tensor. So lists and
dictionaries stay the caller's own objects: tensors in them are exchanged for the call and put back afterwards, except
where the forward has put something else. What cannot be written to (a tuple, say) is made anew around moved tensors.
Tensors that share memory are apart on the device: a write to one of them is refused.
Not for one list in two calls at the same time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from hydra_ext.errors import StateError
from hydra_ext.runtime.placement.devices import MOVED
from hydra_ext.state.copies import sharing
from hydra_ext.tracing import nothing_traced

# Exactly these: a subclass may do more in __setitem__ than keep what it is given.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)


class Arguments:
    """One call's. :meth:`place` before it; :meth:`give_back` after it, on every way out."""

    def __init__(self, move: Callable[[Any], Any]) -> None:
        self._move = move
        # By identity, with the objects, so that no other can take their place: each value and what stands for it, and
        # whether that differs anywhere inside.
        self._placed: dict[int, tuple[Any, Any, bool]] = {}
        self._moved: dict[int, tuple[Any, Any, int]] = {}  # by the moved one's identity: host, moved, its version
        self._lent: list[Any] = []  # containers with moved tensors in them

    @nothing_traced
    def place(self, value: Any) -> Any:
        return self._place(value)[0]

    @nothing_traced
    def give_back(self) -> None:
        written = [host for host, moved, version in self._moved.values() if _writes(moved) != version]
        kept = {key for key, (host, moved, version) in self._moved.items() if bring_home(host, moved, version)}
        for container in self._lent:
            for key, item in _entries(container):
                if id(item) in self._moved and id(item) not in kept:
                    container[key] = self._moved[id(item)][0]
        if written:
            self._expect_apart(written)

    def _expect_apart(self, written: Sequence[Tensor]) -> None:
        """On the device each argument has memory of its own: a write to one was not seen in another.

        Raises:
            StateError: on the host they share it.
        """
        every = [host for host, _, _ in self._moved.values() if isinstance(host, Tensor)]
        with torch._C.DisableTorchFunction():  # modes are to see what the program calls
            groups = sharing(every)
        for group in groups:
            wrote = [host for host in group if any(host is each for each in written)]
            if wrote and len(group) > 1:
                raise StateError(
                    f"the forward has written in place to an argument of shape {list(wrote[0].shape)}, and another "
                    "argument shares its memory: on the device they are apart, so the numbers are wrong; give the "
                    "model clones, as with x.clone()"
                )

    def _place(self, value: Any) -> tuple[Any, bool]:
        """What stands for ``value`` in the call, and whether it, or anything inside it, is another."""
        if id(value) not in self._placed:
            self._placed[id(value)] = (value, value, False)  # for a container that holds itself
            self._placed[id(value)] = (value, *self._place_anew(value))
        return self._placed[id(value)][1:]

    def _place_anew(self, value: Any) -> tuple[Any, bool]:
        if isinstance(value, MOVED):
            return self._place_tensor(value)
        if type(value) in _MAPPINGS + _SEQUENCES:
            return value, self._exchange(value)
        # One level. Not by a function that knows ``value``: torch leaves it, and all it holds, in a reference cycle.
        is_leaf = chain([False], repeat(True))
        parts, spec = tree_flatten(value, lambda _: next(is_leaf))
        if len(parts) == 1 and parts[0] is value:  # no container
            return value, False
        placed = [self._place(part) for part in parts]
        exchanged = any(inside for _, inside in placed)
        # The parts of a tuple are its own; those of another kind may have been made by flattening it.
        same = all(new is part for part, (new, _) in zip(parts, placed, strict=True))
        if same and (isinstance(value, tuple) or not exchanged):
            return value, exchanged
        return tree_unflatten([new for new, _ in placed], spec), True

    def _place_tensor(self, host: Any) -> tuple[Any, bool]:
        moved = to_device(host, self._move)
        if moved is not host:
            self._moved[id(moved)] = (host, moved, _writes(moved))
        return moved, moved is not host

    def _exchange(self, container: Any) -> bool:
        exchanged = lent = False
        for key, item in _entries(container):
            new, inside = self._place(item)
            exchanged = exchanged or inside
            if new is not item:
                container[key] = new
                lent = True
        if lent:
            self._lent.append(container)
        return exchanged


def _entries(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _writes(moved: Any) -> int:
    return moved._version if isinstance(moved, torch.Tensor) else 0


# Modes that follow the calls of a program see these two as what they are, and not the operations in them, which depend
# on where the memory of an argument was made.
def to_device(host: Any, move: Callable[[Any], Any]) -> Any:
    """What stands for the tensor in the call; itself where it is there already."""
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(to_device, (), host, move)
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode do not count writes.
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        return move(host)


def bring_home(host: Any, moved: Any, version: int) -> bool:
    """What the forward wrote. True where the moved tensor has become a result, with a history that the host's lacks."""
    if torch._C._is_torch_function_mode_enabled():
        return bool(handle_torch_function(bring_home, (), host, moved, version))
    if _writes(moved) == version:
        return False
    with torch.inference_mode() if host.is_inference() else torch.no_grad():
        host.copy_(moved)
    return bool(moved.requires_grad and not host.requires_grad)
