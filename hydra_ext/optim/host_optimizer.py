"""What the optimizers have in common: state, its loading, and the way from gradients to a native plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT, StateDict

from hydra_ext import _C
from hydra_ext.errors import InvalidOptimizer
from hydra_ext.optim import checks, masters, threads
from hydra_ext.optim.layout import as_parameter_lies


@dataclass
class PreparedStep:
    """One step of some parameters: all that is known before the gradients' scale, and kept alive until it has run.

    Attributes:
        plan: runs it; its n-th update is that of the n-th parameter.
        parameters: in the order they were given.
        gradients: theirs, as the plan reads them.
        written: where the new weights go: the parameter itself, or its destination.
    """

    plan: _C.TensorPlan = field(default_factory=_C.TensorPlan)
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)


class StepRunner(Protocol):
    """Runs an optimizer's steps in its place, part by part, and perhaps later.

    Attributes:
        destinations: where parameters' new weights go; see :meth:`HostOptimizer.prepare`.
    """

    destinations: Mapping[Tensor, Tensor] | None

    def parts(self, gradients: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """The parameters with their gradients, grouped and ordered as the runner wants them prepared.

        What was to run later has run.
        """

    def new_state(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        """Zeros that lie as the parameter does; or the parameter's numbers, if it ``copies`` them."""

    def run(self, optimizer: HostOptimizer, prepared: list[PreparedStep]) -> None:
        """Runs the plans of :meth:`parts`, in any order, now or later."""

    def sync(self) -> None:
        """Returns when nothing that was to run later is left, and all tensors have their bytes."""


@dataclass(frozen=True)
class _Shielded:
    """A tensor on its way through torch's loading, which would cast it to the parameter's type."""

    tensor: Tensor


class HostOptimizer(torch.optim.Optimizer, ABC):
    """Base of the native optimizers. A subclass names its moments and gives the scalars of a step."""

    _MOMENTS: tuple[str, ...]

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, threads: int | None) -> None:
        checks.check_threads(threads)
        self._threads = threads
        self.runner: StepRunner | None = None
        self._written: dict[Tensor, int] = {}  # version of a weight when its fp32 master was last rounded into it
        super().__init__(params, defaults)

    @abstractmethod
    def _check_rule(self, group: dict[str, Any]) -> None: ...

    @abstractmethod
    def _has_moments(self, group: dict[str, Any]) -> bool: ...

    @abstractmethod
    def _scalars(self, group: dict[str, Any], step: int, first: bool) -> _C.AdamStep | _C.SgdStep: ...

    # ---- for users --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Raises:
            InvalidOptimizer: a gradient is sparse, not on the host or of another type. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = (parameter for _, _, parameter in self._enumerate())
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self.runner is None:
            (prepared,) = self.prepare([gradients])
            prepared.plan.run(self.pool)
            self.finish(prepared)
        else:
            self.runner.run(self, self.prepare(self.runner.parts(gradients), self.runner.destinations))
        return loss

    def master(self, parameter: Tensor) -> Tensor:
        """The exact fp32 number behind a parameter, as a new tensor."""
        state = self.state.get(parameter, {})
        if masters.LOWER in state:
            return masters.merged(parameter, state[masters.LOWER])
        exact: Tensor = state.get(masters.FULL, parameter)
        return exact.detach().to(torch.float32, copy=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; a group that cannot be worked with is not added."""
        first = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        try:
            checks.check_group(self.param_groups[-1], first)
            self._check_rule(self.param_groups[-1])
        except BaseException:  # re-raised
            self.param_groups.pop()
            raise

    # ---- a step, in two halves --------------------------------------------------------------------------------------

    @property
    def pool(self) -> _C.ThreadPool:
        """The threads that updates are to run on."""
        return threads.pool(self._threads)

    @torch.no_grad()
    def prepare(
        self, parts: list[list[tuple[Tensor, Tensor]]], destinations: Mapping[Tensor, Tensor] | None = None
    ) -> list[PreparedStep]:
        """Begins a step of parameters, given with their gradients in parts: state is made, steps are counted.

        Each part's plan is then to be run, once and completely, by whatever threads, and :meth:`finish` called. Until
        it has run weights, gradients and state must stay where they are. A step that is not to be taken must not be
        prepared.

        Args:
            parts: parameters with their gradients.
            destinations: where a parameter's new weights go instead of into the parameter, which is then only read:
                a tensor of its type and shape that lies in memory as it does, and shares none with it. The state goes
                on with the new weights, so that they have to be the parameter's when its next step is prepared:
                ``parameter.data = destination``. What is in ``destinations`` but not in ``parts`` is not written.

        Raises:
            InvalidOptimizer: a gradient or a destination that cannot be worked with. Nothing was changed.
        """
        destinations = {} if destinations is None else destinations
        places = {parameter: (ordinal, group) for ordinal, group, parameter in self._enumerate()}
        for part in parts:
            for parameter, gradient in part:
                checks.check_gradient(gradient, places[parameter][0])
                if parameter in destinations:
                    checks.check_destination(destinations[parameter], parameter, places[parameter][0])
        scalars: dict[tuple[int, int, bool], _C.AdamStep | _C.SgdStep] = {}
        return [self._prepare_part(part, destinations, places, scalars) for part in parts]

    def _prepare_part(
        self,
        part: list[tuple[Tensor, Tensor]],
        destinations: Mapping[Tensor, Tensor],
        places: dict[Tensor, tuple[int, dict[str, Any]]],
        scalars: dict[tuple[int, int, bool], _C.AdamStep | _C.SgdStep],
    ) -> PreparedStep:
        prepared = PreparedStep()
        for parameter, gradient in part:
            ordinal, group = places[parameter]
            state, first = self._state_of(parameter, group)
            step = 0
            if "step" in state:
                state["step"] += 1
                step = int(state["step"])
            key = (id(group), step, first)
            if key not in scalars:
                scalars[key] = self._scalars(group, step, first)
            gradient = as_parameter_lies(gradient, parameter)
            moments = [state[name] for name in self._MOMENTS] if self._has_moments(group) else []
            prepared.plan.add(
                scalars[key],
                parameter,
                gradient,
                master=state.get(masters.LOWER, state.get(masters.FULL)),
                first_moment=moments[0] if moments else None,
                second_moment=moments[1] if len(moments) > 1 else None,
                seed=_C.rounding_seed(step, ordinal),
                new_weights=destinations.get(parameter),
            )
            prepared.parameters.append(parameter)
            prepared.gradients.append(gradient)
            prepared.written.append(destinations.get(parameter, parameter))
        return prepared

    def tensors_of(self, prepared: PreparedStep) -> list[Tensor]:
        """All that a prepared step reads or writes."""
        kept = [tensor for parameter in prepared.parameters for tensor in self.tensors_beside(parameter)]
        pairs = zip(prepared.parameters, prepared.written, strict=True)
        elsewhere = [written for parameter, written in pairs if written is not parameter]
        return [*prepared.parameters, *elsewhere, *prepared.gradients, *kept]

    def tensors_beside(self, parameter: Tensor) -> list[Tensor]:
        """The state that a step of this parameter reads and writes."""
        state = self.state.get(parameter, {})
        return [value for name, value in state.items() if name != "step" and torch.is_tensor(value)]

    def state_sizes(self) -> dict[Tensor, list[int]]:
        """Bytes of each of the tensors that :meth:`tensors_beside` gives once its parameter was stepped."""
        sizes = {}
        for _, group, parameter in self._enumerate():
            count = len(self._MOMENTS) if self._has_moments(group) else 0
            sizes[parameter] = [parameter.numel() * group["moments"].itemsize for _ in range(count)]
            kind = masters.kind_for(parameter, group["master"])
            if kind is not None:
                sizes[parameter].append(parameter.numel() * masters.dtype_of(kind).itemsize)
        return sizes

    def finish(self, prepared: PreparedStep) -> None:
        """Autograd is told what was written, or is about to be before it can be read."""
        increment_version(prepared.written)
        for parameter in prepared.parameters:
            if masters.FULL in self.state[parameter]:
                self._written[parameter] = parameter._version

    def _enumerate(self) -> Iterator[tuple[int, dict[str, Any], Tensor]]:
        ordinal = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                yield ordinal, group, parameter
                ordinal += 1

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The parameter's state, whatever is missing made; and whether its moments are new."""
        state: dict[str, Any] = self.state[parameter]
        first = False
        if self._has_moments(group):
            first = self._MOMENTS[0] not in state
            if "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for name in self._MOMENTS:
                if name not in state:
                    state[name] = self._new(parameter, group["moments"], copies=False)
        kind = masters.kind_for(parameter, group["master"])
        if kind is not None:
            name = masters.LOWER if kind == "split" else masters.FULL
            if name not in state:
                # Nothing is rounded off yet: of "split" all is zero.
                state[name] = self._new(parameter, masters.dtype_of(kind), copies=kind != "split")
            elif kind == "fp32" and self._written.get(parameter) != parameter._version:
                masters.follow(state[name], parameter)
        return state, first

    def _new(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        if self.runner is None:
            return parameter.to(dtype, copy=True) if copies else torch.zeros_like(parameter, dtype=dtype)
        return self.runner.new_state(parameter, dtype, copies=copies)

    # ---- saving and loading -----------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """As in torch.optim; a step under way is waited for."""
        self._sync()
        return super().state_dict()

    def _sync(self) -> None:
        if self.runner is not None:
            self.runner.sync()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the state of this optimizer, or of the one of the same name in torch.optim, in any type of moments
        and any kind of master. Load the weights first: a master counts where it rounds to the weight that is there.

        Raises:
            InvalidOptimizer: the state is that of a rule that is not this optimizer's, or of parameters of other
                shapes. Nothing was changed.
        """
        self._sync()
        # The last one to be called: what it is given is what will be loaded.
        handle = self.register_load_state_dict_pre_hook(lambda _, given: _shield(self, given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._sync()
        return {**super().__getstate__(), "_threads": self._threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("runner", None)
        self._written = {}
        for _, group, parameter in self._enumerate():
            if parameter in self.state:
                self.state[parameter] = self._adopted(parameter, group, self.state[parameter])

    @torch.no_grad()
    def _adopted(self, parameter: Tensor, group: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
        """State as this parameter and this group have it, from state that was loaded."""
        found = {name: value.tensor if isinstance(value, _Shielded) else value for name, value in loaded.items()}
        state = {name: value for name, value in found.items() if value is not None}
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")
        for name in self._MOMENTS:
            if name in state:
                state[name] = _fitted(state[name], parameter, group["moments"])
        lower, full = state.pop(masters.LOWER, None), state.pop(masters.FULL, None)
        kind = masters.kind_for(parameter, group["master"])
        if kind == "split" and (lower is not None or full is not None):
            if lower is None:
                lower = masters.lower_of(parameter, _fitted(full, parameter, torch.float32))
            state[masters.LOWER] = _fitted(lower, parameter, torch.int16)
        elif kind == "fp32" and (lower is not None or full is not None):
            if full is None:
                full = masters.merged(parameter, _fitted(lower, parameter, torch.int16))
            state[masters.FULL] = _fitted(full, parameter, torch.float32)
        return state


def _fitted(value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself where it lies as the parameter does."""
    _expect_shape(value, parameter)
    if value.dtype == dtype and value.device.type == "cpu" and value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=dtype, device="cpu").copy_(value)


def _expect_shape(value: Tensor, parameter: Tensor) -> None:
    if value.shape != parameter.shape:
        raise InvalidOptimizer(f"state of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}")


def _shield(optimizer: HostOptimizer, state_dict: StateDict) -> StateDict:
    owner = type(optimizer).__name__
    foreign = {*checks.WITHOUT, "decoupled_weight_decay"}
    needed = set(optimizer.defaults) - foreign
    groups = []
    for current, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        checks.refuse_rules(owner, saved)
        group = {"master": current["master"], "moments": current["moments"], **saved}
        missing = sorted(needed - set(group))
        checks.expect(not missing, f"the state to be loaded lacks {', '.join(missing)}: it is not that of an {owner}")
        groups.append({name: value for name, value in group.items() if name not in foreign})
        for number, parameter in zip(saved["params"], current["params"], strict=False):
            entries = state_dict["state"].get(number)
            if parameter.is_meta:
                _refuse_conversion(entries, masters.kind_for(parameter, group["master"]))
            for name in (*optimizer._MOMENTS, masters.LOWER, masters.FULL):
                if isinstance(entries, Mapping) and isinstance(entries.get(name), Tensor):
                    _expect_shape(entries[name], parameter)
    groups += state_dict["param_groups"][len(groups) :]  # torch says that there are too many
    state = {key: _shielded(entries) for key, entries in state_dict["state"].items()}
    return {**state_dict, "param_groups": groups, "state": state}


def _refuse_conversion(entries: Any, kind: str | None) -> None:
    """One form of master is made from another by the weight, which is not there yet."""
    found = {masters.LOWER, masters.FULL}.intersection(entries if isinstance(entries, dict) else ())
    there = kind is None or not found or (masters.LOWER if kind == "split" else masters.FULL) in found
    checks.expect(
        there,
        "the state to be loaded has its fp32 masters in another form than this optimizer keeps, and the parameters are "
        "on meta: one is made from the other by the weights. Load it once they have memory, or take the other master=",
    )


def _shielded(entries: Any) -> Any:
    if not isinstance(entries, dict):
        return entries
    return {name: _Shielded(value) if isinstance(value, Tensor) else value for name, value in entries.items()}
