"""Which stages of a chain keep what backward needs, and which run forward again, within a memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.solution import Solution

_MOST_BYTES = 2**60
_CLASSES = {"persistent": _C.CheckpointClass.PERSISTENT, "flat": _C.CheckpointClass.FLAT}
_KINDS = {
    _C.CheckpointStepKind.FORWARD: "forward",
    _C.CheckpointStepKind.FORWARD_SAVING: "forward_saving",
    _C.CheckpointStepKind.BACKWARD: "backward",
    _C.CheckpointStepKind.DROP: "delete_x",
}


def solve(problem: Mapping[str, object]) -> Solution:
    """Finds the fastest schedule of forwards and backwards that stays within ``memory_limit``.

    Stages are numbered from 1 to n. ``x_i`` is the output of stage i, and ``x_0`` the chain's input; ``s_i`` is all
    that stage i saves for its backward, with ``x_i`` in it; the gradient ``y_i`` has the size of ``x_i``. At first
    ``x_0`` and ``y_n`` are in memory. An operation is possible if what is stored, its new output and its transient size
    are together at most ``memory_limit``. The plan is a list of ``[operation, i]``:

    ==================  ==============================  =============  ==============================  =============
    Operation           Needs                           Adds           Frees                           Takes
    ==================  ==============================  =============  ==============================  =============
    ``forward``         ``x_(i-1)`` or ``s_(i-1)``      ``x_i``                                        forward time
    ``forward_saving``  ``x_(i-1)`` or ``s_(i-1)``      ``s_i``                                        forward time
    ``backward``        ``y_i``, ``s_i``, and           ``y_(i-1)``    ``s_i``, ``y_i``                backward time
                        ``x_(i-1)`` or ``s_(i-1)``
    ``delete_x``        ``x_i``                                        ``x_i``                         nothing
    ==================  ==============================  =============  ==============================  =============

    Schedules of class ``persistent`` keep what they store until its backward (Beaumont et al., "Optimal checkpointing
    for heterogeneous chains", 2019). Those of class ``flat`` cut the chain into segments; each is kept, or runs again
    once, as a whole, from its input (Chen et al., "Training deep nets with sublinear memory cost", 2016).

    Args:
        problem: A mapping with ``n``, ``forward_time``, ``backward_time``, ``saved_size``, ``forward_transient`` and
            ``backward_transient`` (n numbers each), ``x_size`` (n + 1 numbers), ``memory_limit`` and ``class``. Sizes
            are whole numbers of one unit. Other keys are not read.

    Returns:
        The solution. Its objective is the time of all forwards and backwards. It is optimal in its class, unless a very
        long chain has sizes with many digits; then ``bound`` is lower than the objective.

    Raises:
        PlanError: A key is missing, or a value has the wrong type, length or sign, or the chain is too long.
    """
    kind = _value(problem, "class")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise PlanError(f"class={kind!r} is not a class of schedules: give 'persistent' or 'flat'")
    count = _size("n", _value(problem, "n"))
    sizes = {name: _sizes(problem, name, count) for name in ("saved_size", "forward_transient", "backward_transient")}
    outputs = _sizes(problem, "x_size", count + 1)
    found = _C.plan_checkpoints(
        outputs[0] if outputs else 0,
        list(
            zip(
                _times(problem, "forward_time", count),
                _times(problem, "backward_time", count),
                outputs[1:],
                sizes["saved_size"],
                sizes["forward_transient"],
                sizes["backward_transient"],
                strict=True,
            )
        ),
        memory=_size("memory_limit", _value(problem, "memory_limit")),
        type=_CLASSES[kind],
    )
    if found is None:
        return Solution(objective=None, plan=None, bound=None)
    return Solution(objective=found.time, plan=[_operation(*step) for step in found.steps], bound=found.bound)


def _operation(kind: _C.CheckpointStepKind, index: int) -> list[object]:
    # The engine counts stages from 0, and values from the chain's input.
    return [_KINDS[kind], index if kind == _C.CheckpointStepKind.DROP else index + 1]


def _value(problem: Mapping[str, object], name: str) -> object:
    if name not in problem:
        raise PlanError(f"the problem has no {name!r}: a chain needs it, beside {', '.join(map(repr, problem))}")
    return problem[name]


def _numbers(problem: Mapping[str, object], name: str, count: int) -> list[object]:
    values = _value(problem, name)
    if not isinstance(values, list | tuple):
        raise PlanError(f"{name} is {values!r}: give a list of {count} numbers")
    if len(values) != count:
        raise PlanError(f"{name} has {len(values)} numbers: n={problem['n']} needs {count}")
    return list(values)


def _times(problem: Mapping[str, object], name: str, count: int) -> list[float]:
    return [_time(f"{name}[{place}]", each) for place, each in enumerate(_numbers(problem, name, count))]


def _sizes(problem: Mapping[str, object], name: str, count: int) -> list[int]:
    return [_size(f"{name}[{place}]", each) for place, each in enumerate(_numbers(problem, name, count))]


def _time(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PlanError(f"{name} is {value!r}: give a finite number that is not negative")
    try:
        return float(value)
    except OverflowError as error:
        raise PlanError(f"{name} has too many digits for a float: give a smaller number") from error


def _size(name: str, value: object) -> int:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MOST_BYTES:
        raise PlanError(f"{name} is {value!r}: give a whole number from 0 to 2**60")
    return number
