"""Optimizers for gradients that are one step late, as in PipeDream-2BW: W(t+1) = W(t) - u(g(W(t-1))).

They are made of torch's operations, so they run on the weights' device, in the weights' own precision: fp32 or fp64.

Facts about the delay, with their sources:

- AdamW loses much by it. Optimizers with a long memory lose little: Muon, or Adam with a high first beta ("One-step
  gradient delay is not a barrier", arXiv 2606.30634; "Nesterov method for asynchronous pipeline parallel
  optimization", arXiv 2505.01099, which takes NAdam with a beta of 0.99).
- The correction fits any rule that turns gradients into updates ``u``. It is that of 2606.30634, taken from two
  independent accounts of the paper, which itself was not available. The accounts differ on the first step and on weight
  decay; those here are derived below::

      W(t+1) = W(t) - u(t) - correction * (u(t) - u(t-1))          u(t): made of the late gradient g(W(t-1))

  With a correction of 1 the weights are W(t) = Y(t) - u(t-1), where Y(t+1) = Y(t) - u(t) and Y(1) = W(0). So they run
  one update ahead of a sequence Y. The gradient for Y(t+1) was taken at W(t-1) = Y(t-1) - u(t-2). That is Y(t) but for
  the difference of two successive updates. To first order, Y is trained as without a delay. It also follows that the
  correction does harm if gradients are not late, and that it amplifies differences between steps, as small batches
  cause them.
- A first step has no previous update and is not corrected. In 2BW it is not late either: its gradient is taken at the
  weights that it updates. Weight decay uses the newest weights; it is not late, and not a part of ``u``.
- The error grows with the learning rate and with the change between updates, which is largest in the beginning: warm
  the rate up. No rule for the length was found (the PipeDream-2BW paper, arXiv 2006.09503, was not available).
  2606.30634 is said to warm up over the first tenth of the steps; benchmarks/delay_convergence.py does so, too.
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
_TORCHS = {*checks.WITHOUT, "decoupled_weight_decay"}  # options of torch.optim that are dropped at load


class DelayedOptimizer(torch.optim.Optimizer, ABC):
    """Base class. A subclass turns gradients into updates; this class decays the weights, corrects and applies."""

    @abstractmethod
    def _check_rule(self, group: dict[str, Any]) -> None: ...

    @abstractmethod
    def _state_names(self, group: dict[str, Any]) -> frozenset[str]:
        """Names of the rule's state for a parameter, without the count of its steps."""

    @abstractmethod
    def _update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
        """The update to subtract from the weights, as a new tensor. Advances the rule's state; steps count from 1."""

    # ---- for users --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Raises:
            InvalidOptimizer: A gradient is sparse. Nothing was changed.
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
        """Adds a group as in torch.optim. A group that this optimizer cannot work with is not added."""
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
        """Loads the state of this optimizer, or of torch.optim's optimizer of the same rule.

        With the latter, options that it lacks stay as they are here, and the first step after it is not corrected.

        Raises:
            InvalidOptimizer: The state belongs to another rule. Nothing was changed.
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
        """Refuses state of another rule. ``saved`` is the group as it was saved, ``loaded`` as it will be here."""
        owner = type(self).__name__
        checks.refuse_rules(owner, saved)
        checks.expect(
            saved.get("decoupled_weight_decay", True) or not saved["weight_decay"],
            f"the state to be loaded was made with weight decay as part of the gradient, which {owner} does not "
            "support: set its weight_decay to 0",
        )
        wanted = self._state_names(loaded)
        for number in saved["params"]:
            found = frozenset(state.get(number, wanted)) - {"step", _PREVIOUS}
            checks.expect(
                found == wanted,
                f"the state to be loaded has {', '.join(sorted(found))} for parameter {number}, where {owner} keeps "
                f"{', '.join(sorted(wanted))}: it belongs to another rule",
            )


def adam_update(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
    """Adam's update, with the bias corrections of both moments."""
    first, divisor = _moments(gradient, state, group, step)
    return first.div(divisor).mul_(float(group["lr"]) / (1.0 - float(group["betas"][0]) ** step))


def _moments(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
    """Adds the gradient to both moments. Returns the first one, and Adam's divisor as a new tensor."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(gradient)
    first: Tensor = state["exp_avg"].lerp_(gradient, 1.0 - beta1)
    second: Tensor = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    return first, second.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(float(group["eps"]))


class DelayCorrectedAdamW(DelayedOptimizer):
    """AdamW whose updates are corrected for a delay of one step. The module has the formula and its sources.

    It keeps one number more for each parameter than AdamW: the previous update. With ``correction=0`` it is AdamW, and
    keeps no more. With another correction it differs from AdamW even if gradients are not late.

    Args:
        params: Parameters or groups as in torch.optim; dense, fp32 or fp64, on any device.
        lr, betas, eps, weight_decay: Options as in ``torch.optim.AdamW``.
        correction: Share of the difference to the previous update that is added to an update; 1 makes up for one step.

    Raises:
        InvalidOptimizer: This optimizer cannot work with an option or a parameter.
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
        """The base class checks all options."""

    def _state_names(self, group: dict[str, Any]) -> frozenset[str]:
        return frozenset({"exp_avg", "exp_avg_sq"})

    def _update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], step: int) -> Tensor:
        return adam_update(gradient, state, group, step)


class NAdamW(DelayedOptimizer):
    """NAdam with a long first moment and decoupled decay, for late gradients.

    "Nesterov method for asynchronous pipeline parallel optimization" (arXiv 2505.01099) trains so. Its published runs
    use torch's NAdam with a first beta of 0.99, ``momentum_decay=0.004`` and ``decoupled_weight_decay=True``. The rule
    here is the same::

        mu(t) = beta1 * (1 - 0.96 ** (t * momentum_decay) / 2)
        u(t)  = lr * (mu(t+1) * m(t) / (1 - mu(1)..mu(t+1))  +  (1 - mu(t)) * g(t) / (1 - mu(1)..mu(t)))
                   / (sqrt(v(t) / (1 - beta2 ** t)) + eps)

    The late gradient itself has the weight 1 - mu(t), a hundredth in the end. So its delay changes little.

    Args:
        params: Parameters or groups as in torch.optim; dense, fp32 or fp64, on any device.
        lr, eps, weight_decay: Options as in ``torch.optim.NAdam``.
        betas: Decay of the two moments.
        momentum_decay: Speed at which mu rises from half of the first beta to all of it.
        correction: Correction as in :class:`DelayCorrectedAdamW`; by default none.

    Raises:
        InvalidOptimizer: This optimizer cannot work with an option or a parameter.
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
