"""The visible state of a model and of the process, to compare before and after."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable


def footprint(model: nn.Module) -> dict[str, Any]:
    """Returns classes, dictionaries, hooks, parameters and the owners of their bytes, and autograd's engine."""
    seen: dict[str, Any] = {"engine": Variable._execution_engine}
    for name, module in model.named_modules():
        seen[f"{name}: class"] = type(module)
        seen[f"{name}: attributes"] = sorted(vars(module))
        for key, value in vars(module).items():
            if isinstance(value, dict):
                seen[f"{name}.{key}"] = [(entry, id(held)) for entry, held in value.items()]
    for name, parameter in model.named_parameters():
        seen[f"{name}: tensor"] = (id(parameter), type(parameter), parameter.device, parameter.dtype, parameter.shape)
        seen[f"{name}: autograd"] = (parameter.requires_grad, parameter.is_leaf, parameter._backward_hooks)
    return seen


def process_footprint() -> dict[str, Any]:
    """Returns Python's and the system's threads, open files, and torch's switches."""
    return {
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "system threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "engine": Variable._execution_engine,
        "global hooks": nn.modules.module._has_any_global_hook(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }
