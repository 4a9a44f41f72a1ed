"""The policies that a user gives to modules of a model whose other activations are planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hydra_ext.policy import Compress, Keep, Offload, Recompute


@dataclass(frozen=True)
class GivenPolicies:
    """Policies by the names of modules. Each holds for the modules inside, too, as far as these have none.

    What is inside of a module with :class:`hydra_ext.Recompute` is computed again with it, whatever is given there.
    """

    by_name: Mapping[str, Keep | Offload | Compress | Recompute] = field(default_factory=dict)

    def recomputes(self, name: str) -> bool:
        """Whether a module is to be computed again, and none around it."""
        return self._is_recomputed(name) and not any(map(self._is_recomputed, _around(name)))

    def has_inside(self, name: str) -> bool:
        """Whether modules inside of a module have policies."""
        return any(not name or other.startswith(f"{name}.") for other in self.by_name)

    def has_any(self, name: str) -> bool:
        """Whether a module has a policy, or modules inside of it have."""
        return name in self.by_name or self.has_inside(name)

    def policy_of(self, name: str) -> Keep | Offload | Compress | None:
        """The policy that what a module saves follows while it is not computed again; None if it is planned."""
        for each in (name, *_around(name)):
            policy = self.by_name.get(each)
            if policy is not None and not isinstance(policy, Recompute):
                return policy
        return None

    def _is_recomputed(self, name: str) -> bool:
        return isinstance(self.by_name.get(name), Recompute)


def _around(name: str) -> Iterator[str]:
    """The names of the modules around one, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name
