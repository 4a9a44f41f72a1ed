"""One forward of one stage: events before the stage are skipped, its own events run, and the next event ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from hydra_ext.errors import SplitError
from hydra_ext.split.rehearsal.glue_mode import GlueMode, called
from hydra_ext.split.rehearsal.operations import GRAPH_NODE, VALUE_READS, call_name
from hydra_ext.split.rehearsal.record import (
    PLAIN,
    Argument,
    Constant,
    Event,
    GlueCall,
    Key,
    Made,
    Rehearsal,
    Structure,
    program_of,
)
from hydra_ext.split.stages.placing import PLACING, placed_in_stage
from hydra_ext.split.stages.randomness import EventRandomness
from hydra_ext.split.stages.tensors import whole_of
from hydra_ext.split.stages.values import StageValues, shown, shown_value
from hydra_ext.state.arguments import tensors_in

Forward = Callable[..., Any]
# Functions that contexts call on exit: torch.no_grad() and its like, profiler.record_function.
_LEAVING = {"_set_grad_enabled", "_record_function_exit", "_record_function_exit._RecordFunction"}


class StageDone(BaseException):
    """Ends the program's forward where the stage ends."""


class OtherWay(BaseException):
    """Ends the first stage's forward where it leaves the path of the rehearsal. Another rehearsal may have this path.

    Attributes:
        way: Path so far, with the step that the rehearsal does not have.
    """

    def __init__(self, message: str, way: tuple[str, ...]) -> None:
        super().__init__(message)
        self.message = message
        self.way = way


