"""The policy that each module's saved tensors follow."""

from __future__ import annotations

import fnmatch
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument, UnsupportedModel
from hydra_ext.policy import Auto, Compress, Keep, Offload, Recompute

Policy = Keep | Offload | Compress | Recompute
Choice = Policy | Mapping[str, Policy] | Callable[[str, nn.Module], Policy | None]
AutoChoice = Auto | Literal["auto"]
PlannedChoice = (
    AutoChoice | Choice | Mapping[str, Policy | AutoChoice] | Callable[[str, nn.Module], Policy | AutoChoice | None]
)
"""What becomes of tensors may be planned: ``"auto"``, or ``"auto"`` for the whole model beside policies of modules."""

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
    modules = dict(model.named_modules())
    found: dict[nn.Module, Policy] = {}
    for pattern, names, policy in _given(choice, model):
        found |= dict.fromkeys(map(modules.__getitem__, names), _checked(policy, pattern))
    _refuse_scripted(found)
    return found


@dataclass(frozen=True)
class Planned:
    """What becomes of saved tensors is planned.

    Attributes:
        auto: How.
        given: Policies that modules have, by their names: constraints of the plan.
    """

    auto: Auto
    given: Mapping[str, Policy]


def planned_of(choice: PlannedChoice, model: nn.Module) -> Planned | None:
    """What a choice says of a plan; None if it plans nothing.

    Raises:
        InvalidArgument: ``"auto"`` is given for a module, or the whole model has another policy, too; a pattern matches
            no module; or a module's choice is not a policy.
    """
    whole = _auto_of(choice)
    if whole is not None:
        return Planned(whole, {})
    if not isinstance(choice, Mapping) and (isinstance(choice, _KINDS) or not callable(choice)):
        return None
    found: dict[str, object] = {}
    for pattern, names, policy in _given(choice, model):
        auto = _auto_of(policy)
        if auto is not None and pattern:
            raise InvalidArgument(
                f"'auto' is given for '{pattern}': only the whole model can be planned. Give {{'': 'auto'}}, and "
                "policies such as hydra_ext.Offload() for modules"
            )
        if auto is None and "" in names and isinstance(found.get(""), Auto):
            raise InvalidArgument(
                f"'{pattern}' also matches the whole model, which is 'auto': give a pattern of modules inside, or no "
                "'auto'"
            )
        found |= dict.fromkeys(names, policy if auto is None else auto)
    whole = _auto_of(found.pop("", None))
    return None if whole is None else Planned(whole, _checked_beside_auto(found, model))


def _auto_of(choice: object) -> Auto | None:
    if isinstance(choice, Auto):
        return choice
    return Auto() if isinstance(choice, str) and choice == "auto" else None


def _checked_beside_auto(found: Mapping[str, object], model: nn.Module) -> dict[str, Policy]:
    given = {name: _checked(policy, name) for name, policy in found.items()}
    for name, policy in given.items():
        if policy == Offload("conv"):
            raise InvalidArgument(
                f"the policy of '{name}' is Offload('conv'), which chooses what leaves as 'auto' does: give Offload(), "
                "or no policy"
            )
    modules = dict(model.named_modules())
    _refuse_scripted({modules[name]: policy for name, policy in given.items()})
    return given


def _given(choice: Any, model: nn.Module) -> Iterator[tuple[str, list[str], object]]:
    """Patterns, the names that they match, and what is given for them."""
    modules = dict(model.named_modules())
    if not isinstance(choice, Mapping):
        for name, module in modules.items():
            policy = choice(name, module)
            if policy is not None:
                yield name, [name], policy
        return
    for pattern, policy in choice.items():
        names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise InvalidArgument(
                f"no module of {type(model).__name__} has a name that matches '{pattern}': give a name or pattern "
                "of model.named_modules()"
            )
        yield pattern, names, policy


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
