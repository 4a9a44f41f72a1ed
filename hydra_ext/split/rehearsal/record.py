"""What a rehearsal found: the events of one kind of microbatch, and what each cut between them would carry.

A *boundary* b lies before event b; a stage is the events from one boundary to another, with the glue after each.
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
    """Names a value: by the event or the glue call that made it, and where in its result it is."""

    kind: str
    index: int
    place: str

    @property
    def is_inner(self) -> bool:
        """It was seen by a hook in the midst of its event."""
        return self.place.startswith("inner")

    def __str__(self) -> str:
        return f"{self.kind} {self.index} ({self.place})"


@dataclass(frozen=True)
class Constant:
    """A leaf that is no tensor."""

    value: Any


@dataclass(frozen=True)
class Argument:
    """A leaf that is the n-th tensor among the arguments, itself."""

    index: int


@dataclass(frozen=True)
class Made:
    """A leaf that is a value."""

    key: Key


@dataclass(frozen=True)
class View:
    """A leaf that lies in the memory of an argument; calls that return it are made by every stage."""

    shape: torch.Size
    dtype: torch.dtype


Leaf = Constant | Argument | Made | View
PLAIN = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Structure:
    """What a call returned."""

    leaves: tuple[Leaf, ...]
    tree: TreeSpec

    def build(
        self,
        arguments: Sequence[Tensor],
        value: Callable[[Key], Tensor],
        view: Callable[[torch.Size, torch.dtype], Tensor] | None = None,
    ) -> Any:
        """The same with these tensors; a value that occurs twice is one tensor."""
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
    """The same for hooks that are one function with other variables."""
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
    """A piece of memory that depends on what an event computed, as the tensor that was there first.

    It keeps its name when it is written to: what crosses is what it holds where the stage ends.

    Attributes:
        made: step of the forward at which it was made. Calls of blocks and of glue are numbered as steps.
        last_use: the last step that read it; ``made`` where nothing did.
        everywhere: Python code has read it (an ``if``), which every later stage runs too.
        attached_later: its graph was given to it after the call that made it had returned.
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
    """A module inside a block that has hooks, which see its output.

    Attributes:
        hooks: what their programs are; hooks made in a loop have one.
    """

    module: str
    structure: Structure
    hooks: tuple[Hashable, ...]


@dataclass(frozen=True)
class Event:
    """One call of a block, and the glue up to the next.

    Attributes:
        name: of the block.
        step: at which it was called.
        calls_before: glue calls before it.
        structure: what it returned.
        written: arguments whose memory depends on events from here on, because it wrote to them: their numbers, and
            the values that their memory is.
        inner: calls inside whose hooks must see an output also where the event is skipped.
        attributes: tensors it set on modules: module in the block, attribute, value.
        parameters, buffers: whose values it, or the glue after it, needs.
        writes: parameters and buffers that it changes.
        sets: buffers that the glue after it replaces by what every stage that comes there computes alike.
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
        structure: what it returned; None where nothing in it comes from an event, or it reads a value.
        written: as for an event.
        is_view: what it returned lies in the memory of its arguments, and so it must for every stage, because that
            memory is written to afterwards.
        reads_value: whether Python learns from it what a tensor holds.
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
        values: that would cross.
        copied: those of them that are sent as copies: their memory is that of a parameter, of an input, or of something
            else that was there before. No other is written to while it is needed, or else the whole model would fail.
        reasons: why no cut can be made here; empty where one can.
    """

    values: tuple[Key, ...] = ()
    copied: frozenset[Key] = frozenset()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """One kind of microbatch, from the first event to the loss.

    Attributes:
        boundaries: one more than there are events; those at both ends carry nothing.
        everywhere: names of the parameters that every stage needs: Python code reads their values.
        blocks: names of all blocks, called or not.
        signature: of the kind of microbatch; for this process only.
        lasting: what outlives the forward; likewise.
        rewritten: names of the buffers, attributes of modules, and parameters, that glue writes to with what depends
            on no event: every stage that comes by does so again.
        training: whether each module of the model trains after the forward.
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
        """The names of all glue calls and blocks, in the order in which they were called."""
        steps: list[str] = []
        done = 0
        for event in self.events:
            steps += (call.name for call in self.calls[done : event.calls_before])
            steps.append(f"block {event.name}")
            done = event.calls_before
        return (*steps, *(call.name for call in self.calls[done:]))

    @property
    def crossing_bytes(self) -> list[int]:
        """At each boundary, one more than there are events."""
        return [sum(self.values[key].nbytes for key in boundary.values) for boundary in self.boundaries]

    @cached_property
    def handing_out(self) -> frozenset[Hashable]:
        """The hooks inside blocks by which a value comes out that is used there.

        All others only look, as those that log what they see; they run where the block does.
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
        """The same on ranks that found the same."""
        text = hashlib.sha256()
        for event in self.events:
            text.update(event.text().encode())
        for call in self.calls:
            text.update(call.text().encode())
        for boundary in self.boundaries:
            for key in boundary.values:
                text.update(self.values[key].text().encode())
        return text.hexdigest()[:32]
