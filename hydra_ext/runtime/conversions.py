"""``model.to(...)``, ``.half()`` and similar calls inside a context: a call that changes nothing passes, others raise.

All of them pass a function to ``nn.Module._apply``. It is tried on small probes first, one for each kind of tensor in
the model, because a conversion of the model itself could not be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hydra_ext.errors import ModelChanged

_Kind = tuple[Any, ...]


def refuse_changes(
    model: nn.Module, function: Callable[[torch.Tensor], Any], device: torch.device, recurse: bool
) -> None:
    """Tries ``function`` on probes. Moving the model to ``device``, where its forward runs, counts as no change.

    Raises:
        ModelChanged: the function would change or replace a parameter or buffer.
    """
    seen: set[_Kind] = set()
    for name, tensor in (*model.named_parameters(recurse=recurse), *model.named_buffers(recurse=recurse)):
        kind = _kind(tensor)
        if kind in seen:
            continue
        seen.add(kind)
        with torch.no_grad():
            change = _change(_probe(tensor), function, device)
        if change:
            raise ModelChanged(
                f"{type(model).__name__} is inside an offload context and was asked to make '{name}' and its like "
                f"{change}; do that before the context, or use param_dtype="
            )


def _kind(tensor: torch.Tensor) -> _Kind:
    strided = tensor.layout == torch.strided
    return (tensor.dtype, tensor.layout, _small(tensor), _dimensions(tensor) if strided else None)


def _small(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes of at most 2 that allow the same memory formats as the tensor's."""
    return tuple(min(size, 2) for size in tensor.shape)


def _dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of the dimensions in memory, outermost first."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind in host memory, where users see parameters; it counts writes even in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().to("cpu", copy=True)
        return torch.empty_permuted(_small(tensor), _dimensions(tensor), dtype=tensor.dtype, device="cpu").zero_()


def _change(probe: torch.Tensor, function: Callable[[torch.Tensor], Any], device: torch.device) -> str:
    """The change that ``function`` makes to ``probe``, in words; empty if there is none."""
    before = probe._version
    made = function(probe)
    if not isinstance(made, torch.Tensor):
        return f"a {type(made).__name__}"
    if made.dtype != probe.dtype:
        return str(made.dtype)
    if probe.layout == torch.strided and probe.is_shared():  # type: ignore[no-untyped-call]
        return "shared memory"
    if made is probe:
        return "" if probe._version == before else "of other values"
    if made.device not in (probe.device, device):
        return f"live on {made.device}"
    if made.layout != probe.layout or made.shape != probe.shape or made.stride() != probe.stride():
        return "of another layout or memory format"
    return "" if made.device != probe.device else "new tensors"
