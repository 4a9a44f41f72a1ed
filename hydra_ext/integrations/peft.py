"""peft's adapters around a base that :func:`hydra_ext.materialize` has built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hydra_ext.construction import fill, has_source
from hydra_ext.construction.building import replace_contents
from hydra_ext.errors import UnsupportedModel
from hydra_ext.integrations.versions import expect_version

expect_version("peft", "0.17", what="hydra_ext.integrations.peft")

import peft
from peft.utils import ModulesToSaveWrapper

_FROM_WEIGHTS = (
    "get_peft_model(): adapters of this {} are computed from the base's weights, as those of DoRA and PiSSA are, and a "
    "materialized base has none yet: build it with its weights, by the class's own from_pretrained()"
)


def get_peft_model(model: nn.Module, config: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``peft.get_peft_model``, also for a base without memory.

    Adapters are drawn on the host, with the numbers that they have around a base with memory. peft would put them on
    meta, where the base is. Modules that are trained whole (``modules_to_save=``) get their numbers at once.
    :class:`hydra_ext.offload` takes what this returns, and reads the rest of the base from its files.

    Raises:
        WeightsError: A file of the base cannot be read any more, or has changed.
        UnsupportedModel: Adapters are computed from the base's weights, which are not there yet. The base may have
            some adapters by then: build it anew.
    """
    lacks_weights = any(parameter.is_meta for parameter in model.parameters())
    try:
        with _StaysOnHost():
            around = peft.get_peft_model(model, config, *args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not lacks_weights:
            raise
        raise UnsupportedModel(f"{_FROM_WEIGHTS.format(type(config).__name__)}; peft says: {error}") from error
    for module in around.modules():
        if isinstance(module, ModulesToSaveWrapper):
            _fill_copies(module)
    if any(parameter.is_meta and not has_source(parameter) for parameter in around.parameters()):
        raise UnsupportedModel(_FROM_WEIGHTS.format(type(config).__name__))
    return around


class _StaysOnHost(TorchFunctionMode):
    """What has numbers does not move to meta, where it would lose them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.to and not args[0].is_meta:
            args = [args[0], *(args[0].device if _is_meta(each) else each for each in args[1:])]
            kwargs = {key: args[0].device if _is_meta(value) else value for key, value in kwargs.items()}
        return function(*args, **kwargs)


def _is_meta(value: object) -> bool:
    return value == "meta" or (isinstance(value, torch.device) and value.type == "meta")


def _fill_copies(wrapper: Any) -> None:
    """A copy of a module on meta is not what was built: it gets the numbers of the one that was."""
    original = wrapper.original_module
    if any(parameter.is_meta for parameter in original.parameters()):
        fill(original)
    for copied in wrapper.modules_to_save.values():
        for (name, parameter), its in zip(copied.named_parameters(), original.parameters(), strict=True):
            if parameter.is_meta:
                replace_contents(parameter, its.detach().clone(), name)
