"""The result of a rehearsal: the events of one kind of microbatch, and what each cut between them would carry.

*Boundary* b lies before event b. A stage is the events from one boundary to another, with the glue after each event.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from hydra_ext.split.state.lasting import Lasting


@dataclass(frozen=True, order=True)
class Key:
    """The name of a value: the event or the glue call that made it, and its place in the result."""

    kind: str
    index: int
    place: str

    @property
    def is_inner(self) -> bool:
        """Whether a hook saw it while its event was still running."""
        return self.place.startswith("inner")

    def __str__(self) -> str:
        return f"{self.kind} {self.index} ({self.place})"


@dataclass(frozen=True)
class Constant:
    """A leaf other than a tensor."""

    value: Any


@dataclass(frozen=True)
class Argument:
    """A leaf that is the n-th tensor among the arguments, the same object."""

    index: int


@dataclass(frozen=True)
class Made:
    """A leaf that is a value."""

    key: Key


@dataclass(frozen=True)
class View:
    """A leaf that lies in the memory of an argument. Every stage makes the calls that return one."""

    shape: torch.Size
    dtype: torch.dtype


Leaf = Constant | Argument | Made | View
PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Structure:
    """The result of a call: its leaves, and the tree that they form."""

    leaves: tuple[Leaf, ...]
    tree: TreeSpec

    def build(
        self,
        arguments: Sequence[Tensor],
        value: Callable[[Key], Tensor],
        view: Callable[[torch.Size, torch.dtype], Tensor] | None = None,
    ) -> Any:
        """A result of this structure with the given tensors; a value that occurs twice is one tensor."""
        made: dict[Key, Tensor] = {}
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Constant):
                leaves.append(leaf.value)
            elif isinstance(leaf, Argument):
                leaves.append(arguments[leaf.index])
            elif isinstance(leaf, View):
                leaves.append(view(leaf.shape, leaf.dtype) if view is not None else None)
            else:
                if leaf.key not in made:
                    made[leaf.key] = value(leaf.key)
                leaves.append(made[leaf.key])
        return tree_unflatten(leaves, self.tree)

    def text(self) -> str:
        return f"{self.tree} {[_leaf_text(leaf) for leaf in self.leaves]}"


def program_of(hook: Any) -> Hashable:
    """The code of the hook, which is the same for hooks that differ only in the variables they close over."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    program: Hashable = getattr(getattr(hook, "__func__", hook), "__code__", type(hook).__call__)
    return program


def _leaf_text(leaf: Leaf) -> str:
    if isinstance(leaf, Constant):
        return repr(leaf.value) if isinstance(leaf.value, PLAIN) else type(leaf.value).__name__
    return repr(leaf)


@dataclass(frozen=True)
class Value:
    """Memory that depends on a result of an event, described by the tensor that an event or a glue call made.

    It keeps its key when it is written to: the next stage gets its content at the end of the stage.

    Attributes:
        made: Step of the forward at which it was made. Each call of a block or of glue is one step.
        last_use: Last step that read it; ``made`` if none did.
        everywhere: Whether Python code has read it (an ``if``): every later stage runs that code, too.
        attached_later: Whether it got its graph after the call that made it had returned.
    """

    key: Key
    made: int
    last_use: int
    everywhere: bool
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    attached_later: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def text(self) -> str:
        return f"{self.key} {tuple(self.shape)} {self.dtype} {self.requires_grad}"


@dataclass(frozen=True)
class InnerCall:
    """A call of a module inside a block whose hooks see its output.

    Attributes:
        hooks: The code of each hook, by :func:`program_of`.
    """

    module: str
    structure: Structure
    hooks: tuple[Hashable, ...]


@dataclass(frozen=True)
class Event:
    """One call of a block, and the glue up to the next.

    Attributes:
        name: Name of the block.
        step: Step at which it was called.
        calls_before: Number of glue calls before it.
        structure: Result of the call.
        written: Arguments that it wrote to, and whose memory depends on events from then on: their numbers, and the
            values of their memory.
        inner: Calls of modules inside that have hooks. Hooks that hand out a value run even if the event is skipped.
        attributes: Tensors that it set on modules: module in the block, attribute, value.
        parameters: Names of the parameters that it, or the glue after it, reads.
        buffers: Names of the buffers that it, or the glue after it, reads, changes or replaces.
        writes: Parameters and buffers that it, or the glue after it, changes.
        sets: Buffers that the glue after it replaces by tensors that are equal on every stage that runs this glue.
    """

    name: str
    step: int
    calls_before: int
    structure: Structure
    written: tuple[tuple[int, Key], ...]
    inner: tuple[InnerCall, ...]
    attributes: tuple[tuple[str, str, Key], ...]
    parameters: frozenset[str]
    buffers: frozenset[str]
    writes: frozenset[str]
    sets: frozenset[str] = frozenset()

    def text(self) -> str:
        inner = [(call.module, call.structure.text()) for call in self.inner]
        return f"{self.name} {self.calls_before} {self.structure.text()} {self.written} {inner} {self.attributes}"


