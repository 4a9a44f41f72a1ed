"""Whether an optimizer's step can go on from what was saved: its options, and the tensors of its state.

Checksums only say that a checkpoint is what was written. Options are compared with those that the optimizer has, and
given to a constructor of its class; state with that of a parameter of a few numbers, after a step of such an optimizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hydra_ext.checkpoint.values import BadValue, decode
from hydra_ext.errors import HydraError
from hydra_ext.optim.host_optimizer import HostOptimizer

_KNOWN = ("torch.optim.", "hydra_ext.optim.")  # whose constructors have no other effects
_HOW = {"capturable", "differentiable", "foreach", "fused"}  # a step is made; they change no state's type
_OPTIONAL = {"momentum_buffer"}  # made when it is first wanted
_MOST_STEPS = 2.0**53


def check(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], content: Any, fetch: Callable[[str], Tensor]
) -> None:
    """
    Args:
        content: which has the groups and parameters that ``optimizer`` has.
        fetch: gives a tensor on meta, of the type and shape of the one with this name.

    Raises:
        BadValue: the next step would fail, or compute something else.
    """
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        check_group(optimizer, group, names, saved["options"], content["state"], fetch)


def check_group(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    names: Mapping[int, str],
    saved_options: Any,
    state: Mapping[str, Any],
    fetch: Callable[[str], Tensor],
) -> None:
    """As :func:`check`, of one group.

    Args:
        state: of its parameters, and perhaps of others, by name.
    """
    if not f"{type(optimizer).__module__}.".startswith(_KNOWN):
        return
    options = decode(saved_options, fetch)
    _check_options(optimizer, group, options)
    references: dict[tuple[torch.dtype, int], dict[str, Any] | None] = {}
    for parameter in group["params"]:
        name = names[id(parameter)]
        entries = state.get(name)
        if not entries:
            continue
        alike = parameter.dtype, parameter.dim()
        if alike not in references:
            references[alike] = _reference(optimizer, options, *alike)
        reference = references[alike]
        if reference is not None:
            exact = isinstance(optimizer, HostOptimizer)  # torch's take the types that they find
            _check_state(name, decode(entries, fetch), reference, parameter, exact=exact)


def _check_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], options: dict[str, Any]) -> None:
    for key in optimizer.defaults.keys() & group.keys():  # a group that was loaded has no rules that are not ours
        if key in options and not _alike(options[key], group[key]):
            raise BadValue(
                f"{key}={options[key]!r:.100} of a group of the optimizer's is not of the kind {group[key]!r}"
            )
        if key not in options and isinstance(group[key], (int, float)) and not isinstance(group[key], bool):
            raise BadValue(f"a group of the optimizer's has no {key}=")
    why = _refusal(optimizer, options)
    # A schedule may lead to options that fit a step, and no constructor, such as Nesterov's rule without a momentum.
    if why and not all(_is_possible(optimizer, {key: value}) for key, value in options.items()):
        raise BadValue(f"{type(optimizer).__name__} cannot have the options of a group: {why}")


def _is_possible(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> bool:
    """Whether such options can be beside those of the optimizer, or beside those of its class."""
    return not _refusal(optimizer, optimizer.defaults | options) or not _refusal(optimizer, options)


def _refusal(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> str:
    try:
        _made(optimizer, options, torch.float32, 2)
    except (HydraError, ValueError, TypeError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


def _alike(value: Any, current: Any) -> bool:
    """Whether a value is of a kind that may stand in the place of the current one."""
    if isinstance(current, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(current)
            and all(_alike(one, other) for one, other in zip(value, current, strict=True))
        )
    if isinstance(current, bool) or current is None:
        return isinstance(value, (bool, type(None), int, float, str, Tensor))
    if isinstance(current, (int, float, Tensor)):
        if isinstance(value, Tensor):
            return value.numel() == 1
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, type(current))


def _made(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], dtype: torch.dtype, dimensions: int
) -> torch.optim.Optimizer:
    """Another one of its class, with these options and a parameter of a few numbers."""
    cls = type(optimizer)
    taken = inspect.signature(cls).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    given: dict[str, Any] = {
        key: tree_map_only(Tensor, _halves, value)
        for key, value in options.items()
        if key in optimizer.defaults and (key in taken or anything)
    }
    parameter = torch.nn.Parameter(torch.ones(_shape(dimensions), dtype=dtype, device="cpu"))
    return cls([parameter], **given)


def _halves(value: Tensor) -> Tensor:
    """With numbers, which one on meta has not. A half is a rate, a momentum and a decay for every optimizer."""
    return torch.full(value.shape, 0.5, dtype=value.dtype, device="cpu")


def _shape(dimensions: int) -> tuple[int, ...]:
    return tuple(range(2, 2 + dimensions))


def _reference(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], dtype: torch.dtype, dimensions: int
) -> dict[str, Any] | None:
    """The state of a parameter that was stepped; None where such a step cannot be made."""
    plain = {key: value for key, value in options.items() if key not in _HOW}
    try:
        made = _made(optimizer, plain, dtype, dimensions)
        parameter = made.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        made.step()
    except Exception:  # noqa: BLE001 - such as one that wants a closure: there is nothing to compare with then
        return None
    return dict(made.state[parameter])


def _check_state(
    name: str, entries: dict[Any, Any], reference: dict[str, Any], parameter: Tensor, *, exact: bool
) -> None:
    missing = sorted(reference.keys() - entries.keys() - _OPTIONAL)
    if missing:
        raise BadValue(f"the optimizer's state of {name!r} lacks {missing}")
    for key, value in entries.items():
        expected = reference.get(key)
        if key not in reference:
            if exact and key not in _OPTIONAL:
                raise BadValue(f"the optimizer's state of {name!r} has a {key!r}, which its parameter has no use for")
        elif isinstance(expected, Tensor) and not (value is None and key in _OPTIONAL):
            shape = _shape_for(parameter, expected)
            if not isinstance(value, Tensor) or not _fits(value, expected, exact) or shape not in (None, value.shape):
                raise BadValue(
                    f"{key!r} of the optimizer's state of {name!r} is {_described(value)}, and was to be a tensor of "
                    f"{expected.dtype}, {list(shape or ())}"
                )
        elif isinstance(expected, (int, float)) and not _is_count(value):
            raise BadValue(
                f"{key!r} of the optimizer's state of {name!r} is {_described(value)}, and no number of steps"
            )


def _fits(value: Tensor, expected: Tensor, exact: bool) -> bool:
    if exact:
        return value.dtype == expected.dtype
    return (value.is_floating_point(), value.is_complex()) == (expected.is_floating_point(), expected.is_complex())


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _MOST_STEPS


def _shape_for(parameter: Tensor, expected: Tensor) -> torch.Size | None:
    """Of what belongs to a parameter, from that of one of a few numbers; None if it is not known."""
    if expected.shape == _shape(parameter.dim()):
        return parameter.shape
    return expected.shape if expected.numel() == 1 else None


def _described(value: Any) -> str:
    return f"a tensor of {value.dtype}, {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
