"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hydra_ext import _C
from hydra_ext.optim import checks
from hydra_ext.optim.host_optimizer import HostOptimizer


class SGD(HostOptimizer):
    """``torch.optim.SGD`` for host parameters: one native pass in fp32. See :class:`AdamW` for the other arguments."""

    _MOMENTS = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        master: str = "split",
        moments: torch.dtype = torch.float32,
        threads: int | None = None,
        **options: object,
    ) -> None:
        checks.refuse_options(type(self).__name__, options)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "master": master,
            "moments": moments,
        }
        super().__init__(params, defaults, threads=threads)

    def _check_rule(self, group: dict[str, Any]) -> None:
        checks.expect(float(group["momentum"]) >= 0.0, f"momentum={group['momentum']!r} is negative")
        checks.expect(
            not group["nesterov"] or (group["momentum"] > 0 and group["dampening"] == 0),
            f"nesterov=True with momentum={group['momentum']!r}, dampening={group['dampening']!r}: "
            "give a momentum above 0 and no dampening",
        )

    def _has_moments(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0)

    def _rests(self, group: dict[str, Any]) -> bool:
        return float(group["weight_decay"]) == 0.0 and math.isfinite(float(group["lr"]))

    def _scalars(self, group: dict[str, Any], step: int, first: bool) -> _C.SgdStep:
        return _C.SgdStep(
            learning_rate=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            first=first,
        )