@dataclass(frozen=True)
class GlueCall:
    """One call of a function of torch outside blocks.

    Attributes:
        structure: Result of the call; None if every stage makes the call. A stage whose part begins later skips
            calls that have one.
        written: As for an event.
        reads_value: Whether Python learns a tensor's elements from it.
        is_view: Whether every stage makes the call because its result lies in the memory of the arguments, and that
            memory is written to afterwards.
    """

    name: str
    structure: Structure | None = None
    written: tuple[tuple[int, Key], ...] = ()
    reads_value: bool = False
    is_view: bool = False

    def text(self) -> str:
        return f"{self.name} {self.structure.text() if self.structure else ''} {self.written}"


@dataclass(frozen=True)
class Boundary:
    """A place between two events.

    Attributes:
        values: Values that would cross.
        copied: Values that are sent as copies, because their memory is that of a parameter, of an input, or of another
            tensor that existed before. No other value is written to while it is needed: that would fail in the whole
            model, too.
        reasons: Reasons why no cut can be made here; empty if one can.
    """

    values: tuple[Key, ...] = ()
    copied: frozenset[Key] = frozenset()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """The forward of one kind of microbatch, from the first event to the loss.

    Attributes:
        events: Calls of blocks, in order.
        calls: Glue calls, in order.
        values: All values, by key.
        boundaries: Boundaries, one more than there are events; those at both ends carry nothing.
        everywhere: Names of the parameters that every stage needs, because Python code reads their elements.
        blocks: Names of all blocks, called or not.
        signature: Kind of the microbatch; valid in this process only.
        lasting: Changes that outlive the forward; valid in this process only.
        rewritten: Names of buffers, attributes of modules and parameters that glue writes to, with numbers that depend
            on no event. Every stage that runs this glue writes them again.
        training: ``training`` of each module of the model after the forward.
    """

    events: tuple[Event, ...]
    calls: tuple[GlueCall, ...]
    values: dict[Key, Value]
    boundaries: tuple[Boundary, ...]
    everywhere: frozenset[str]
    blocks: tuple[str, ...]
    signature: Hashable
    lasting: Lasting
    rewritten: frozenset[str] = frozenset()
    training: tuple[bool, ...] = ()

    @property
    def possible_cuts(self) -> list[int]:
        """Boundaries at which the model can be cut."""
        return [b for b in range(1, len(self.events)) if not self.boundaries[b].reasons]

    @cached_property
    def way(self) -> tuple[str, ...]:
        """The path of the forward: the names of all glue calls and blocks, in the order of the calls."""
        steps: list[str] = []
        done = 0
        for event in self.events:
            steps += (call.name for call in self.calls[done : event.calls_before])
            steps.append(f"block {event.name}")
            done = event.calls_before
        return (*steps, *(call.name for call in self.calls[done:]))

    @property
    def crossing_bytes(self) -> list[int]:
        """Bytes that cross at each boundary; one number more than there are events."""
        return [sum(self.values[key].nbytes for key in boundary.values) for boundary in self.boundaries]

    @cached_property
    def handing_out(self) -> frozenset[Hashable]:
        """Code of the hooks inside blocks that hand out a value which is used outside.

        All other hooks only look at an output, for logging, say. They run only on the stage that runs the block.
        """
        used = {key for key, value in self.values.items() if value.everywhere or value.last_use > value.made}
        calls = [call for event in self.events for call in event.inner]
        return frozenset(
            hook
            for call in calls
            if any(isinstance(leaf, Made) and leaf.key in used for leaf in call.structure.leaves)
            for hook in call.hooks
        )

    @cached_property
    def digest(self) -> str:
        """A hash of the events, calls and crossings; ranks compare it to see that their rehearsals agree."""
        text = hashlib.sha256()
        for event in self.events:
            text.update(event.text().encode())
        for call in self.calls:
            text.update(call.text().encode())
        for boundary in self.boundaries:
            for key in boundary.values:
                text.update(self.values[key].text().encode())
        return text.hexdigest()[:32]
