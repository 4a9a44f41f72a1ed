"""An optimizer's state by its parameters' names, in its own types.

It is restored directly: ``Optimizer.load_state_dict`` would cast the fp32 state of bf16 parameters to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hydra_ext.checkpoint.format.tensors import Entry
from hydra_ext.checkpoint.format.values import BadValue, Encoder, decode
from hydra_ext.errors import UnsupportedState
from hydra_ext.optim.delayed import DelayedOptimizer
from hydra_ext.optim.host_optimizer import HostOptimizer


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state in the form in which it is saved.

    Attributes:
        content: State as JSON, with names in place of tensors.
        groups: Tensors of each parameter's state, and tensors in the options of each parameter group.
    """

    content: dict[str, Any]
    groups: list[list[Entry]] = field(default_factory=list)


def kind(owner: object) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


def capture(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    *,
    only: Container[str] | None = None,
    owner: str = "",
) -> OptimizerState:
    """The state of an optimizer, to be saved.

    Args:
        names: Names of the model's parameters, by ``id``.
        only: Names of the parameters whose state is saved; None for all.
        owner: Prefix for the names of tensors in options, if a checkpoint holds several optimizers.

    Raises:
        UnsupportedState: A part of the state could not be restored.
    """
    _refuse_strangers(optimizer)
    groups: list[list[Entry]] = []

    def encoded(value: object, place: str) -> Any:
        encoder = Encoder()
        found = encoder.encode(value, place)
        if encoder.entries:
            groups.append(encoder.entries)
        return found

    param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        members = [_name(optimizer, parameter, names) for parameter in group["params"]]
        param_groups.append({"params": members, "options": encoded(options, f"{owner}group {number}")})
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state = {}
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, Tensor) or id(parameter) not in stepped:
            raise UnsupportedState(
                f"{kind(optimizer)} keeps state of {repr(parameter)[:60]}, which is not one of its parameters: a "
                "checkpoint holds only state of parameters. Keep the value in a parameter's state"
            )
        name = names[id(parameter)]
        if entries and (only is None or name in only):  # a mere lookup in `state` creates an empty entry
            state[name] = encoded(entries, name)
    return OptimizerState({"class": kind(optimizer), "groups": param_groups, "state": state}, groups)


def _refuse_strangers(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that may have state outside ``state`` and ``param_groups``."""
    own = isinstance(optimizer, (HostOptimizer, DelayedOptimizer))  # their methods convert other optimizers' state
    for method in () if own else ("state_dict", "load_state_dict"):
        if getattr(type(optimizer), method) is not getattr(torch.optim.Optimizer, method):
            raise UnsupportedState(
                f"{kind(optimizer)} has a {method}() of its own, so it may have state beside its parameters', which no "
                "checkpoint can hold: use an optimizer of torch.optim or hydra_ext.optim, or save both yourself"
            )
    more = optimizer.state_dict().keys() - {"state", "param_groups"}
    if more:
        raise UnsupportedState(
            f"a hook puts {sorted(more)} into the state_dict() of {kind(optimizer)}, which would be lost: remove the "
            "hook"
        )


def _name(optimizer: torch.optim.Optimizer, parameter: Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UnsupportedState(
            f"{kind(optimizer)} has a parameter of shape {list(parameter.shape)} that the model does not have: put it "
            "into a module of the model"
        )
    return name


# ---- restoring ------------------------------------------------------------------------------------------------------


def differences(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Any) -> list[str]:
    """Differences between an optimizer and a saved one, a line each.

    Args:
        saved: Content that :func:`check` has passed.
    """
    lines = []
    if saved["class"] != kind(optimizer):
        lines.append(f"the optimizer was a {saved['class']!r:.200}, and is a {kind(optimizer)}")
    now = [[_name(optimizer, parameter, names) for parameter in group["params"]] for group in optimizer.param_groups]
    before = [group["params"] for group in saved["groups"]]
    if len(before) != len(now):
        lines.append(f"the optimizer had {len(before)} groups of parameters, and has {len(now)}")
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            lost, more = sorted(set(old) - set(new)), sorted(set(new) - set(old))
            what = (
                f"lacks {lost}, has {more} in addition"[:400] if lost or more else "has its parameters in another order"
            )
            lines.append(f"group {number} of the optimizer {what}")
    return lines


# Options of torch's optimizers that must be a bool or None. A tensor would fail only in the optimizer's next step, or
# in its load_state_dict(), after the weights have been loaded.
_SWITCHES = {
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "nesterov",
}


def check(content: Any, fetch: Callable[[str], Tensor]) -> None:
    """Checks that a value is the ``content`` of what :func:`capture` returns.

    Args:
        fetch: Returns any tensor for a saved tensor's name; raises KeyError if there is no such tensor.

    Raises:
        BadValue: The value is something else.
    """
    if not isinstance(content, dict) or not isinstance(content.get("class"), str):
        raise BadValue("the optimizer's state is not a table with the optimizer's class")
    groups, state = content.get("groups"), content.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise BadValue("the optimizer's state has no groups")
    for group in groups:
        options = decode(group.get("options"), fetch) if isinstance(group, dict) else None
        if not isinstance(options, dict) or not _are_names(group.get("params")) or "params" in options:
            raise BadValue("a parameter group of the optimizer has no parameters or no options")
        for name in sorted(_SWITCHES & options.keys()):
            if not isinstance(options[name], (bool, type(None))):
                raise BadValue(
                    f"{name}= of a parameter group of the optimizer is a {type(options[name]).__name__}, not a bool"
                )
    members = {name for group in groups for name in group["params"]}
    if not state.keys() <= members or not all(isinstance(decode(state[name], fetch, name), dict) for name in state):
        raise BadValue("the optimizer has state of a parameter that is in none of its groups, or that is not a table")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def restore(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    content: Any,
    fetch: Callable[[str], Tensor],
    *,
    put: Callable[[Tensor], None] = lambda _: None,
) -> None:
    """Replaces an optimizer's state, and its groups' options, by the saved ones. The weights must be loaded before.

    Args:
        fetch: Reads a saved tensor by its name.
        put: Called with each parameter before its state is read.
    """
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        group.update(decode(saved["options"], fetch))
    members = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for group, parameter in members:
        entries = content["state"].get(names[id(parameter)])
        if entries is not None:
            put(parameter)
            found = decode(entries, fetch)
            optimizer.state[parameter] = {
                key: _laid_as(_where_it_was(key, value, parameter, group), parameter) for key, value in found.items()
            }


def _where_it_was(key: Any, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Moves a tensor to the device where torch.optim keeps it: the parameter's, or the host for a count of steps."""
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value.to(parameter.device) if isinstance(value, Tensor) and not on_host else value


def _laid_as(value: Any, parameter: Tensor) -> Any:
    """Gives a tensor of the parameter's shape the parameter's layout, which optimizers give their state, too."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
