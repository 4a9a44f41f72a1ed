"""Base of the native optimizers: state, its loading, and the native plan of a step."""

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
from hydra_ext.optim.rows import RowStep, bring_to_host, for_the_whole, gradient_of


@dataclass
class PreparedStep:
    """One step of some parameters, complete but for the gradients' scale. It is kept alive until the step has run.

    Attributes:
        plan: Native plan; its n-th update is that of the n-th parameter.
        parameters: Parameters in the order in which they were given.
        gradients: Gradients as the plan reads them.
        written: Tensors that get the new weights: the parameter itself, or its destination.
    """

    plan: _C.TensorPlan = field(default_factory=_C.TensorPlan)
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)


class StepRunner(Protocol):
    """Runs an optimizer's steps in its place, part by part, and perhaps later.

    Attributes:
        destinations: Tensors for the parameters' new weights; see :meth:`HostOptimizer.prepare`.
    """

    destinations: Mapping[Tensor, Tensor] | None

    def parts(self, gradients: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Groups and orders parameters with their gradients as the runner wants them prepared.

        Earlier steps that it had put off have run when it returns.
        """

    def new_state(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        """New state with the parameter's strides: zeros, or with ``copies`` the parameter's numbers."""

    def run(self, optimizer: HostOptimizer, prepared: list[PreparedStep]) -> None:
        """Runs the plans of :meth:`parts`, in any order, now or later."""

    def sync(self) -> None:
        """Waits until all steps have run and all tensors have their bytes."""


@dataclass(frozen=True)
class _Shielded:
    """Hides a tensor from torch's loading, which would cast it to the parameter's dtype."""

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
    def _rests(self, group: dict[str, Any]) -> bool:
        """Whether a step leaves weights whose gradient and moments are zero as they are, to the bit."""

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
            InvalidOptimizer: A gradient is sparse, not on the host, or of another dtype. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = (parameter for _, _, parameter in self._enumerate())
        found = [(parameter, gradient_of(parameter)) for parameter in parameters]
        gradients = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
        if self.runner is None:
            (prepared,) = self.prepare([gradients])
            prepared.plan.run(self.pool)
            self.finish(prepared)
        else:
            self.runner.run(self, self.prepare(self.runner.parts(gradients), self.runner.destinations))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or sets them to zero, as in torch.optim."""
        with torch._C.DisableTorchFunctionSubclass():  # gradients by rows stay so
            super().zero_grad(set_to_none)

    def master(self, parameter: Tensor) -> Tensor:
        """The exact fp32 number behind a parameter, as a new tensor."""
        state = self.state.get(parameter, {})
        if masters.LOWER in state:
            return masters.merged(parameter, state[masters.LOWER])
        exact: Tensor = state.get(masters.FULL, parameter)
        return exact.detach().to(torch.float32, copy=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in torch.optim. A group that this optimizer cannot work with is not added."""
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
        """The threads that run updates."""
        return threads.pool(self._threads)

    @torch.no_grad()
    def prepare(
        self, parts: list[list[tuple[Tensor, Tensor]]], destinations: Mapping[Tensor, Tensor] | None = None
    ) -> list[PreparedStep]:
        """Begins a step: makes missing state, counts the step, and makes a plan for each part.

        The caller then runs each part's plan once and completely, on any threads, and calls :meth:`finish`. Until a
        plan has run, its weights, gradients and state must stay where they are. A step that will not be taken must not
        be prepared.

        Args:
            parts: Parameters with their gradients, in parts.
            destinations: Tensors that get parameters' new weights, while the parameters are only read. A destination
                has its parameter's dtype, shape and strides, and shares no memory with it. The state advances with the
                new weights, so they have to be the parameter's when its next step is prepared:
                ``parameter.data = destination``. Destinations of parameters that are not in ``parts`` are not written.

        Raises:
            InvalidOptimizer: This optimizer cannot work with a gradient or a destination. Nothing was changed.
        """
        destinations = {} if destinations is None else destinations
        places = {parameter: (ordinal, group) for ordinal, group, parameter in self._enumerate()}
        parts = [[(parameter, for_the_whole(parameter, gradient)) for parameter, gradient in part] for part in parts]
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
            for tensor in (parameter, *self.tensors_beside(parameter)):
                bring_to_host(tensor)
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

    def can_step_rows(self, parameter: Tensor) -> bool:
        """Whether :meth:`row_step` may be called for a parameter: it is fp32, and so are its moments."""
        groups = [group for _, group, stepped in self._enumerate() if stepped is parameter]
        return (
            parameter.dtype == torch.float32
            and all(group["moments"] == torch.float32 for group in groups)
            and bool(groups)
        )

    @torch.no_grad()
    def row_step(self, parameter: Tensor) -> RowStep:
        """Begins a step of a parameter that the caller makes row by row. Makes missing state, and counts the step."""
        (group,) = (group for _, group, stepped in self._enumerate() if stepped is parameter)
        state, first = self._state_of(parameter, group)
        step = 0
        if "step" in state:
            state["step"] += 1
            step = int(state["step"])
        moments = tuple(state[name] for name in self._MOMENTS) if self._has_moments(group) else ()
        return RowStep(self._scalars(group, step, first), moments, self._rests(group))

    def tensors_of(self, prepared: PreparedStep) -> list[Tensor]:
        """All tensors that a prepared step reads or writes."""
        kept = [tensor for parameter in prepared.parameters for tensor in self.tensors_beside(parameter)]
        pairs = zip(prepared.parameters, prepared.written, strict=True)
        elsewhere = [written for parameter, written in pairs if written is not parameter]
        return [*prepared.parameters, *elsewhere, *prepared.gradients, *kept]

    def tensors_beside(self, parameter: Tensor) -> list[Tensor]:
        """The state that a step of this parameter reads and writes."""
        state = self.state.get(parameter, {})
        return [value for name, value in state.items() if name != "step" and torch.is_tensor(value)]

    def state_sizes(self) -> dict[Tensor, list[int]]:
        """Bytes of each tensor that :meth:`tensors_beside` returns after a parameter's first step."""
        sizes = {}
        for _, group, parameter in self._enumerate():
            count = len(self._MOMENTS) if self._has_moments(group) else 0
            sizes[parameter] = [parameter.numel() * group["moments"].itemsize for _ in range(count)]
            kind = masters.kind_for(parameter, group["master"])
            if kind is not None:
                sizes[parameter].append(parameter.numel() * masters.dtype_of(kind).itemsize)
        return sizes

    def finish(self, prepared: PreparedStep) -> None:
        """Tells autograd that the weights were written. A step that is put off writes them before they can be read."""
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
        """The parameter's state, completed if necessary, and whether its moments are new."""
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
                # Nothing has been rounded off yet, so the part kept by "split" is zero.
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
        """The state as in torch.optim. Waits for a step under way."""
        self._sync()
        return super().state_dict()

    def _sync(self) -> None:
        if self.runner is not None:
            self.runner.sync()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the state of this optimizer, or of the one of the same name in torch.optim.

        The moments may have any dtype, and the masters any form. Load the weights first: a master is used only if it
        rounds to its weight.

        Raises:
            InvalidOptimizer: The state is that of another rule, or of parameters of other shapes. Nothing was changed.
        """
        self._sync()
        # Registered last, so that it is called last and gets exactly the state that will be loaded.
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
        """Converts loaded state to the dtypes and the form of master of this parameter and group."""
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
    """The tensor itself if it has the parameter's strides and the dtype, otherwise a copy that has them."""
    _expect_shape(value, parameter)
    if value.dtype == dtype and value.device.type == "cpu" and value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=dtype, device="cpu").copy_(value)


def _expect_shape(value: Tensor, parameter: Tensor) -> None:
    if value.shape != parameter.shape:
        raise InvalidOptimizer(
            f"the state to be loaded has a tensor of shape {tuple(value.shape)} for a parameter of "
            f"{tuple(parameter.shape)}: load the state of the same model"
        )


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
    """Refuses masters in another form for a weight without memory, since the conversion needs the weight."""
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
