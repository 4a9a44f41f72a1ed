"""What ties a stash to autograd, and to a model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from hydra_ext import _C
from hydra_ext.activations.choice import Choice, Policy, default_policy, policies_of
from hydra_ext.activations.recompute import Count, RecomputedModule, Whole
from hydra_ext.activations.report import StashReport
from hydra_ext.policy import Keep, Recompute


class Saving:
    """A stash, and who saves in it.

    Args:
        core: the stash.
        choice: of policies.
        model: whose parameters and buffers are left alone; needed for policies by module.
        whole: whether a call of a module, as things are, runs to its end before another one begins; one that does not
            is not made again.

    Raises:
        InvalidArgument: a policy is none, or names no module.
        UnsupportedModel: a module's policy cannot be followed.
    """

    def __init__(self, core: _C.Stash, choice: Choice, model: nn.Module | None, whole: Whole) -> None:
        self._core = core
        self._default = _treatment(default_policy(choice))
        self._policies = policies_of(choice, model)
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._again = Count()
        self._recomputed = [
            RecomputedModule(core, module, whole, self._again)
            for module, policy in self._policies.items()
            if isinstance(policy, Recompute)
        ]

    def hook(self) -> None:
        """From now on modules say what is to become of what they save. :meth:`unhook` undoes it."""
        if self._model is not None:
            self._core.protect([*self._model.parameters(), *self._model.buffers()])
        for module, policy in self._policies.items():
            if isinstance(policy, Recompute):
                continue
            self._handles += [
                module.register_forward_pre_hook(_Begin(_treatment(policy)), prepend=True),
                module.register_forward_hook(_end, always_call=True),  # also of a forward that raises
            ]
        for recomputed in self._recomputed:
            recomputed.install()

    def unhook(self) -> None:
        for recomputed in reversed(self._recomputed):
            recomputed.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What the calling thread saves meanwhile goes to the stash."""
        with saved_tensors_hooks(self._core.pack, self._core.unpack):
            _C.begin_treatment(self._default)
            try:
                yield
            finally:
                _C.end_treatment()

    def report(self) -> StashReport:
        """Once the transfers under way have ended."""
        return StashReport.of(self._core.statistics(), recomputed=self._again.value)

    def close(self) -> None:
        """No host memory is kept for a next pass. Graphs that are alive stay whole."""
        self._core.close()


def goes_to_a_stash(hooks: tuple[Any, Any] | None) -> bool:
    """Whether these hooks on saved tensors, as torch has them, are a stash's."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), _C.Stash)


def _treatment(policy: Policy) -> _C.Treatment:
    return _C.Treatment.KEEP if isinstance(policy, Keep) else _C.Treatment.MOVE


class _Begin:
    def __init__(self, wanted: _C.Treatment) -> None:
        self._wanted = wanted

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        _C.begin_treatment(self._wanted)


def _end(_module: nn.Module, _args: Any, _output: Any) -> None:
    _C.end_treatment()
