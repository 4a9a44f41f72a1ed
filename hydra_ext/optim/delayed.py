"""Optimizers for gradients that are one step late, as PipeDream-2BW's are: W(t+1) = W(t) - u(g(W(t-1))).

None is used unless it is named. They are made of torch's operations, so that they work where the weights are, in the
weights' own precision: fp32 or fp64.

What is known of the delay, and from where:

- AdamW loses much by it, optimizers with a long memory little: Muon, or Adam with a high first beta ("One-step gradient
  delay is not a barrier", arXiv 2606.30634; "Nesterov method for asynchronous pipeline parallel optimization",
  arXiv 2505.01099, which takes NAdam with a beta of 0.99).
- The correction, for any rule that turns gradients into updates ``u``, is that of 2606.30634 as two independent
  accounts of it give it; the paper itself was not at hand. Their wording for the first step and for weight decay
  differs, so these are ours, from what follows::

      W(t+1) = W(t) - u(t) - correction * (u(t) - u(t-1))          u(t): made of the late gradient g(W(t-1))

  With a correction of 1 the weights are W(t) = Y(t) - u(t-1) where Y(t+1) = Y(t) - u(t), Y(1) = W(0): they run one
  update ahead of a sequence Y. The gradient that Y(t+1) is made with was taken at W(t-1) = Y(t-1) - u(t-2), which is
  Y(t) but for the difference of two successive updates. So Y does what training without a delay does, to first order.
  It follows, too, that the correction does harm where gradients are not late, and that what differs much from step to
  step, as small batches make it, is amplified.
- A first step has no step before it, is not late in 2BW either (its gradient is taken at the weights it is applied to),
  and is not corrected. Weight decay is taken of the newest weights, is not late, and no part of ``u``.
- Error by delay grows with the rate and with how fast updates change, which is fastest in the beginning: warm the rate
  up. No rule for how long was found (the PipeDream-2BW paper, arXiv 2006.09503, was not at hand); 2606.30634 is said to
  warm up over the first tenth of the steps, and so does benchmarks/delay_convergence.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from hydra_ext.optim import checks

_DTYPES = (torch.float32, torch.float64)
_PREVIOUS = "previous_update"
_TORCHS = {*checks.WITHOUT, "decoupled_weight_decay"}  # options of torch.optim that have no meaning here


class DelayedOptimizer(torch.optim.Optimizer, ABC):
    """Base. A subclass makes updates of gradients; here they are corrected and applied, and weights decayed before."""

    @abstractmethod
    def _check_rule(self, group: dict[str, Any]) -> None: ...

    @abstractmethod
    def _state_names(self, group: dict[str, Any]) -> frozenset[str]:
        """What the rule keeps of a parameter, the count of its steps apart."""

    @abstractmethod
    def _update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
        """What is to be subtracted from the weights, in a new tensor; the rule's state goes on. Steps count from 1."""

    # ---- for users --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Raises:
            InvalidOptimizer: a gradient is sparse. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(each, each.grad, group) for group in self.param_groups for each in group["params"]]
        stepped = [(parameter, gradient, group) for parameter, gradient, group in stepped if gradient is not None]
        for parameter, gradient, _ in stepped:
            checks.expect(
                gradient.layout == torch.strided,
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: give its layer "
                "sparse=False, or use torch.optim.SparseAdam",
            )
        for parameter, gradient, group in stepped:
            self._step(parameter, gradient, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["step"] += 1
        update = self._update(gradient, state, group, int(state["step"]))
        parameter.mul_(1.0 - float(group["lr"]) * float(group["weight_decay"]))
        previous, correction = state.pop(_PREVIOUS, None), float(group["correction"])
        parameter.sub_(update if previous is None or correction == 0.0 else previous.lerp_(update, 1.0 + correction))
        if correction != 0.0:
            state[_PREVIOUS] = update

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; a group that cannot be worked with is not added."""
        first = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1], first)
        except BaseException:  # re-raised
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any], first: int) -> None:
        for name in ("lr", "weight_decay", "eps", "correction"):
            checks.expect(float(group[name]) >= 0.0, f"{name}={group[name]!r} is negative")
        betas = [float(beta) for beta in group["betas"]]
        checks.expect(
            len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas),
            f"betas={group['betas']!r}: give two numbers, 0 <= beta < 1",
        )
        for ordinal, parameter in enumerate(group["params"], first):
            checks.expect(
                parameter.dtype in _DTYPES and parameter.layout == torch.strided,
                f"parameter {ordinal} of shape {tuple(parameter.shape)} is {parameter.dtype}, {parameter.layout}: "
                "small updates of 16-bit weights would be rounded away; keep dense fp32 weights and compute under "
                "torch.autocast, or use hydra_ext.optim.AdamW, which keeps an exact master",
            )
        self._check_rule(group)

    # ---- loading ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As in torch.optim. That of the optimizer of the same rule in torch.optim is taken, too: options that it lacks
        stay as they are here, and the first step after it is not corrected.

        Raises:
            InvalidOptimizer: the state belongs to another rule. Nothing was changed.
        """
        groups = []
        for current, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            own = {name: value for name, value in current.items() if name != "params"}
            loaded = {**own, **{name: value for name, value in saved.items() if name not in _TORCHS}}
            self._refuse_other_rules(saved, loaded, state_dict["state"])
            groups.append(loaded)
        groups += state_dict["param_groups"][len(groups) :]  # torch says that there are too many
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _refuse_other_rules(self, saved: dict[str, Any], loaded: dict[str, Any], state: dict[Any, Any]) -> None:
        """A group as it was saved, and as it is to be here."""
        owner = type(self).__name__
        checks.refuse_rules(owner, saved)
        checks.expect(
            saved.get("decoupled_weight_decay", True) or not saved["weight_decay"],
            f"the state to be loaded was made with weight decay as part of the gradient, which {owner} has not: "
            "set its weight_decay to 0",
        )
        wanted = self._state_names(loaded)
        for number in saved["params"]:
            found = frozenset(state.get(number, wanted)) - {"step", _PREVIOUS}
            checks.expect(
                found == wanted,
                f"the state to be loaded has {', '.join(sorted(found))} of parameter {number}, where {owner} keeps "
                f"{', '.join(sorted(wanted))}: it belongs to another rule",
            )


def adam_update(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
    """Adam's, with both moments' corrections for their start from zero."""
    first, divisor = _moments(gradient, state, group, step)
    return first.div(divisor).mul_(float(group["lr"]) / (1.0 - float(group["betas"][0]) ** step))


def _moments(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
    """The first moment, and a new tensor with what Adam divides by; the gradient is taken into both moments."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(gradient)
    first: Tensor = state["exp_avg"].lerp_(gradient, 1.0 - beta1)
    second: Tensor = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    return first, second.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(float(group["eps"]))


class DelayCorrectedAdamW(DelayedOptimizer):
    """AdamW whose updates are corrected for a delay of one step; see the module for the formula and its sources.

    Takes one number more of memory for each parameter than AdamW: the update before. Where gradients are not late it is
    not AdamW; with ``correction=0`` it is, and keeps no more than AdamW.

    Args:
        params: as in torch.optim; dense, fp32 or fp64, on any device.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        correction: of the difference to the update before, how much is added to an update; 1 makes up for one step.

    Raises:
        InvalidOptimizer: an option, or a parameter, that this optimizer cannot work with.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        correction: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correction": correction}
        super().__init__(params, defaults)

    def _check_rule(self, group: dict[str, Any]) -> None:
        """That of the base is all."""

    def _state_names(self, group: dict[str, Any]) -> frozenset[str]:
        return frozenset({"exp_avg", "exp_avg_sq"})

    def _update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
        return adam_update(gradient, state, group, step)


class NAdamW(DelayedOptimizer):
    """NAdam with a long first moment and decoupled decay, as "Nesterov method for asynchronous pipeline parallel
    optimization" (arXiv 2505.01099) trains with late gradients: their published runs use torch's NAdam with a first
    beta of 0.99, ``momentum_decay=0.004`` and ``decoupled_weight_decay=True``, which is the rule here::

        mu(t) = beta1 * (1 - 0.96 ** (t * momentum_decay) / 2)
        u(t)  = lr * (mu(t+1) * m(t) / (1 - mu(1)..mu(t+1))  +  (1 - mu(t)) * g(t) / (1 - mu(1)..mu(t)))
                   / (sqrt(v(t) / (1 - beta2 ** t)) + eps)

    The late gradient itself enters by 1 - mu(t) only, a hundredth in the end, and that is what makes it robust.

    Args:
        params: as in torch.optim; dense, fp32 or fp64, on any device.
        lr, eps, weight_decay: as in ``torch.optim.NAdam``.
        betas: decay of the two moments.
        momentum_decay: how fast mu rises from half of the first beta to all of it.
        correction: see :class:`DelayCorrectedAdamW`; none unless given.

    Raises:
        InvalidOptimizer: an option, or a parameter, that this optimizer cannot work with.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum_decay: float = 4e-3,
        correction: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "correction": correction,
        }
        super().__init__(params, defaults)

    def _check_rule(self, group: dict[str, Any]) -> None:
        checks.expect(float(group["momentum_decay"]) >= 0.0, f"momentum_decay={group['momentum_decay']!r} is negative")

    def _state_names(self, group: dict[str, Any]) -> frozenset[str]:
        return frozenset({"exp_avg", "exp_avg_sq", "mu_product"})

    def _update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
        lr, beta1 = float(group["lr"]), float(group["betas"][0])

        def mu(step: int) -> float:
            return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * float(group["momentum_decay"]))))

        product = float(state.get("mu_product", 1.0)) * mu(step)
        state["mu_product"] = product
        first, divisor = _moments(gradient, state, group, step)
        ahead = first.mul(lr * mu(step + 1) / (1.0 - product * mu(step + 1)))
        return ahead.add_(gradient, alpha=lr * (1.0 - mu(step)) / (1.0 - product)).div_(divisor)
