"""Clipping by the global norm, whose bits depend neither on the threads nor on the machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.errors import NonFiniteNorm
from hydra_ext.optim import rows, threads
from hydra_ext.optim.checks import check_gradient
from hydra_ext.optim.layout import as_parameter_lies


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients in place so that their norm, taken over all of them together, is at most ``max_norm``.

    It does the same as ``torch.nn.utils.clip_grad_norm_`` with the Euclidean norm. Here the norm is defined to the bit:
    fp64 sums over fixed pieces of every gradient, added in the order of the parameters.

    Args:
        parameters: Parameters whose gradients are scaled.
        max_norm: Largest norm after scaling.
        error_if_nonfinite: Whether to raise if the norm is infinite or NaN.

    Returns:
        The norm before clipping, fp32.

    Raises:
        NonFiniteNorm: A gradient is not finite, and ``error_if_nonfinite`` is set. Nothing was scaled.
        InvalidOptimizer: A gradient is sparse, not on the host, or of another dtype than fp32, bf16 and fp16.
    """
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm, factor = combined(sums_of_squares(owners, [None] * len(owners)), max_norm)
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteNorm(
            f"the norm of the gradients is {norm}: leave out this step, or pass error_if_nonfinite=False to go on"
        )
    if factor != 1.0:
        for parameter in owners:
            scale_gradient(parameter, factor)
    return torch.tensor(norm, dtype=torch.float32, device="cpu")


def sums_of_squares(parameters: Sequence[Tensor], known: Sequence[float | None]) -> list[float]:
    """Sums of squares of the gradients, for each parameter that has one. Sums that are ``known`` are taken as given."""
    sums: list[float | None] = []
    missing: dict[int, Tensor] = {}
    for ordinal, (parameter, its_sum) in enumerate(zip(parameters, known, strict=True)):
        gradient = rows.gradient_of(parameter)
        if gradient is None:
            continue
        if its_sum is None and rows.has_rows(parameter):
            its_sum = rows.sum_of_squares(parameter)
        if its_sum is None:
            check_gradient(gradient, ordinal)
            missing[len(sums)] = as_parameter_lies(gradient, parameter)
        sums.append(its_sum)
    found = iter(_C.sums_of_squares(list(missing.values()), threads.pool(None)))
    return [next(found) if its_sum is None else its_sum for its_sum in sums]


def scale_gradient(parameter: Tensor, factor: float) -> None:
    """Scales a gradient in place. Unlike ``_foreach_mul_`` it does not round the factor to the gradient's type."""
    if math.isnan(factor):  # it makes zeros NaN, too
        rows.make_dense(parameter)
    gradient = rows.gradient_of(parameter)
    if gradient is not None:
        _C.scale_gradient(rows.rows_of(parameter)[1] if rows.has_rows(parameter) else gradient, factor)


def combined(sums: Sequence[float], max_norm: float) -> tuple[float, float]:
    """The norm from the parameters' sums in their order, and the factor that clips it."""
    norm = _C.norm_of_sums(list(sums))
    return norm, _C.clip_factor(norm, float(max_norm))
