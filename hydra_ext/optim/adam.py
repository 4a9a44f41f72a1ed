"""AdamW, and Adam with an L2 penalty."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hydra_ext import _C
from hydra_ext.optim import checks
from hydra_ext.optim.host_optimizer import HostOptimizer


class Adam(HostOptimizer):
    """``torch.optim.Adam`` for host parameters: one native pass in fp32. See :class:`AdamW` for the arguments."""

    _MOMENTS = ("exp_avg", "exp_avg_sq")
    _DECOUPLED = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master: str = "split",
        moments: torch.dtype = torch.float32,
        threads: int | None = None,
        **options: object,
    ) -> None:
        checks.refuse_options(type(self).__name__, options)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "master": master,
            "moments": moments,
        }
        super().__init__(params, defaults, threads=threads)

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas = [float(beta) for beta in group["betas"]]
        checks.expect(
            len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas),
            f"betas={group['betas']!r}: give two numbers, 0 <= beta < 1",
        )
        checks.expect(float(group["eps"]) >= 0.0, f"eps={group['eps']!r} is negative")

    def _has_moments(self, group: dict[str, Any]) -> bool:
        return True

    def _rests(self, group: dict[str, Any]) -> bool:
        return float(group["weight_decay"]) == 0.0 < float(group["eps"]) and math.isfinite(float(group["lr"]))

    def _scalars(self, group: dict[str, Any], step: int, first: bool) -> _C.AdamStep:
        beta1, beta2 = group["betas"]
        return _C.AdamStep(
            learning_rate=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            epsilon=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self._DECOUPLED,
            step=step,
        )


class AdamW(Adam):
    """``torch.optim.AdamW`` for host parameters: one native pass, fp32 arithmetic, and an exact master of bf16 weights.

    Its ``state_dict`` can be loaded into ``torch.optim.AdamW`` and the other way round.

    Args:
        params: Parameters or groups as in torch.optim; fp32, bf16 or fp16, on the host. They may be on meta until the
            first step, as those of ``hydra_ext.materialize`` are. Gradients may have any of these dtypes.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Number added to the root of the second moment.
        weight_decay: Weight decay, decoupled from the gradient.
        master: Form of the exact fp32 number behind a bf16 weight. ``"split"`` keeps the 2 bytes that the weight
            lacks, ``"fp32"`` all 4. Both give the same weights, bit for bit. fp16 weights always have ``"fp32"``.
        moments: Dtype of the moments. ``torch.bfloat16`` takes half the memory and is rounded stochastically.
        threads: Number of threads; by default as many as torch computes with.

    Raises:
        InvalidOptimizer: This optimizer cannot work with an option or a parameter.
    """

    _DECOUPLED = True

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, *, weight_decay: float = 1e-2, **options: Any
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **options)
