"""``state_dict()`` of modules that are not whole."""

from __future__ import annotations

from torch import nn

from hydra_ext.errors import StateError
from hydra_ext.pipeline.split.stand_ins import is_absent


def refuse_state_dicts(model: nn.Module) -> None:
    """Those of the model raise from now on, and those of every module in it that has something absent in it."""
    model.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if module is not model:
            module.register_state_dict_pre_hook(_refuse_if_absent)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise StateError(
        "this rank holds only its own stages of the model, so that model.state_dict() would have nothing behind the "
        "other names: pipe.state_dict() has what is here"
    )


def _refuse_if_absent(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(is_absent(tensor) for tensor in (*module.parameters(), *module.buffers())):
        _refuse(module, prefix, keep_vars)
