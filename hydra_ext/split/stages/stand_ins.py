"""Absent parameters and buffers, and tensors that replace them for the length of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hydra_ext.split.stages.tensors import Absent, AbsentBuffer


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer that is not on the meta device; the CPU if there is none."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def is_absent(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, (Absent, AbsentBuffer))


def replace_tensors(model: nn.Module, new: Callable[[Tensor], Tensor | None]) -> list[tuple[nn.Module, str, Tensor]]:
    """Replaces parameters and buffers where ``new`` returns something; a shared one stays shared.

    Returns:
        The module, the name and the former tensor of each replaced one.
    """
    made: dict[Tensor, Tensor | None] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                if tensor not in made:
                    made[tensor] = new(tensor)
                substitute = made[tensor]
                if substitute is not None:
                    held[name] = substitute  # type: ignore[assignment]
                    replaced.append((module, name, tensor))
    return replaced


def put_back(replaced: list[tuple[nn.Module, str, Tensor]]) -> None:
    for module, name, tensor in replaced:
        if name in module._parameters:
            module._parameters[name] = tensor  # type: ignore[assignment]
        else:
            module._buffers[name] = tensor


@contextmanager
def with_stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, parameters and buffers on the meta device seem to be on ``device``, where programs then compute."""

    def new(tensor: Tensor) -> Tensor | None:
        if not tensor.is_meta:
            return None
        if isinstance(tensor, nn.Parameter):
            return Absent.like(tensor, device)
        return AbsentBuffer.like(tensor, device)

    replaced = replace_tensors(model, new)
    try:
        yield
    finally:
        put_back(replaced)


@contextmanager
def present(
    block: nn.Module, device: torch.device, noted: Callable[[Tensor, Tensor], None] | None = None
) -> Iterator[None]:
    """Inside, the block's absent parameters have random numbers, and its absent buffers have constants.

    Args:
        noted: Called with each absent tensor and its substitute.
    """
    generator: torch.Generator | None = None

    def new(tensor: Tensor) -> Tensor | None:
        nonlocal generator
        if not isinstance(tensor, (Absent, AbsentBuffer)):
            return None
        generator = generator or torch.Generator(device).manual_seed(0)
        filled = _filled(tensor, device, generator)
        if noted is not None:
            noted(tensor, filled)
        return nn.Parameter(filled, requires_grad=tensor.trainable) if isinstance(tensor, Absent) else filled

    replaced = replace_tensors(block, new)
    try:
        yield
    finally:
        put_back(replaced)


def _filled(tensor: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    with torch.no_grad(), torch.inference_mode(False):
        if isinstance(tensor, AbsentBuffer):
            return torch.full(tensor.shape, tensor.dtype.is_floating_point, device=device).to(tensor.dtype)
        if not tensor.dtype.is_floating_point:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        numbers = torch.empty(tensor.shape, dtype=torch.float32, device=device).normal_(std=0.02, generator=generator)
        return numbers.to(tensor.dtype)
