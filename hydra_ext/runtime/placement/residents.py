"""Residents: the model's buffers, which are on the device for the whole context, but for paged ones.

Buffers stay on the device because forwards write to them, as long as they take a small part of the budget
(:func:`paged_buffers`). Meanwhile ``state_dict()`` returns host copies. When the
context ends, the model has its own buffers again, with the new values.

Recurrent modules keep a list of their weights. When the weights have changed, they move them into one memory, which
would detach a paged weight from its storage. Inside the context this is disabled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.runtime.placement.faces import can_dress
from hydra_ext.state.composites import inner_tensors

_BUFFERS_PER_BUDGET = 8  # buffers that stay take at most one part in so many of the budget
_LEAST_PAGED = 4096  # bytes: smaller buffers are not paged


class Residents:
    """The residents of one model. :meth:`move_in` and :meth:`move_out` alternate; a repeated call is a no-op."""

    def __init__(self, model: nn.Module, device: torch.device, layout: Layout) -> None:
        self._model = model
        self._paged = {id(buffer) for buffer in layout.buffers.values()}
        self._device = device
        self._in = False
        self._hosts: dict[int, torch.Tensor] = {}  # host buffers by the device buffer's identity
        self._held: list[torch.Tensor] = []  # the device buffers, so that their identities are not reused
        self._handles: list[RemovableHandle] = []

    def move_in(self) -> None:
        if self._in:
            return
        self._in = True
        for recurrent in _recurrent(self._model):
            recurrent.__dict__["flatten_parameters"] = _LeftWeights(recurrent)
        if self._device.type == "cpu":
            return
        moved: dict[int, torch.Tensor] = {}  # by the host buffer's identity: modules may share one
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu" and id(buffer) not in self._paged:
                    module._buffers[key] = self._moved(buffer, moved)
            if module._buffers:
                self._handles.append(module.register_state_dict_post_hook(_state_on_host))  # type: ignore[no-untyped-call]

    def move_out(self) -> None:
        if not self._in:
            return
        self._in = False
        for recurrent in _recurrent(self._model):
            recurrent.__dict__.pop("flatten_parameters", None)
            recurrent._init_flat_weights()
        for handle in self._handles:
            handle.remove()
        with torch.no_grad():
            for module in self._model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None and buffer.device == self._device:
                        module._buffers[key] = self._home(buffer)
        self._handles, self._hosts, self._held = [], {}, []

    def _moved(self, host: torch.Tensor, moved: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(host) not in moved:
            buffer = host.to(self._device)
            moved[id(host)] = buffer
            self._hosts[id(buffer)] = host
            self._held.append(buffer)
        return moved[id(host)]

    def _home(self, buffer: torch.Tensor) -> torch.Tensor:
        host = self._hosts.get(id(buffer))
        if host is None or host.shape != buffer.shape or host.dtype != buffer.dtype:
            return buffer.to("cpu")  # a forward has replaced the buffer by another tensor
        host.copy_(buffer)
        return host


def resident_bytes(model: nn.Module, layout: Layout) -> int:
    """Bytes of a model that stay on the device: buffers that are not paged, and inner tensors of composites."""
    paged = {id(buffer) for buffer in layout.buffers.values()}
    buffers = [buffer for buffer in model.buffers() if id(buffer) not in paged]
    return sum(part.nbytes for tensor in (*buffers, *layout.stay) for part in _parts(tensor))


def buffer_bytes(model: nn.Module) -> int:
    return sum(part.nbytes for buffer in model.buffers() for part in _parts(buffer))


def paged_buffers(model: nn.Module, budget: int) -> dict[str, torch.Tensor]:
    """The buffers to page, by their names: the largest, until the others take a small part of the budget.

    Only integers in memory of their own are paged, such as packed weights. Kernels write floating-point statistics
    without a sign that the core would see, and nothing else could see that the device has newer numbers.
    """
    left = buffer_bytes(model)
    found: dict[str, torch.Tensor] = {}
    if left <= budget // _BUFFERS_PER_BUDGET:
        return found
    elsewhere = _attribute_memory(model)
    scripted = {id(b) for m in model.modules() if isinstance(m, torch.jit.ScriptModule) for b in m.buffers()}
    dense = [(name, buffer) for name, buffer in model.named_buffers() if buffer.layout == torch.strided]
    for name, buffer in sorted(dense, key=lambda item: item[1].nbytes, reverse=True):
        if left <= budget // _BUFFERS_PER_BUDGET or buffer.nbytes < _LEAST_PAGED:
            break
        if id(buffer) not in scripted and _is_pageable(buffer) and _memory(buffer) not in elsewhere:
            found[name] = buffer
            left -= buffer.nbytes
    return found


def _is_pageable(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point() or buffer.is_complex() or buffer.is_inference():
        return False
    if not can_dress(buffer) or _C.why_not_pageable(buffer):
        return False
    storage = buffer.untyped_storage()
    # The Python object of the storage is one of its two owners.
    return storage.nbytes() == buffer.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _attribute_memory(model: nn.Module) -> set[int]:
    """The memory of tensors that attributes of modules lead to, through containers and objects."""
    rest = [v for m in model.modules() for name, v in m.__dict__.items() if name not in ("_parameters", "_buffers")]
    found, seen = set(), set()
    while rest:
        value = rest.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type, FunctionType, ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found |= {_memory(each) for each in inner_tensors(value).values() if not _C.why_not_pageable(each)}
        elif isinstance(value, Mapping):
            rest += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            rest += value
        elif hasattr(value, "__dict__"):
            rest += vars(value).values()
    return found


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor consists of. Buffers may be sparse, such as adjacency matrices."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _recurrent(model: nn.Module) -> Iterator[nn.RNNBase]:
    return (module for module in model.modules() if isinstance(module, nn.RNNBase))


class _LeftWeights:
    """Replaces a recurrent module's ``flatten_parameters``; copies and pickles of the module get their own method."""

    def __init__(self, module: nn.RNNBase) -> None:
        self._module = module

    def __call__(self) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(memo.get(id(self._module), self._module), "flatten_parameters")  # noqa: B009 - of a copy's class

    def __reduce__(self) -> Any:
        return getattr, (self._module, "flatten_parameters")


def _state_on_host(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]) -> None:
    for key in module._buffers:
        value = state.get(prefix + key)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            state[prefix + key] = value.to("cpu")