class _Position:
    """The position of a forward on the path of the rehearsal.

    Attributes:
        step: Number of the next step.
        event: Number of the next event.
        call: Number of the next glue call.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.step = 0
        self.event = 0
        self.call = 0
        self._way = rehearsal.way

    @property
    def passed(self) -> tuple[str, ...]:
        return self._way[: self.step]

    def is_next(self, name: str) -> bool:
        return self.step < len(self._way) and self._way[self.step] == name

    def unlike(self, name: str) -> str:
        """The message for a step that is not the next one of the rehearsal."""
        expected = self._way[self.step] if self.step < len(self._way) else "the end"
        return (
            f"step {self.step} of the forward is {name}; in the rehearsal it was {expected}. Let the path "
            "depend only on the microbatch's shapes and Python numbers, or give stages= explicitly"
        )

    def check_end(self) -> None:
        """
        Raises:
            SplitError: The forward has not taken all steps.
        """
        if self.step != len(self._way):
            raise SplitError(f"fn returned before {self._way[self.step]}, which was called in the rehearsal")


class StageRun(GlueMode):
    """The calls of one forward, in the order of the rehearsal.

    Attributes:
        values: Values that arrived at the stage, and those that it sends.
        own: Whether the stage's own part has begun: its first event, or the start of the forward in the first stage.
        done: Whether the stage's last event has ended, with the glue after it.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        lo: int,
        hi: int,
        values: StageValues,
        randomness: EventRandomness,
        own_begins: Callable[[], None],
    ) -> None:
        super().__init__()
        self.values = values
        self.own = lo == 0
        self.done = False
        self._rehearsal = rehearsal
        self._lo, self._hi = lo, hi
        self._randomness = randomness
        self._own_begins = own_begins
        self._position = _Position(rehearsal)
        self._sent_calls = {key.index for key in values.sent if key.kind == "call"}
        self._inside = False
        self._outer_error = sys.exc_info()[1]  # the caller may be handling one

    def check_end(self) -> None:
        """Called after the program's forward has returned.

        Raises:
            SplitError: It has taken fewer steps than the rehearsal, or has caught the :class:`StageDone` that ends it.
        """
        if self._hi < len(self._rehearsal.events):
            raise SplitError(
                f"fn returned before event {self._hi} began: it catches BaseException, or takes another path than the "
                "rehearsal"
            )
        self._position.check_end()

    def _advance(self, name: str) -> None:
        """Takes the step of this name.

        Raises:
            OtherWay: It is not the next step of the rehearsal, and this run of the first stage can be undone.
            SplitError: It is not the next step of the rehearsal.
        """
        if not self._position.is_next(name):
            position = self._position
            if self._lo == 0 and self._rehearsal.lasting.undoable_before(position.step):
                raise OtherWay(position.unlike(name), (*position.passed, name))
            raise SplitError(position.unlike(name))
        self._position.step += 1

    # ---- blocks ------------------------------------------------------------------------------------------------------
    def call_block(
        self, name: str, block: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        if self.done:
            raise StageDone
        number = self._position.event
        self._advance(f"block {name}")
        if number == self._hi:
            self.done = True
            raise StageDone
        event = self._rehearsal.events[number]
        self._position.event += 1
        if number < self._lo:
            return self._skip(number, event, block, args, kwargs)
        if number == self._lo:
            self._own_begins()
        self.own = True
        return self._run(number, event, block, forward, args, kwargs)

    def _skip(self, number: int, event: Event, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known: dict[Key, Tensor] = {}

        def value(key: Key) -> Tensor:
            if key not in known:
                known[key] = self.values.value(key)
            return known[key]

        arguments = [*tensors_in((args, kwargs))]
        self._inside = True
        try:
            for inner in event.inner:
                if not self._rehearsal.handing_out.isdisjoint(inner.hooks):
                    self._call_hooks(block.get_submodule(inner.module), inner.structure.build([], value))
            for module, attribute, key in event.attributes:
                setattr(block.get_submodule(module), attribute, value(key))
            for position, key in event.written:
                self.values.overwrite(whole_of(arguments[position]), key)
            return event.structure.build(arguments, value)
        finally:
            self._inside = False
            self._randomness.leave(number)

    def _call_hooks(self, module: nn.Module, output: Any) -> None:
        """Calls the hooks that hand out values, as the module's call would after its forward."""
        for number, hook in list(module._forward_hooks.items()):
            if program_of(hook) in self._rehearsal.handing_out:
                given: tuple[Any, ...] = ((), {}) if number in module._forward_hooks_with_kwargs else ((),)
                changed = hook(module, *given, output)
                output = output if changed is None else changed

    def _run(
        self,
        number: int,
        event: Event,
        block: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        arguments = [*tensors_in((args, kwargs))]
        # Floating-point stand-ins may be given to a block, as in a list of all earlier results. They are NaN, so that a
        # use of them shows in the loss.
        with torch._C.DisableTorchFunction():
            missing = [tensor for tensor in self.values.missing(arguments) if not tensor.is_floating_point()]
        self._randomness.enter(number)
        try:
            with self._unnumbered(), self.values.strictly(missing), self._inner_outputs(event, block):
                output = forward(*args, **kwargs)
        finally:
            self._randomness.leave(number)
        self._check_output(event, output, arguments)
        for module, attribute, key in event.attributes:
            self.values.capture(key, getattr(block.get_submodule(module), attribute))
        for position, key in event.written:
            self.values.capture(key, whole_of(arguments[position]))
        return output

    def _check_output(self, event: Event, output: Any, arguments: Sequence[Tensor]) -> None:
        leaves, tree = tree_flatten(output)
        structure = event.structure
        if tree != structure.tree:
            raise SplitError(f"block {event.name} returns {tree}; in the rehearsal it was {structure.tree}")
        for leaf, expected in zip(leaves, structure.leaves, strict=True):
            if isinstance(expected, Made):
                value = self._rehearsal.values[expected.key]
                if not isinstance(leaf, Tensor) or (leaf.shape != value.shape and value.last_use > value.made):
                    there = shown_value(value.shape)
                    raise SplitError(f"block {event.name} returns {shown(leaf)}; in the rehearsal it was {there}")
                self.values.capture(expected.key, leaf)
            elif isinstance(expected, Constant):
                if isinstance(expected.value, PLAIN) and not _equal(leaf, expected.value):
                    raise SplitError(
                        f"block {event.name} returns {shown(leaf)}, where it returned {expected.value!r} in the "
                        "rehearsal: a stage that skips the block cannot know it, so it must be a tensor"
                    )
            elif isinstance(expected, Argument) and leaf is not arguments[expected.index]:
                raise SplitError(f"block {event.name} no longer returns one of its arguments")

    @contextmanager
    def _inner_outputs(self, event: Event, block: nn.Module) -> Iterator[None]:
        """Captures the outputs of modules inside that have hooks."""
        if not event.inner:
            yield
            return
        names = {module: name for name, module in block.named_modules() if name}
        expected = iter(event.inner)

        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            if module not in names or not module._forward_hooks:
                return
            call = next(expected, None)
            leaves, tree = tree_flatten(output)
            if call is None or call.module != names[module] or call.structure.tree != tree:
                raise SplitError(f"the calls inside block {event.name} are not those of the rehearsal")
            for leaf, place in zip(leaves, call.structure.leaves, strict=True):
                if isinstance(place, Made):
                    self.values.capture(place.key, leaf)

        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    # ---- glue --------------------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PLACING:
            return placed_in_stage(self.values.watch, func, args)
        kwargs = kwargs or {}
        name = None if self._inside else call_name(func)
        if name is None:
            return func(*args, **kwargs)
        if self.done:
            if name in _LEAVING:
                return func(*args, **kwargs)
            raise StageDone
        if name in _LEAVING and sys.exc_info()[1] is not self._outer_error:
            return self._leave_context(name, func, args, kwargs)
        self._advance(name)
        number = self._position.call
        self._position.call += 1
        call = self._rehearsal.calls[number]
        arguments = [*tensors_in((args, kwargs))]
        if call.structure is None:
            if call.reads_value or name in VALUE_READS:
                self._check_readable(name, arguments)
            with self.values.followed(arguments):
                return called(name, func, args, kwargs)
        if call.is_view and (self.own or not any(map(self.values.stand_ins.holds, arguments))):
            return func(*args, **kwargs)
        if not self.own and not (name == GRAPH_NODE and not self.values.stand_ins.holds(args[0])):
            return self._skip_call(call, call.structure, args, kwargs)
        return self._run_call(number, call, call.structure, func, args, kwargs)

    def _leave_context(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Leaves a context while an error is raised. The context must leave its mode, and no SplitError may hide it."""
        result = func(*args, **kwargs)
        if self._position.is_next(name):  # the program handles the error, as it did in the rehearsal
            self._position.step += 1
            self._position.call += 1
        return result

    def _check_readable(self, name: str, tensors: list[Tensor]) -> None:
        if self.values.missing(tensors):
            raise SplitError(
                f"{name} reads a value that has not come to this stage: the rehearsal did not see this read"
            )

    def _skip_call(self, call: GlueCall, structure: Structure, args: Any, kwargs: Any) -> Any:
        arguments = [*tensors_in((args, kwargs))]
        self._inside = True
        try:
            for position, key in call.written:
                self.values.overwrite(whole_of(arguments[position]), key)
            result = structure.build(arguments, self.values.value, self.values.stand_ins.make)
        finally:
            self._inside = False
        return iter(result) if call.name == "__iter__" else result

    def _run_call(self, number: int, call: GlueCall, structure: Structure, func: Any, args: Any, kwargs: Any) -> Any:
        with self.values.strictly(self.values.missing([*tensors_in((args, kwargs))])):
            result = func(*args, **kwargs)
        if call.name == "__iter__":
            result = list(result)
        if number in self._sent_calls:
            leaves = tree_leaves(result)
            arguments = [*tensors_in((args, kwargs))]
            if len(leaves) != len(structure.leaves) or any(p >= len(arguments) for p, _ in call.written):
                raise SplitError(f"{call.name} returns something else than in the rehearsal")
            for leaf, expected in zip(leaves, structure.leaves, strict=True):
                if isinstance(expected, Made):
                    self.values.capture(expected.key, leaf)
            for position, key in call.written:
                self.values.capture(key, whole_of(arguments[position]))
        return iter(result) if call.name == "__iter__" else result

    # ---- modes -------------------------------------------------------------------------------------------------------
    @contextmanager
    def _unnumbered(self) -> Iterator[None]:
        self._inside = True
        try:
            with self.in_block(seen=False):
                yield
        finally:
            self._inside = False


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
