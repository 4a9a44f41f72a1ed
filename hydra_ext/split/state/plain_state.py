"""Plain values (numbers, flags, names) that a forward leaves behind, and their readers.

A stage that skips a block lacks the values that the block sets outside its result. A stage that ends early lacks the
values that later glue sets. A second forward finds the readers of such values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.state.held import Root, argument_roots, entries
from hydra_ext.split.state.outside import reached_by
from hydra_ext.split.state.plain_values import ModulesNow, PlainValues
from hydra_ext.split.state.reads import Reader, Reads
from hydra_ext.state.contents import is_source

_UNKNOWN: set[Reader] = {("glue", -1)}  # of an attribute that cannot be watched: any event or glue may read it


@dataclass
class Left:
    """A changed value, and the attribute to watch for its readers.

    Attributes:
        path: Path of the changed value, as in Python code.
        attribute: Attribute through which the value is reached.
        module: Module or class that has the attribute; None if another object has it.
        owner: Path of that object, from modules or from the arguments of the event that changed the value.
        events: Events that have changed the value.
        glue: Events after which glue has changed the value.
        is_source: Whether it is a source of random numbers.
        is_unseen: Whether ``fn`` can read it without being noticed.
    """

    path: str
    attribute: str
    module: nn.Module | type | None = None
    owner: str | None = None
    events: set[int] = field(default_factory=set)
    glue: set[int] = field(default_factory=set)
    is_source: bool = False
    is_unseen: bool = False


class PlainState:
    """Watches a forward for the plain values that it changes.

    Attributes:
        left: Changes on modules and in the objects that they hold, by name.
        given: Changes in the objects that events were given, by event and name.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, fn: Callable[[Any], Any]) -> None:
        self._recorder = recorder
        self._outside = reached_by(fn)
        self._modules = ModulesNow(model)
        self._before = self._modules.snapshot()
        self._arguments = PlainValues([])
        self.left: dict[str, Left] = {}
        self.given: dict[int, dict[str, Left]] = {}

    def begin_event(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.end_glue()
        self._arguments = PlainValues(argument_roots(args, kwargs))

    def end_glue(self) -> None:
        """Called when the next event begins, or the forward has ended."""
        last = len(self._recorder.usages) - 1
        for found in self._changed_on_modules():
            if last >= 0:  # every stage runs the glue before the first event
                found.glue.add(last)

    def end_event(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        event = len(self._recorder.usages) - 1
        for found in self._changed_on_modules():
            found.events.add(event)
        before, self._arguments = self._arguments, PlainValues([])
        after = PlainValues(argument_roots(args, kwargs))
        for path in before.changed(after):
            self._note_argument(event, name, path, after, output)

    def _changed_on_modules(self) -> list[Left]:
        before, self._before = self._before, self._modules.snapshot()
        if self._before is before or not self._recorder.usages:
            return []
        found = []
        for path in before.changed(self._before):
            there = [entry for each in (before, self._before) if (entry := each.entries.get(path)) is not None]
            is_unseen = any(id(held) in self._outside for entry in there for held in (entry.holder, entry.value))
            for name, left in (_places(before, path) | _places(self._before, path)).items():
                found.append(self.left.setdefault(name, left))
                found[-1].is_unseen |= is_unseen
        return found

    def _note_argument(self, event: int, block: str, path: str, after: PlainValues, output: Any) -> None:
        """Notes a change in the arguments of an event.

        Reads of an object's attributes can be watched. Reads of a container cannot: later cuts are refused, unless the
        block returns the container.
        """
        entry = after.entries.get(path)
        if entry is not None and entry.owner is not None:
            name = f"event {event} {path}"
            self.given.setdefault(event, {})[name] = Left(path, entry.attribute, None, entry.owner, {event})
        elif entry is None or id(entry.holder) not in {id(e.holder) for e in entries([Root("", None, "", output)])}:
            self._recorder.refuse(
                f"block {block} changes {path}, which it was given: a stage that skips the block would not have it. "
                "Let the block return it, or cut before",
                after=self._recorder.event_steps[event],
            )

    def refuse(self, reads: Reads, again: Recorder, blocks: list[str]) -> None:
        """Refuses cuts between an event or glue that leaves a value and the readers of that value.

        Args:
            reads: Reads in the second forward.
            again: Record of the second forward.
            blocks: Names of the events' blocks in the first forward.
        """
        recorder = self._recorder
        if reads.found and len(again.usages) != len(blocks):
            recorder.refuse("the model calls other blocks in the second microbatch than in the first", after=0)
            return

        def step(event: int) -> int:
            return recorder.event_steps[event] if event >= 0 else 0

        for name, left in (*self.left.items(), *(item for given in self.given.values() for item in given.items())):
            for kind, reader in reads.found.get(name, ()):
                where = f"in block {blocks[reader]}" if kind == "event" else "between blocks"
                for event in left.events - ({reader} if kind == "event" else set()):
                    recorder.refuse(
                        _drawn_from(left)
                        or f"block {blocks[event]} changes {left.path}, which is read {where}: a stage that skips the "
                        "block would not have it. Keep it as a tensor that the block returns, or cut elsewhere",
                        after=step(min(event, reader)),
                        until=step(max(event, reader)) if kind == "event" else None,
                    )
                for glue in left.glue:
                    if reader < glue:
                        recorder.refuse(
                            _drawn_from(left)
                            or f"{left.path} is set after block {blocks[glue]}, in code that not every stage runs, and "
                            f"read {where} in the next microbatch: set it before the first block, or outside of fn",
                            after=step(reader),
                            until=step(glue),
                        )


class PlainReads:
    """Watches the second forward for reads of values that the first has left."""

    def __init__(self, recorder: Recorder, state: PlainState, model: nn.Module) -> None:
        self._recorder = recorder
        self._state = state
        self._modules = ModulesNow(model)
        self._seen: PlainValues | None = None
        self._owned = {name: left for name, left in state.left.items() if left.module is None}
        self.reads = Reads(
            lambda: ("event", recorder.running.index) if recorder.running else ("glue", len(recorder.usages) - 1)
        )
        for name, left in state.left.items():
            if left.module is not None:
                self._watch(left.module, left.attribute, name)
            if left.is_unseen:
                self.reads.found[name] = set(_UNKNOWN)
        self._find((), {}, {})

    def begin_event(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._find(args, kwargs, self._state.given.get(len(self._recorder.usages), {}))

    def end_event(self, _name: str, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        self._find(args, kwargs, self._state.given.get(len(self._recorder.usages) - 1, {}))

    def end_glue(self) -> None:
        pass

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Left]) -> None:
        """Finds the objects to watch: there may be others in each forward, and after each block."""
        with self.reads.paused():
            self.reads.watch_again()
            if given:
                self._watch_in(PlainValues(argument_roots(args, kwargs)), given)
            if self._owned:
                before, self._seen = self._seen, self._modules.snapshot()
                if self._seen is not before:
                    self._watch_in(self._seen, self._owned)

    def _watch_in(self, snapshot: PlainValues, wanted: dict[str, Left]) -> None:
        for name, left in wanted.items():
            owner = snapshot.entries.get(left.owner or "")
            if owner is not None:
                self._watch(owner.value, left.attribute, name)

    def _watch(self, owner: Any, attribute: str, name: str) -> None:
        if not self.reads.watch(owner, attribute, name):
            self.reads.found[name] = set(_UNKNOWN)


def _places(snapshot: PlainValues, path: str) -> dict[str, Left]:
    """The attributes to watch for reads of the value at this path, by name."""
    entry = snapshot.entries.get(path)
    source = entry is not None and is_source(entry.value)
    if entry is not None and entry.owner is not None:
        found = Left(path, entry.attribute, None, entry.owner, is_source=source)
        return {f"{entry.owner}.{entry.attribute}": found}
    return {
        f"{id(root.module)}.{root.attribute}": Left(path, root.attribute, root.module, is_source=source)
        for root in snapshot.roots_to(path)
    }


def _drawn_from(left: Left) -> str | None:
    if not left.is_source:
        return None
    return (
        f"random numbers are drawn from {left.path} on both sides of the cut, and each stage would miss the other's "
        "draws: use one source for each block, or the global ones of torch, numpy or Python, which are seeded for each "
        "block"
    )
