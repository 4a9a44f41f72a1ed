"""A model on fake tensors for a while. They have shapes and dtypes, and no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hydra_ext.state.arguments import closed, opened

Fake = Callable[[Tensor], Tensor]


class Fakes:
    """Makes fake tensors on one device: one for each tensor, however often it is asked for.

    Args:
        mode: The FakeTensorMode.
        device: Where the fakes pretend to be.
        param_dtype: Dtype of floating parameters; None for their own.
    """

    def __init__(self, mode: Any, device: torch.device, param_dtype: torch.dtype | None) -> None:
        self._mode = mode
        self._device = device
        self._param_dtype = param_dtype
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # originals too: a dead one's identity may be used again

    def of(self, tensor: Tensor) -> Tensor:
        known = self._made.get(id(tensor))
        if known is None:
            known = self._made[id(tensor)] = tensor, self._make(tensor)
        return known[1]

    def of_value(self, value: Any) -> Any:
        """A value with a fake for each tensor in it."""

        def of_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.of(leaf)
            content = opened(leaf)
            return (
                leaf if content is None else closed(leaf, {key: self.of_value(held) for key, held in content.items()})
            )

        return tree_map(of_leaf, value)

    def tensor_on(self, storage: Any, dtype: torch.dtype, place: tuple[int, torch.Size, tuple[int, ...]]) -> Tensor:
        """A fake on a storage that is there."""
        made = torch.empty(0, dtype=dtype, device=self._device)
        cached, self._mode.cache_enabled = self._mode.cache_enabled, False  # the cache would keep the storage alive
        try:
            return made.set_(storage, *place)
        finally:
            self._mode.cache_enabled = cached

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            fake: Tensor = self._mode.from_tensor(tensor)
            return fake
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = tensor.dtype
        if is_parameter and self._param_dtype is not None and tensor.is_floating_point():
            dtype = self._param_dtype
        with self._mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self._device)
            if is_parameter:
                return nn.Parameter(made, requires_grad=tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)


@contextmanager
def on_fakes(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """Fakes stand in for all tensors that modules hold. Afterwards the modules hold what they held before."""
    before = [_held(module) for module in model.modules()]
    try:
        for module in model.modules():
            _replace(module, fakes)
        yield
    finally:
        for attributes, contents in before:
            attributes.put()
            for content in contents:
                content.put()


class _Content:
    """What a dictionary or list held at one moment."""

    def __init__(self, owner: dict[Any, Any] | list[Any]) -> None:
        self._owner = owner
        self._held = owner.copy()

    def put(self) -> None:
        if isinstance(self._owner, dict):
            if list(self._owner) == list(self._held):
                self._owner.update(self._held)
                return
            self._owner.clear()
            self._owner.update(self._held)
        else:
            self._owner[:] = self._held


def _held(module: nn.Module) -> tuple[_Content, list[_Content]]:
    return _Content(module.__dict__), [
        _Content(value) for value in module.__dict__.values() if isinstance(value, (dict, list))
    ]


def _replace(module: nn.Module, fakes: Fakes) -> None:
    holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
    for held in holders:
        for name, value in held.items():
            if isinstance(value, Tensor):
                held[name] = fakes.of(value)
