"""The arguments of the root's call, which are on the device while the call lasts.

A forward may write to its arguments: append to a list, put a state into a dictionary, add to a tensor. So lists and
dictionaries stay the caller's own objects. Tensors in them are replaced for the call and put back afterwards, except
those that the forward has replaced. Immutable containers, such as tuples, are rebuilt around moved tensors. Tensors
that share memory get separate memory on the device, so a write to one of them is refused.

Two concurrent calls must not share a list or dictionary.
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

# Exactly these types: the __setitem__ of a subclass may do more than store the item.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)


class Arguments:
    """The arguments of one call. :meth:`place` is called before it, :meth:`give_back` after it on every way out."""

    def __init__(self, move: Callable[[Any], Any]) -> None:
        self._move = move
        # By identity of a value: the value, its replacement, and whether that differs anywhere inside. The value is
        # kept so that no other object gets its identity.
        self._placed: dict[int, tuple[Any, Any, bool]] = {}
        self._moved: dict[int, tuple[Any, Any, int]] = {}  # by identity of the moved tensor: host, moved, version
        self._lent: list[Any] = []  # the caller's containers that hold moved tensors

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
        """Checks that no argument that was written to shares memory on the host with another.

        On the device each argument has memory of its own, so the write did not reach the other.

        Raises:
            StateError: two arguments share memory, and one of them was written to.
        """
        every = [host for host, _, _ in self._moved.values() if isinstance(host, Tensor)]
        with torch._C.DisableTorchFunction():  # modes should see only the program's own calls
            groups = sharing(every)
        for group in groups:
            wrote = [host for host in group if any(host is each for each in written)]
            if wrote and len(group) > 1:
                raise StateError(
                    f"the forward has written in place to an argument of shape {list(wrote[0].shape)}, and another "
                    "argument shares its memory: on the device their memory is separate, so the numbers are wrong; "
                    "give the model clones, as with x.clone()"
                )

    def _place(self, value: Any) -> tuple[Any, bool]:
        """The replacement of ``value`` for the call, and whether it, or anything inside it, differs from ``value``."""
        if id(value) not in self._placed:
            self._placed[id(value)] = (value, value, False)  # ends the recursion for a container that holds itself
            self._placed[id(value)] = (value, *self._place_anew(value))
        return self._placed[id(value)][1:]

    def _place_anew(self, value: Any) -> tuple[Any, bool]:
        if isinstance(value, MOVED):
            return self._place_tensor(value)
        if type(value) in _MAPPINGS + _SEQUENCES:
            return value, self._exchange(value)
        # Flattens one level. The function must not refer to ``value``: torch leaves the function in a reference cycle.
        is_leaf = chain([False], repeat(True))
        parts, spec = tree_flatten(value, lambda _: next(is_leaf))
        if len(parts) == 1 and parts[0] is value:  # not a container
            return value, False
        placed = [self._place(part) for part in parts]
        exchanged = any(inside for _, inside in placed)
        # Flattening a tuple gives its own parts; flattening another kind may have created new ones.
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


# A torch function mode sees a call of one of these two functions as one operation. The operations inside depend on
# where an argument's memory was allocated.
def to_device(host: Any, move: Callable[[Any], Any]) -> Any:
    """The tensor's replacement for the call; the tensor itself if it is on the device already."""
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(to_device, (), host, move)
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            # Tensors created in inference mode do not count writes.
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        return move(host)


def bring_home(host: Any, moved: Any, version: int) -> bool:
    """Copies the forward's writes to the host tensor.

    Returns True if the moved tensor has become a result, with an autograd history that the host tensor lacks.
    """
    if torch._C._is_torch_function_mode_enabled():
        return bool(handle_torch_function(bring_home, (), host, moved, version))
    if _writes(moved) == version:
        return False
    with torch.inference_mode() if host.is_inference() else torch.no_grad():
        host.copy_(moved)
    return bool(moved.requires_grad and not host.requires_grad)
