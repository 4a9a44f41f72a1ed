"""Policies of single modules in a model whose other saved tensors are treated as a plan says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.choice import Policy
from hydra_ext.activations.layers import Layers
from hydra_ext.calls import StandIn
from hydra_ext.policy import Compress, GivenPolicies, Keep, Offload, Recompute
from hydra_ext.tracing import not_traced

NO_PART = -1


class ScopedModule(StandIn):
    """Stands in for a module's call, and opens a scope of the stash around it.

    Args:
        core: The stash.
        module: Any module.
        part: The scope's part.
        treatment: The scope's treatment. None continues that of the scope around it.
    """

    def __init__(
        self, core: _C.Stash, module: nn.Module, *, part: int = NO_PART, treatment: _C.Treatment | None = None
    ) -> None:
        super().__init__(module)
        self._scope = _C.StashScope(core, treatment=treatment, part=part)

    def treat(self, treatment: _C.Treatment | None) -> None:
        """Sets the treatment of calls that begin from now on."""
        self._scope.set_treatment(treatment)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # tensors saved by a compiled graph belong to the scope around the graph
            return self.inner(*args, **kwargs)
        return self._visit(args, kwargs)

    @not_traced
    def _visit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._scope.begin()
        try:
            return self.inner(*args, **kwargs)
        finally:
            self._scope.end()


@dataclass(frozen=True)
class CodedBytes:
    """What became of the saved tensors of a module that may be compressed, those of modules inside left out.

    Attributes:
        encoded: Bytes that were compressed.
        streams: Bytes of the streams that they became.
        exact: Bytes that were not compressed.
    """

    encoded: int = 0
    streams: int = 0
    exact: int = 0

    def __add__(self, other: CodedBytes) -> CodedBytes:
        return CodedBytes(self.encoded + other.encoded, self.streams + other.streams, self.exact + other.exact)

    def __sub__(self, other: CodedBytes) -> CodedBytes:
        return CodedBytes(self.encoded - other.encoded, self.streams - other.streams, self.exact - other.exact)


class GivenTreatments:
    """Follows the policies that a user has given to modules.

    A module with :class:`hydra_ext.Compress` may be compressed: each plan says where. So each of the modules inside has
    a scope, and is a part of the stash by itself.

    Args:
        core: The stash.
        model: The model.
        policies: By the names of modules.
        layers: Of the policies that compress.
        parts: Names of the stash's other parts, by number. Those of modules that may be compressed are added.

    Attributes:
        policies: As given.
        stand_ins: For the calls of modules, the innermost first.
        recomputed: Modules that are recomputed while the policies are followed.
        follows: Whether they are followed now.
    """

    def __init__(
        self,
        core: _C.Stash,
        model: nn.Module | None,
        policies: Mapping[str, Policy],
        layers: Mapping[Compress, Layers],
        parts: list[str],
    ) -> None:
        self._core = core
        self.policies = GivenPolicies(policies)
        self._compress = {
            policy: _C.Treatment.compress(of.bounds, staying=_C.Staying.NEVER) for policy, of in layers.items()
        }
        self._scopes: dict[str, ScopedModule] = {}
        self._parts: dict[str, int] = {}
        own = [*parts]
        self.recomputed: list[nn.Module] = []
        for name, module in [] if model is None or not policies else model.named_modules():
            policy = self.policies.policy_of(name)
            if isinstance(policies.get(name), Recompute):
                self.recomputed.append(module)
            if isinstance(policy, Compress):
                self._parts[name] = len(parts)
                parts.append(next((part for part in own if f"{name}.".startswith(f"{part}.")), ""))
                self._scopes[name] = ScopedModule(core, module, part=self._parts[name])
            elif isinstance(policies.get(name), (Keep, Offload)):
                self._scopes[name] = ScopedModule(core, module)
        self.stand_ins = [*self._scopes.values()]
        self.follows = False
        self.set_aside()

    @property
    def may_compress(self) -> bool:
        return bool(self._parts)

    def set_aside(self, *, compress: bool = False) -> None:
        """From now on all tensors leave while there is no room; ``compress``: as streams where a user allows it."""
        self.follows = False
        for name, scope in self._scopes.items():
            given = self.policies.by_name.get(name)
            if isinstance(given, Compress) and compress:
                scope.treat(self._compress[given])
            else:
                scope.treat(_C.Treatment.move() if given is not None else None)

    def follow(self, compressed: Collection[nn.Module]) -> None:
        """From now on the policies are followed, and these modules are compressed."""
        self.follows = True
        for name, scope in self._scopes.items():
            given, policy = self.policies.by_name.get(name), self.policies.policy_of(name)
            if isinstance(policy, Compress):
                planned = _C.Treatment.move() if name in self.policies.by_name else None
                scope.treat(self._compress[policy] if scope.module in compressed else planned)
            else:
                staying = _C.Staying.LONGEST if isinstance(given, Keep) else _C.Staying.NEVER
                scope.treat(_C.Treatment.move(staying=staying))

    @property
    def moves(self) -> bool:
        """Whether tensors leave, or are not saved, even if a plan keeps all."""
        return any(isinstance(policy, (Offload, Recompute)) for policy in self.policies.by_name.values())

    def coded(self) -> dict[str, CodedBytes]:
        """By the names of the modules that may be compressed, until now."""
        counted = self._core.parts()
        found = {}
        for name, number in self._parts.items():
            part = counted.get(number)
            if part is not None:
                found[name] = CodedBytes(part.encoded, part.streams, part.moved + part.stayed)
        return found
