"""Which stages of a chain keep what backward needs, and which run forward again, within a memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.fields import Fields, amount, size
from hydra_ext.plan.solution import Solution

_Number = TypeVar("_Number", int, float)
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
    given = Fields(problem, "problem")
    kind = given.value("class")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise PlanError(f"problem['class'] is {kind!r}: give 'persistent' or 'flat'")
    stages = given.size("n")
    outputs = _read(given, "x_size", stages + 1, size)
    found = _C.plan_checkpoints(
        outputs[0],
        list(
            zip(
                _read(given, "forward_time", stages, amount),
                _read(given, "backward_time", stages, amount),
                outputs[1:],
                _read(given, "saved_size", stages, size),
                _read(given, "forward_transient", stages, size),
                _read(given, "backward_transient", stages, size),
                strict=True,
            )
        ),
        memory=given.size("memory_limit"),
        type=_CLASSES[kind],
    )
    if found is None:
        return Solution(objective=None, plan=None, bound=None)
    return Solution(objective=found.time, plan=[_operation(*step) for step in found.steps], bound=found.bound)


def _operation(kind: _C.CheckpointStepKind, index: int) -> list[object]:
    # The engine counts stages from 0, and values from the chain's input.
    return [_KINDS[kind], index if kind == _C.CheckpointStepKind.DROP else index + 1]


def _read(given: Fields, key: str, length: int, read: Callable[[object, str], _Number]) -> list[_Number]:
    values = given.items(key)
    if len(values) != length:
        raise PlanError(f"problem['{key}'] has {len(values)} numbers: give {length}, as problem['n'] says")
    return [read(value, f"problem['{key}'][{i}]") for i, value in enumerate(values)]
