"""Refuses options, parameters and gradients that these optimizers cannot work with, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hydra_ext.errors import InvalidOptimizer
from hydra_ext.optim import masters

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPE_NAMES = "float32, bfloat16 or float16"

# Options of torch.optim that these optimizers lack, with the values that do not ask for them.
WITHOUT: Mapping[str, tuple[object, ...]] = {
    "amsgrad": (False,),
    "maximize": (False,),
    "capturable": (False,),
    "differentiable": (False,),
    "foreach": (None, False),
    "fused": (None, False),
}
_WAY_OUT = {
    "amsgrad": "use torch.optim for it",
    "maximize": "negate the loss",
    "capturable": "it is for parameters on a GPU: use torch.optim for them",
    "differentiable": "use torch.optim for it",
    "foreach": "leave it out: the update of all parameters is one native pass already",
    "fused": "leave it out: the update is one native pass already",
}
# Options that change the result of a step.
_RULES = ("amsgrad", "maximize")


def refuse_options(owner: str, options: Mapping[str, object]) -> None:
    """Refuses options: those of torch.optim by name if they ask for something, others as Python does."""
    for name, value in options.items():
        if name not in WITHOUT:
            raise TypeError(f"{owner}() got an unexpected keyword argument '{name}'")
        if value not in WITHOUT[name]:
            raise InvalidOptimizer(f"{owner}({name}={value!r}): {name} is not supported; {_WAY_OUT[name]}")


def refuse_rules(owner: str, group: Mapping[str, Any]) -> None:
    """Refuses a loaded group that was stepped by another rule. Options that only change how a step runs are ignored."""
    for name in _RULES:
        if group.get(name):
            raise InvalidOptimizer(
                f"the state to be loaded was made with {name}={group[name]!r}, which {owner} does not support; "
                f"{_WAY_OUT[name]}"
            )


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidOptimizer(message)


def check_threads(threads: int | None) -> None:
    expect(threads is None or threads >= 1, f"threads={threads!r}: give a number of threads, or None for torch's own")


def check_group(group: Mapping[str, Any], first: int) -> None:
    """Checks the options that every rule has, and the parameters. ``first`` is the first parameter's number."""
    expect(
        group["master"] in masters.KINDS,
        f"master={group['master']!r}: give 'split', which keeps a bf16 weight's fp32 number in 2 bytes more, or "
        "'fp32', which takes 4 more",
    )
    expect(
        group["moments"] in (torch.float32, torch.bfloat16),
        f"moments={group['moments']!r}: give torch.float32, or torch.bfloat16 for half the bytes",
    )
    for name in ("lr", "weight_decay"):
        expect(float(group[name]) >= 0.0, f"{name}={group[name]!r} is negative")
    for ordinal, parameter in enumerate(group["params"], first):
        reason = _why_not_updatable(parameter)
        expect(reason is None, f"parameter {ordinal} of shape {tuple(parameter.shape)} {reason}")


def _why_not_updatable(parameter: Tensor) -> str | None:
    wraps_others: bool = is_traceable_wrapper_subclass(parameter)
    if wraps_others:
        return f"is a {type(parameter).__name__}, whose memory is not its own: use torch.optim for it"
    if parameter.device.type not in ("cpu", "meta"):  # on meta a parameter gets its memory before the first step
        return f"is on {parameter.device}: these optimizers update host memory; use torch.optim(fused=True) for it"
    if parameter.dtype not in DTYPES:
        return f"is of {parameter.dtype}: use {_DTYPE_NAMES}, or torch.optim for it"
    if parameter.layout != torch.strided:
        return f"is of layout {parameter.layout}: make it dense, or use torch.optim for it"
    if parameter.is_inference():
        return "was made in inference mode and counts no changes: make it outside torch.inference_mode()"
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return f"has gaps or overlaps in memory, strides {parameter.stride()}: make it contiguous"
    return None


def check_gradient(gradient: Tensor, ordinal: int) -> None:
    if gradient.layout != torch.strided:
        raise InvalidOptimizer(
            f"the gradient of parameter {ordinal} is sparse: give its layer sparse=False, or use torch.optim.SparseAdam"
        )
    expect(
        gradient.device.type == "cpu",
        f"the gradient of parameter {ordinal} is on {gradient.device}: these optimizers update host memory; move it "
        "to the CPU",
    )
    expect(gradient.dtype in DTYPES, f"the gradient of parameter {ordinal} is of {gradient.dtype}, not {_DTYPE_NAMES}")


def check_destination(destination: Tensor, parameter: Tensor, ordinal: int) -> None:
    expect(
        destination.device == parameter.device
        and destination.dtype == parameter.dtype
        and destination.shape == parameter.shape
        and destination.stride() == parameter.stride(),
        f"the destination of parameter {ordinal}, {_described(destination)}, differs from the parameter, "
        f"{_described(parameter)}: make it with torch.empty_like(parameter)",
    )
    expect(
        destination is not parameter,
        f"the destination of parameter {ordinal} is the parameter itself: leave it out to write in place",
    )
    expect(
        not destination.is_inference(),
        f"the destination of parameter {ordinal} was made in inference mode and counts no changes: "
        "make it outside torch.inference_mode()",
    )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
