"""Checks whether an optimizer's step can continue from saved options and state.

Checksums only tell that a checkpoint has the bytes that were written. Options are compared with the optimizer's own,
and tried with a constructor of its class. State is compared with the state that a trial step keeps of a small
parameter.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hydra_ext.checkpoint.format.values import BadValue, decode
from hydra_ext.checkpoint.optimizer_trials import Kept, Trials, shape
from hydra_ext.optim import masters
from hydra_ext.optim.host_optimizer import HostOptimizer

_KNOWN = ("torch.optim.", "hydra_ext.optim.")  # modules of classes whose constructors have no side effects
_MOST_STEPS = 2.0**53


def check(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], content: Any, fetch: Callable[[str], Tensor]
) -> None:
    """Checks the options and the state of all groups.

    Optimizers from outside torch.optim and hydra_ext.optim are not checked.

    Args:
        content: Saved content with the same groups and parameters as ``optimizer``.
        fetch: Returns a tensor on meta, of the type and shape of the saved tensor with this name.

    Raises:
        BadValue: The next step would fail, or compute something else.
    """
    trials = Trials(optimizer)
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        check_group(optimizer, group, names, saved["options"], content["state"], fetch, trials)


def check_group(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    names: Mapping[int, str],
    saved_options: Any,
    state: Mapping[str, Any],
    fetch: Callable[[str], Tensor],
    trials: Trials,
) -> None:
    """As :func:`check`, for one group.

    Args:
        state: Saved state by parameter name. It may have parameters of other groups, too.
        trials: Trials of the optimizer, shared by all its groups.
    """
    if not f"{type(optimizer).__module__}.".startswith(_KNOWN):
        return
    options = decode(saved_options, fetch)
    _check_options(optimizer, group, options, trials)
    for parameter in group["params"]:
        name = names[id(parameter)]
        entries = state.get(name)
        kept = None if entries is None else trials.kept(options, parameter.dtype, parameter.dim())
        if kept is not None:
            _check_state(name, decode(entries, fetch), kept, parameter, optimizer, trials.later)


def _check_options(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], options: dict[str, Any], trials: Trials
) -> None:
    taken = inspect.signature(type(optimizer)).parameters
    for key in optimizer.defaults.keys() & group.keys():  # a loaded group lacks torch's rules that hydra_ext has not
        usual = taken[key].default if key in taken else group[key]
        if key in options and not _alike(options[key], group[key], usual):
            raise BadValue(
                f"{key}={options[key]!r:.100} of a parameter group of the optimizer is not of the kind of "
                f"{group[key]!r}"
            )
        if key not in options and isinstance(group[key], (int, float)) and not isinstance(group[key], bool):
            raise BadValue(f"a parameter group of the optimizer has no {key}=")
    why = trials.refusal(options)
    # A schedule may set options that a step accepts and no constructor does, such as nesterov= without a momentum.
    if why and not all(_is_possible(optimizer, {key: value}, trials) for key, value in options.items()):
        raise BadValue(f"{type(optimizer).__name__} refuses the options of a parameter group: {why}")


def _is_possible(optimizer: torch.optim.Optimizer, options: dict[str, Any], trials: Trials) -> bool:
    """Whether a constructor accepts these options together with the optimizer's defaults, or with its class's."""
    return not trials.refusal(optimizer.defaults | options) or not trials.refusal(options)


def _alike(value: Any, current: Any, usual: Any) -> bool:
    """Whether a value is of a kind that may replace the current value of an option.

    Args:
        usual: Default of the option.
    """
    if value is None and usual is None:
        return True
    if isinstance(current, (list, tuple)):
        if not isinstance(usual, (list, tuple)) or len(usual) != len(current):
            usual = current
        return (
            isinstance(value, (list, tuple)) and len(value) == len(current) and all(map(_alike, value, current, usual))
        )
    if isinstance(current, bool) or current is None:
        return isinstance(value, (bool, type(None), int, float, str, Tensor))
    if isinstance(current, (int, float, Tensor)):
        if isinstance(value, Tensor):
            return value.numel() == 1
        return _is_float(value)
    return isinstance(value, type(current))


def _is_float(value: Any) -> bool:
    """Whether the value is a float other than NaN, or an integer in the range of floats."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float) and not math.isnan(value)


def _check_state(
    name: str,
    entries: dict[Any, Any],
    kept: Kept,
    parameter: Tensor,
    optimizer: torch.optim.Optimizer,
    later: frozenset[str],
) -> None:
    exact = isinstance(optimizer, HostOptimizer)  # torch's optimizers accept state of other types
    needed = kept.needed
    if isinstance(optimizer, HostOptimizer) and "step" in entries:
        needed |= set(optimizer._MOMENTS)  # the step that makes the count makes the moments, too
    missing = sorted(needed - entries.keys())
    if missing:
        raise BadValue(f"the optimizer's state of {name!r} lacks {missing}")
    for key, value in entries.items():
        expected = kept.known.get(key)
        if key not in kept.known:
            if exact and key in (masters.LOWER, masters.FULL):
                raise BadValue(f"the optimizer's state of {name!r} has a {key!r}, which this parameter does not use")
        elif isinstance(expected, Tensor) and not (value is None and key in later and not exact):
            expected_shape = _shape_for(parameter, expected)
            if (
                not isinstance(value, Tensor)
                or not _fits(value, expected, exact)
                or expected_shape not in (None, value.shape)
            ):
                raise BadValue(
                    f"{key!r} of the optimizer's state of {name!r} is {_described(value)}, not a tensor of "
                    f"{expected.dtype}, {list(expected_shape or ())}"
                )
        elif isinstance(expected, (int, float)) and not _is_count(value):
            raise BadValue(
                f"{key!r} of the optimizer's state of {name!r} is {_described(value)}, not a number of steps"
            )


def _fits(value: Tensor, expected: Tensor, exact: bool) -> bool:
    if exact:
        return value.dtype == expected.dtype
    return (value.is_floating_point(), value.is_complex()) == (expected.is_floating_point(), expected.is_complex())


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):  # other optimizers of the same rule keep the count in a tensor
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and abs(value) < _MOST_STEPS


def _shape_for(parameter: Tensor, expected: Tensor) -> torch.Size | None:
    """The shape of a parameter's state, from the shape of the small parameter's state; None if it is unknown."""
    if expected.shape == shape(parameter.dim()):
        return parameter.shape
    return expected.shape if expected.numel() == 1 else None


def _described(value: Any) -> str:
    return f"a tensor of {value.dtype}, {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
