"""Connects a stash to autograd and to a model's modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hydra_ext import _C
from hydra_ext.activations import functional
from hydra_ext.activations.choice import Choice, Policy, default_policy, policies_of
from hydra_ext.activations.dynamic import DynamicOffload
from hydra_ext.activations.functional import steps_aside
from hydra_ext.activations.given import GivenTreatments, ScopedModule
from hydra_ext.activations.groups import Span
from hydra_ext.activations.layers import FaceOf, Layers
from hydra_ext.activations.parts import parts_of
from hydra_ext.activations.recompute import RecomputedModules, Whole
from hydra_ext.activations.report import StashReport
from hydra_ext.calls import StandIn
from hydra_ext.errors import InvalidArgument
from hydra_ext.policy import Compress, Keep, Offload, Recompute
from hydra_ext.state.composites import inner_tensors
from hydra_ext.tracing import not_traced, nothing_traced

if TYPE_CHECKING:
    from hydra_ext.activations.profiler import Profiler


class Saving:
    """A stash with its policies, and the hooks that save tensors in it.

    Args:
        core: The stash.
        choice: Policy, or policies by module.
        model: Model whose parameters and buffers are never moved; required for policies by module.
        whole: Gives contexts for the calls of modules that are recomputed.
        optimizer: Optimizer whose momentum is the scale for errors of compressed tensors.
        face_of: Gives the tensor that forwards use in place of a parameter.
        budget: Device bytes for saved tensors; required by ``Offload("dynamic")``.
        given: Policies of modules by name, if a plan treats all else. Then hooks on saved tensors that are active
            around a forward take precedence.

    Attributes:
        given: The same as scopes.
        leaves_all_on_device: Whether tensors that are saved now are none of the stash's business.

    Raises:
        InvalidArgument: A choice is not a policy, or a pattern matches no module.
        UnsupportedModel: A module cannot follow its policy.
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
        given: Mapping[str, Policy] | None = None,
    ) -> None:
        self._core = core
        self._yields = given is not None
        self._model = model
        parts = [] if model is None else parts_of(model)
        self._part_names = [name for name, _ in parts]
        default, policies = default_policy(choice), policies_of(choice, model)
        self._layers = {
            policy: Layers(policy, model, optimizer, face_of)
            for policy in (default, *policies.values(), *(given or {}).values())
            if isinstance(policy, Compress)
        }
        self._dynamic: DynamicOffload | None = None
        if default == Offload("dynamic"):
            if budget is None:
                raise InvalidArgument("Offload('dynamic') needs a budget to fit: give stash(..., budget=)")
            self._dynamic = DynamicOffload(core, budget)
        self._default = self._treatment(default)
        treatments = {
            module: self._treatment(policy) for module, policy in policies.items() if not isinstance(policy, Recompute)
        }
        self._recomputed = RecomputedModules(core, whole)
        self._profiler: Profiler | None = None
        self.leaves_all_on_device = False
        self.given = GivenTreatments(core, model, given or {}, self._layers, self._part_names)
        self._stand_ins: list[StandIn] = [  # the innermost first
            *self.given.stand_ins,
            *(ScopedModule(core, module, part=number) for number, (_, module) in enumerate(parts)),
            *(ScopedModule(core, module, treatment=treatment) for module, treatment in treatments.items()),
            *(
                self._recomputed.of_policy(module)
                for module, policy in policies.items()
                if isinstance(policy, Recompute)
            ),
        ]
        if optimizer is not None and self._layers:
            layers = list(self._layers.values())
            # Steps run outside hook() and unhook(). The hook must not keep this object alive through the optimizer.
            handle = optimizer.register_step_pre_hook(lambda *_: _step_begins(layers))
            weakref.finalize(self, handle.remove)

    def hook(self) -> None:
        """Installs the modules' policies and parts, until :meth:`unhook`."""
        if self._model is not None:
            weights = [inner for each in self._model.parameters() for inner in inner_tensors(each).values()]
            self._core.protect([*weights, *self._model.buffers()])
        for call in self._stand_ins:
            call.install()
        functional.install()

    def unhook(self) -> None:
        functional.remove()
        self._recomputed.choose((), None)
        for call in reversed(self._stand_ins):
            call.remove()

    @contextmanager
    @nothing_traced
    def inside(self) -> Iterator[None]:
        """Tensors that the calling thread saves inside go to the stash."""
        if self.leaves_all_on_device or (self._yields and not _can_hook()):
            yield
            return
        with ExitStack() as stack:
            pack: Callable[[torch.Tensor], Any] = self._core.pack
            profiler = self._profiler
            if profiler is not None and torch.is_grad_enabled() and not profiler.runs:
                pack = _watched(self._core, profiler)
                stack.enter_context(profiler.forward())
            stack.enter_context(saved_tensors_hooks(pack, self._core.unpack))
            treatment = self._default if self._dynamic is None else self._dynamic.treatment()
            scope = _C.StashScope(self._core, treatment=treatment)
            scope.begin()
            try:
                yield
            finally:
                scope.end()

    def measure(self, profiler: Profiler | None) -> None:
        """Forwards are measured from now on; None for no more."""
        self._profiler = profiler

    def set_room(self, room: int | None) -> None:
        """Sets the device bytes of saved tensors that may stay from now on; None for as few as transfers need."""
        self._core.set_budget(room)

    def recompute(
        self, chosen: Collection[nn.Module | Span], device: torch.device, *, pieces: Collection[nn.Module] = ()
    ) -> None:
        """From now on these modules and groups are recomputed if a second call repeats the first.

        So are those for which it is given, while what is given is followed. Pieces are recomputed inside their calls,
        and once more. Called between forwards.
        """
        self._recomputed.choose(
            chosen, device, given=self.given.recomputed if self.given.follows else (), pieces=pieces
        )

    def refuses(self, chosen: nn.Module | Span) -> bool:
        """Whether what was chosen for :meth:`recompute` is not, since a second call has differed."""
        return self._recomputed.is_refused(chosen)

    @nothing_traced
    def drop_stale(self) -> None:
        """Removes hooks that an interrupt has left on the calling thread, where no forward is under way."""
        while (hooks := _saved_tensors_hooked(True)) is not None and _core_of(hooks[0]) is self._core:
            _autograd._pop_saved_tensors_default_hooks()

    def report(self) -> StashReport:
        """Waits for the transfers under way, and returns the figures."""
        return StashReport.of(
            self._core,
            recomputed=self._recomputed.again.value,
            layers=[each for layers in self._layers.values() for each in layers.report()],
            chosen=None if self._dynamic is None else self._dynamic.chosen,
            names=self._part_names,
        )

    def copies(self) -> _C.CopyStatistics:
        """What has left the device. Waits for nothing."""
        return self._core.copies()

    @property
    def passes(self) -> int:
        """How often all that was saved has been read or dropped. Waits for nothing."""
        last = self._core.last_pass()
        return 0 if last is None else last.number

    @property
    def learns(self) -> bool:
        """Whether the saved tensors depend on measurements of earlier steps."""
        return any(policy.error == "adaptive" for policy in self._layers)

    def close(self) -> None:
        """Frees the host memory that is kept for later passes. Graphs that are alive stay valid."""
        self._core.close()

    def _treatment(self, policy: Policy) -> _C.Treatment:
        if isinstance(policy, Compress):
            return _C.Treatment.compress(self._layers[policy].bounds)
        if policy == Offload("conv"):
            return _C.Treatment.move_convolution_inputs()
        return _C.Treatment.keep() if isinstance(policy, Keep) else _C.Treatment.move()


def _watched(core: _C.Stash, profiler: Profiler) -> Callable[[torch.Tensor], Any]:
    @steps_aside
    @not_traced
    def watched(tensor: torch.Tensor) -> Any:
        profiler.saves(tensor)
        return core.pack(tensor)

    watching: Any = watched
    watching.core = core
    packs: Callable[[torch.Tensor], Any] = watching
    return packs


def _core_of(pack: Any) -> Any:
    """The stash to which a hook passes saved tensors; None for hooks of others."""
    return getattr(pack, "core", None) or getattr(pack, "__self__", None)


def _step_begins(layers: Iterable[Layers]) -> None:
    for each in layers:
        each.step_begins()


def _can_hook() -> bool:
    """Whether saved tensors can be hooked: torch.func does not allow it, and hooks of others take precedence."""
    return _saved_tensors_hooks_allowed() and _saved_tensors_hooked(True) is None


_autograd: Any = torch._C._autograd
_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks
_saved_tensors_hooks_allowed: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]
