"""One forward of one stage: the events before it are skipped, its own run, and the next ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from hydra_ext.split.stages.tensors import StandIns, whole_of
from hydra_ext.split.stages.watch import StandInWatch
from hydra_ext.state.arguments import tensors_in

Forward = Callable[..., Any]
# What contexts call as they are left: torch.no_grad() and its like, profiler.record_function.
_LEAVING = {"_set_grad_enabled", "_record_function_exit", "_record_function_exit._RecordFunction"}


class StageDone(BaseException):
    """Ends the program's forward where the stage ends."""


class OtherWay(BaseException):
    """Ends the first stage's forward where it leaves the way of the rehearsal: another rehearsal may know this one."""

    def __init__(self, message: str, way: tuple[str, ...]) -> None:
        super().__init__(message)
        self.message = message
        self.way = way


class StageRun(GlueMode):
    """The calls of one forward, in the order of the rehearsal.

    Attributes:
        captured: values that the next stage gets, as they are when the forward has ended.
        own: the stage's first event has begun.
        done: its last has ended, with the glue after it.
        watch: knows what holds nothing here. Over the first forward it sees all, later only calls that are given some.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        lo: int,
        hi: int,
        arrived: dict[Key, Tensor],
        stand_ins: StandIns,
        randomness: EventRandomness,
        watch: StandInWatch | None,
        own_begins: Callable[[], None],
    ) -> None:
        super().__init__()
        self._own_begins = own_begins
        self._rehearsal = rehearsal
        self._lo, self._hi = lo, hi
        self._arrived = arrived
        self._stand_ins = stand_ins
        self._randomness = randomness
        self.watch = watch or StandInWatch(stand_ins, ())
        self._is_watched = watch is not None
        self._sent = set(rehearsal.boundaries[hi].values)
        self._sent_calls = {key.index for key in self._sent if key.kind == "call"}
        self._event = 0
        self._call = 0
        self._step = 0
        self._inside = False
        self._outer_error = sys.exc_info()[1]  # the caller may be handling one
        self.captured = {key: tensor for key, tensor in arrived.items() if key in self._sent}
        self.own = lo == 0
        self.done = False

    def check_end(self) -> None:
        """The program's forward has returned.

        Raises:
            SplitError: it has done less, or more, than in the rehearsal, or swallowed the end of the stage.
        """
        if self._hi < len(self._rehearsal.events):
            raise SplitError(
                f"fn returned before event {self._hi} began: it catches BaseException, or does not take the way of the "
                "rehearsal"
            )
        if self._step != len(self._rehearsal.way):
            raise SplitError(f"fn returned before {self._rehearsal.way[self._step]}, which came in the rehearsal")

    def _advance(self, name: str) -> None:
        """The next step of the forward is this one."""
        way = self._rehearsal.way
        expected = way[self._step] if self._step < len(way) else "the end"
        if name != expected:
            message = (
                f"step {self._step} of the forward is {name}; in the rehearsal it was {expected}. It may depend on the "
                "microbatch's shapes and Python numbers only, or give stages= explicitly"
            )
            if self._lo == 0 and self._rehearsal.lasting.undoable_before(self._step):
                raise OtherWay(message, (*way[: self._step], name))
            raise SplitError(message)
        self._step += 1

    # ---- blocks ------------------------------------------------------------------------------------------------------
    def call_block(
        self, name: str, block: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        if self.done:
            raise StageDone
        number = self._event
        self._advance(f"block {name}")
        if number == self._hi:
            self.done = True
            raise StageDone
        event = self._rehearsal.events[number]
        self._event += 1
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
                known[key] = self._value(key)
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
                self._overwrite(whole_of(arguments[position]), key)
            return event.structure.build(arguments, value)
        finally:
            self._inside = False
            self._randomness.leave(number)

    def _call_hooks(self, module: nn.Module, output: Any) -> None:
        """As the module's call would, after its forward; but for hooks that only look."""
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
        # Numbers that are not there are seen in the loss. A list of all that blocks returned may be given to each.
        with torch._C.DisableTorchFunction():
            missing = [tensor for tensor in self._missing(arguments) if not tensor.is_floating_point()]
        self._randomness.enter(number)
        try:
            with self._unnumbered(), self._strictly(missing), self._inner_outputs(event, block):
                output = forward(*args, **kwargs)
        finally:
            self._randomness.leave(number)
        self._check_output(event, output, arguments)
        for module, attribute, key in event.attributes:
            self._capture(key, getattr(block.get_submodule(module), attribute))
        for position, key in event.written:
            self._capture(key, whole_of(arguments[position]))
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
                    there = _shown_value(value.shape)
                    raise SplitError(f"block {event.name} returns {_shown(leaf)}; in the rehearsal it was {there}")
                self._capture(expected.key, leaf)
            elif isinstance(expected, Constant):
                if isinstance(expected.value, PLAIN) and not _equal(leaf, expected.value):
                    raise SplitError(
                        f"block {event.name} returns {_shown(leaf)}, where it returned {expected.value!r} in the "
                        "rehearsal: what a stage that skips the block cannot know must be a tensor"
                    )
            elif isinstance(expected, Argument) and leaf is not arguments[expected.index]:
                raise SplitError(f"block {event.name} no longer returns one of its arguments")

    @contextmanager
    def _inner_outputs(self, event: Event, block: nn.Module) -> Iterator[None]:
        """Captures what modules inside returned to their hooks."""
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
                    self._capture(place.key, leaf)

        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    # ---- glue --------------------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PLACING:
            return placed_in_stage(self.watch, func, args)
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
        number = self._call
        self._call += 1
        call = self._rehearsal.calls[number]
        arguments = [*tensors_in((args, kwargs))]
        if call.structure is None:
            if call.reads_value or name in VALUE_READS:
                self._check_readable(name, arguments)
            return self._call_of_every_stage(name, func, args, kwargs, arguments)
        if call.is_view and (self.own or not any(map(self._stand_ins.holds, arguments))):
            return func(*args, **kwargs)
        if not self.own and not (name == GRAPH_NODE and not self._stand_ins.holds(args[0])):
            return self._skip_call(call, call.structure, args, kwargs)
        return self._run_call(number, call, call.structure, func, args, kwargs)

    def _leave_context(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """While an error is under way: the context must leave its mode, and no error of ours may hide that one."""
        result = func(*args, **kwargs)
        way = self._rehearsal.way
        if self._step < len(way) and way[self._step] == name:  # the program handles the error, as in the rehearsal
            self._step += 1
            self._call += 1
        return result

    def _check_readable(self, name: str, tensors: list[Tensor]) -> None:
        if self._missing(tensors):
            raise SplitError(f"{name} reads a value that has not come to this stage: the rehearsal did not see it read")

    def _skip_call(self, call: GlueCall, structure: Structure, args: Any, kwargs: Any) -> Any:
        arguments = [*tensors_in((args, kwargs))]
        self._inside = True
        try:
            for position, key in call.written:
                self._overwrite(whole_of(arguments[position]), key)
            result = structure.build(arguments, self._value, self._stand_ins.make)
        finally:
            self._inside = False
        return iter(result) if call.name == "__iter__" else result

    def _call_of_every_stage(self, name: str, func: Any, args: Any, kwargs: Any, arguments: list[Tensor]) -> Any:
        with nullcontext() if self._is_watched or not self._missing(arguments) else self.watch:
            return called(name, func, args, kwargs)

    def _run_call(self, number: int, call: GlueCall, structure: Structure, func: Any, args: Any, kwargs: Any) -> Any:
        with self._strictly(self._missing([*tensors_in((args, kwargs))])):
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
                    self._capture(expected.key, leaf)
            for position, key in call.written:
                self._capture(key, whole_of(arguments[position]))
        return iter(result) if call.name == "__iter__" else result

    # ---- values ------------------------------------------------------------------------------------------------------
    def _value(self, key: Key) -> Tensor:
        """What arrived, or a stand-in."""
        if key in self._arrived:
            return self._arrived[key]
        value = self._rehearsal.values[key]
        return self._stand_ins.make(value.shape, value.dtype)

    def _overwrite(self, target: Tensor, key: Key) -> None:
        """The target becomes what a skipped call made of it."""
        arrived = self._arrived.get(key)
        if arrived is None:
            self.watch.mark(target)
            return
        with torch.set_grad_enabled(arrived.requires_grad):
            target.copy_(arrived)
        self._capture(key, target)  # the stage may go on writing to it

    def _capture(self, key: Key, tensor: Any) -> None:
        if key in self._sent:
            if not isinstance(tensor, Tensor) or tensor.shape != self._rehearsal.values[key].shape:
                raise SplitError(
                    f"{key} is {_shown(tensor)}; in the rehearsal it was "
                    f"{_shown_value(self._rehearsal.values[key].shape)}"
                )
            self.captured[key] = tensor

    # ---- modes -------------------------------------------------------------------------------------------------------
    @contextmanager
    def _unnumbered(self) -> Iterator[None]:
        self._inside = True
        try:
            with self.in_block(seen=False):
                yield
        finally:
            self._inside = False

    def _missing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those that hold nothing here."""
        return [tensor for tensor in tensors if self.watch.what(tensor)]

    @contextmanager
    def _strictly(self, missing: Sequence[Tensor]) -> Iterator[None]:
        """What the stage computes of its own reads nothing that is not there.

        Args:
            missing: of what it is given; may be read where only the shape matters. In a later forward that goes the way
                of the first it is empty nearly always, and nothing needs to be watched.
        """
        if not (self._is_watched or missing):
            yield
            return
        self.watch.strict = True
        try:
            with nullcontext() if self._is_watched else self.watch:
                yield
        finally:
            self.watch.strict = False


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _shown(leaf: Any) -> str:
    return _shown_value(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)


def _shown_value(shape: torch.Size) -> str:
    return f"a tensor of shape {tuple(shape)}"
