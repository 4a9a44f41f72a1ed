"""What ties a stash to autograd, and to a model's modules."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hydra_ext import _C
from hydra_ext.activations.choice import Choice, Policy, default_policy, policies_of
from hydra_ext.activations.dynamic import DynamicOffload
from hydra_ext.activations.layers import FaceOf, Layers
from hydra_ext.activations.parts import parts_of
from hydra_ext.activations.recompute import Count, RecomputedModule, Whole
from hydra_ext.activations.report import StashReport
from hydra_ext.calls import StandIn
from hydra_ext.errors import InvalidArgument
from hydra_ext.policy import Compress, Keep, Offload, Recompute
from hydra_ext.tracing import not_traced, nothing_traced


class Saving:
    """A stash, and what saves in it.

    Args:
        core: the stash.
        choice: of policies.
        model: whose parameters and buffers are left alone; needed for policies by module.
        whole: whether a call of a module, as things are, runs to its end before another one begins; one that does not
            is not made again.
        optimizer: whose momentum the errors of compressed tensors are measured by.
        face_of: what forwards take in place of parameters.
        budget: device bytes of saved tensors, which ``Offload("dynamic")`` needs.

    Raises:
        InvalidArgument: a policy is none, or names no module.
        UnsupportedModel: a module's policy cannot be followed.
    """

    def __init__(
        self,
        core: _C.Stash,
        choice: Choice,
        model: nn.Module | None,
        whole: Whole,
        *,
        optimizer: torch.optim.Optimizer | None,
        face_of: FaceOf = lambda _: None,
        budget: int | None = None,
    ) -> None:
        self._core = core
        self._model = model
        self._parts = [] if model is None else parts_of(model)
        default, policies = default_policy(choice), policies_of(choice, model)
        self._layers = {
            policy: Layers(policy, model, optimizer, face_of)
            for policy in (default, *policies.values())
            if isinstance(policy, Compress)
        }
        self._dynamic: DynamicOffload | None = None
        if default == Offload("dynamic"):
            if budget is None:
                raise InvalidArgument("Offload('dynamic') finds out what fits: give stash(..., budget=)")
            self._dynamic = DynamicOffload(core, budget)
        self._default = self._treatment(default)
        self._treatments = {
            module: self._treatment(policy) for module, policy in policies.items() if not isinstance(policy, Recompute)
        }
        self._again = Count()
        self._stand_ins: list[StandIn] = [  # the innermost first
            *(ScopedModule(core, module, part=number) for number, (_, module) in enumerate(self._parts)),
            *(ScopedModule(core, module, treatment=treatment) for module, treatment in self._treatments.items()),
            *(
                RecomputedModule(core, module, whole, self._again)
                for module, policy in policies.items()
                if isinstance(policy, Recompute)
            ),
        ]
        if optimizer is not None and self._layers:
            layers = list(self._layers.values())
            # Steps are outside of what hook() and unhook() enclose; the optimizer does not keep this alive.
            handle = optimizer.register_step_pre_hook(lambda *_: _step_begins(layers))
            weakref.finalize(self, handle.remove)

    def hook(self) -> None:
        """From now on modules say what is to become of what they save. :meth:`unhook` undoes it."""
        if self._model is not None:
            self._core.protect([*self._model.parameters(), *self._model.buffers()])
        for call in self._stand_ins:
            call.install()

    def unhook(self) -> None:
        for call in reversed(self._stand_ins):
            call.remove()

    @contextmanager
    @nothing_traced
    def inside(self) -> Iterator[None]:
        """What the calling thread saves meanwhile goes to the stash."""
        with saved_tensors_hooks(self._core.pack, self._core.unpack):
            treatment = self._default if self._dynamic is None else self._dynamic.treatment()
            self._core.begin_scope(0, treatment=treatment)
            try:
                yield
            finally:
                self._core.end_scope(0)

    def report(self) -> StashReport:
        """Once the transfers under way have ended."""
        return StashReport.of(
            self._core,
            recomputed=self._again.value,
            layers=[each for layers in self._layers.values() for each in layers.report()],
            chosen=None if self._dynamic is None else self._dynamic.chosen,
            names=[name for name, _ in self._parts],
        )

    @property
    def learns(self) -> bool:
        """Whether what is saved depends on what was learnt in the steps before."""
        return any(policy.error == "adaptive" for policy in self._layers)

    def close(self) -> None:
        """No host memory is kept for a next pass. Graphs that are alive stay whole."""
        self._core.close()

    def _treatment(self, policy: Policy) -> _C.Treatment:
        if isinstance(policy, Compress):
            return _C.Treatment.compress(self._layers[policy].bounds)
        if policy == Offload("conv"):
            return _C.Treatment.move_convolution_inputs()
        return _C.Treatment.keep() if isinstance(policy, Keep) else _C.Treatment.move()


def goes_to_a_stash(hooks: tuple[Any, Any] | None) -> bool:
    """Whether these hooks on saved tensors, as torch has them, are a stash's."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), _C.Stash)


def _step_begins(layers: Iterable[Layers]) -> None:
    for each in layers:
        each.step_begins()


_keys = itertools.count(1)  # of scopes; 0 is that of a whole stash


class ScopedModule(StandIn):
    """Stands in for a module's call: what is saved inside has a scope of its own.

    Args:
        core: the stash.
        module: any.
        scope: what the scope is of.
    """

    def __init__(self, core: _C.Stash, module: nn.Module, **scope: Any) -> None:
        super().__init__(module)
        self._core = core
        self._key = next(_keys)
        self._scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # in what is made one graph of, what is saved belongs to what is around it
            return self.inner(*args, **kwargs)
        return self._visit(args, kwargs)

    @not_traced
    def _visit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._core.begin_scope(self._key, **self._scope)
        try:
            return self.inner(*args, **kwargs)
        finally:
            self._core.end_scope(self._key)
