"""Muon: orthogonalized momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hydra_ext.optim import checks
from hydra_ext.optim.delayed import DelayedOptimizer, adam_update

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_ADAM_RMS = 0.2


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximates the nearest orthogonal matrix: the same singular vectors, singular values of 0.7 to 1.2.

    Five iterations of X <- aX + (bA + cA²)X with A = XX^T start from the matrix divided by its Frobenius norm. The
    coefficients are those of Jordan et al. (https://kellerjordan.github.io/posts/muon). They make small singular values
    grow fast, at the price of not converging to 1. The iterations run in bf16 on a GPU, as published, and in the
    matrix's own precision on a CPU.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide.bfloat16() if wide.is_cuda else wide
    wide = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if matrix.shape[0] > matrix.shape[1] else wide).to(matrix.dtype)


class Muon(DelayedOptimizer):
    """Orthogonalized Nesterov momentum for matrices; AdamW for groups with ``"orthogonalize": False``.

    Gradients that are one step late cost little: they hardly change the momentum's direction (arXiv 2606.30634). The
    update of a matrix of a rows and b columns is ``lr * 0.2 * sqrt(max(a, b)) * orthogonalized(g + momentum * B)`` with
    B = momentum * B + g. The factor gives it the root mean square of AdamW's updates (Liu et al., arXiv 2502.16982,
    section 2.2). So both kinds of groups share one rate, schedule and decay::

        Muon([{"params": hidden_matrices}, {"params": rest, "orthogonalize": False}], lr=1e-3)

    Biases, norms, embeddings and the output layer belong to the rest. Each row of an embedding or of an output layer
    belongs to one token. Only users know which matrices these are.

    Args:
        params: Parameters or groups as in torch.optim; dense, fp32 or fp64, on any device. Those that are
            orthogonalized have two dimensions.
        lr, weight_decay: Options as in AdamW.
        momentum: Decay of the momentum of matrices.
        betas, eps: Options of the groups with AdamW.
        orthogonalize: Default for groups that do not say it.
        correction: Correction as in :class:`hydra_ext.optim.DelayCorrectedAdamW`; by default none.

    Raises:
        InvalidOptimizer: This optimizer cannot work with an option or a parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 1e-1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        orthogonalize: bool = True,
        correction: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "orthogonalize": orthogonalize,
            "correction": correction,
        }
        super().__init__(params, defaults)

    def _check_rule(self, group: dict[str, Any]) -> None:
        checks.expect(0.0 <= float(group["momentum"]) < 1.0, f"momentum={group['momentum']!r}: give 0 <= momentum < 1")
        for parameter in group["params"] if group["orthogonalize"] else ():
            checks.expect(
                parameter.dim() == 2,
                f"a parameter of shape {tuple(parameter.shape)} is not a matrix and cannot be made orthogonal: "
                'put it into a group with "orthogonalize": False',
            )

    def _state_names(self, group: dict[str, Any]) -> frozenset[str]:
        return frozenset({"momentum_buffer"} if group["orthogonalize"] else {"exp_avg", "exp_avg_sq"})

    def _update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
        if not group["orthogonalize"]:
            return adam_update(gradient, state, group, step)
        momentum = float(group["momentum"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        # The buffer is (1 - momentum) * B, as in torch.optim.Muon; orthogonalized() cancels the factor.
        buffer = state["momentum_buffer"].lerp_(gradient, 1.0 - momentum)
        direction = orthogonalized(gradient.lerp(buffer, momentum))
        return direction.mul_(float(group["lr"]) * _ADAM_RMS * math.sqrt(max(gradient.shape)))
