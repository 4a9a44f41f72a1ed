"""The policy that each module's saved tensors follow."""

from __future__ import annotations

import fnmatch
import reprlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument, UnsupportedModel
from hydra_ext.policy import Compress, Keep, Offload, Recompute

Policy = Keep | Offload | Compress | Recompute
Choice = Policy | Mapping[str, Policy] | Callable[[str, nn.Module], Policy | None]

_KINDS = (Keep, Offload, Compress, Recompute)


def default_policy(choice: Choice) -> Policy:
    """The policy for tensors that are saved outside of all modules with a policy of their own.

    Raises:
        InvalidArgument: The choice is not a policy, a mapping or a function; or it is a policy for named modules only.
    """
    if isinstance(choice, Recompute):
        raise InvalidArgument(
            "hydra_ext.Recompute() as the policy of everything has no module to call again: name modules, as in "
            "{'layers.*': hydra_ext.Recompute()}, with model="
        )
    if isinstance(choice, _KINDS):
        return choice
    if not isinstance(choice, Mapping) and not callable(choice):
        raise InvalidArgument(
            f"policy={reprlib.repr(choice)} is a {type(choice).__name__}: give hydra_ext.Offload() or another policy, "
            "a mapping from names of modules to policies, or a function of a module's name and the module"
        )
    return Keep()


def policies_of(choice: Choice, model: nn.Module | None) -> dict[nn.Module, Policy]:
    """The policies of modules. A tensor follows the policy of the innermost such module that runs when it is saved.

    A name is a pattern of :mod:`fnmatch`. If several patterns match a module, the last one counts.

    Raises:
        InvalidArgument: Policies by module were given without a model, a pattern matches no module, or a module's
            choice is not a policy.
        UnsupportedModel: A module cannot follow its policy.
    """
    if isinstance(choice, _KINDS):
        return {}
    if model is None:
        raise InvalidArgument("policies by module need the model: give stash(..., model=model)")
    found: dict[nn.Module, Policy] = {}
    if isinstance(choice, Mapping):
        for pattern, policy in choice.items():
            chosen = [module for name, module in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
            if not chosen:
                raise InvalidArgument(
                    f"no module of {type(model).__name__} has a name that matches '{pattern}': give a name or pattern "
                    "of model.named_modules()"
                )
            found |= dict.fromkeys(chosen, _checked(policy, pattern))
        _refuse_scripted(found)
        return found
    for name, module in model.named_modules():
        chosen_policy = choice(name, module)
        if chosen_policy is not None:
            found[module] = _checked(chosen_policy, name)
    _refuse_scripted(found)
    return found


def _checked(policy: object, name: str) -> Policy:
    if policy == Offload("dynamic"):
        raise InvalidArgument(
            f"the policy of '{name}' is Offload('dynamic'), which is for a whole model: give another policy"
        )
    if not isinstance(policy, _KINDS):
        raise InvalidArgument(
            f"the policy of '{name}' is a {type(policy).__name__}: give hydra_ext.Offload(), Compress(), Keep() or "
            "Recompute()"
        )
    return policy


def _refuse_scripted(found: Mapping[nn.Module, Policy]) -> None:
    for module, policy in found.items():
        if isinstance(policy, Recompute) and isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModel(
                f"a {type(module).__name__} is scripted, so it cannot be called again: choose hydra_ext.Recompute() "
                "for the module around it"
            )
