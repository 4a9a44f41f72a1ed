"""The notes of a rehearsal: told of every operation, glue call and event, it knows which values are used where.

Inside an event only operations are seen. Outside, every call of a function of torch is a numbered *glue call*; the
operations it consists of say what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from hydra_ext.errors import SplitError
from hydra_ext.split.metrics import tensors_inside, unsearched
from hydra_ext.split.rehearsal.glue_mode import called
from hydra_ext.split.rehearsal.graphs import Graphs
from hydra_ext.split.rehearsal.notes import Note, Root
from hydra_ext.split.rehearsal.operations import (
    GRADIENT_HOOKS,
    GRAPH_NODE,
    VALUE_COPIES,
    VALUE_OPERATIONS,
    VALUE_READS,
    Operation,
    checkpoint_frame,
)
from hydra_ext.split.rehearsal.record import PLAIN, Argument, Constant, GlueCall, Key, Leaf, Made, Structure, Value
from hydra_ext.split.rehearsal.usage import MADE_ONCE, GlueContext, Refusal, Running, Usage
from hydra_ext.split.rehearsal.views import settle_views
from hydra_ext.split.stages.graph_nodes import GraphElsewhere
from hydra_ext.split.stages.tensors import whole_of
from hydra_ext.split.state.generators import DrawnGenerators
from hydra_ext.split.state.lasting import Writes
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import ByStorage, Undo, storage_key


class Recorder:
    """See the head of the file.

    Attributes:
        step: of the forward so far.
        running: the event that runs now; None in glue.
        placing: an argument of the model's call is on its way to the device, or home.
    """

    def __init__(self) -> None:
        self.notes: ByStorage[Note] = ByStorage()
        self.values: dict[Key, Value] = {}
        self.note_of: dict[Key, Note] = {}
        self.calls: list[GlueCall] = []
        self.usages: list[Usage] = []
        self.refusals: list[Refusal] = []
        self.undo = Undo()
        self.writes = Writes()
        self.drawn = DrawnGenerators()
        self.everywhere: set[Root] = set()
        self.rewritten: set[Root] = set()  # by glue, with what depends on no event: every stage does so again
        self.frames: dict[int, list[int]] = {}
        self.event_steps: list[int] = []
        self.step = 0
        self.running: Running | None = None
        self.placing = False
        self._views: list[tuple[int, int]] = []  # glue calls that return views, and their steps
        self._current = WeakTensorKeyDictionary()  # the value that a tensor object is now
        self._graphs = Graphs()
        self._context: GlueContext | None = None

    def note_root(self, tensor: Tensor, root: Root) -> None:
        """The tensor is there before the forward."""
        note = self.notes.get(tensor) or self.notes.put(tensor, Note(foreign=True))
        note.roots |= {root}
        self.writes.name(tensor, root)

    def stands_for(self, absent: Tensor, present: Tensor) -> None:
        """What is read of ``present`` counts as read of ``absent``."""
        note = self.notes.get(absent)
        self.notes.put(present, Note(roots=note.roots if note is not None else frozenset(), foreign=True))

    def next_step(self) -> int:
        self.step += 1
        frame = checkpoint_frame()
        if frame is not None:
            self.frames.setdefault(frame, []).append(self.step)
        return self.step

    def refuse(self, reason: str, *, after: int | None = None, until: int | None = None) -> None:
        refusal = Refusal(reason, self.step if after is None else after, until)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    # ---- values ------------------------------------------------------------------------------------------------------
    def key_of(self, tensor: Tensor) -> Key | None:
        key: Key | None = self._current.get(tensor)  # type: ignore[no-untyped-call]
        return key

    def depends_on_events(self, tensor: Tensor) -> bool:
        note = self.notes.get(tensor)
        return tensor in self._current or (note is not None and (note.tainted or note.event is not None))

    def make_value(self, key: Key, tensor: Tensor) -> Key:
        if tensor.is_nested:
            raise SplitError(
                f"{key} is a nested tensor, which cannot cross between stages: build nn.TransformerEncoder with "
                "enable_nested_tensor=False, or keep nested tensors inside a block"
            )
        note = self.notes.get(tensor) or self.notes.put(tensor, Note(foreign=True))
        self.values[key] = Value(key, self.step, self.step, False, tensor.shape, tensor.dtype, tensor.requires_grad)
        self.note_of[key] = note
        note.values.append(key)
        note.tainted = True
        self.same_value(tensor, key)
        return key

    def same_value(self, tensor: Tensor, key: Key) -> None:
        """Another object for the same value."""
        self._current[tensor] = key
        if not key.is_inner:
            self._graphs.note(tensor)

    def use(self, tensor: Tensor, *, everywhere: bool = False) -> None:
        """The tensor is read now: as the value it is, or as any that lies in its memory."""
        key = self.key_of(tensor)
        note = self.notes.get(tensor)
        keys = [key] if key is not None else list(note.values) if note is not None else []
        keys = [key for key in keys if self.values[key].made < self.step]
        if not keys and note is not None and note.tainted and note.event is None:
            self.refuse("a tensor is read of which it cannot be told how an event made it", after=note.made)
        for used in keys:
            value = self.values[used]
            self.values[used] = replace(value, last_use=self.step, everywhere=value.everywhere or everywhere)
        if key is not None:
            self.note_graph(tensor, key)

    def note_graph(self, tensor: Tensor, key: Key) -> None:
        """Looks whether the tensor has come to require a gradient, or has got another graph, since it was made."""
        value = self.values[key]
        note = self.notes.get(tensor)
        written = note is not None and note.writes[-1:] == [self.step]  # and has a new node by right
        attached = value.attached_later or (not written and self._graphs.is_other(tensor))
        if tensor.requires_grad and (attached, True) != (value.attached_later, value.requires_grad):
            self.values[key] = replace(value, requires_grad=True, attached_later=attached)

    def note_written_graphs(self) -> None:
        """A call that has written to something ends."""
        self._graphs.note_written(self.notes, self.step)

    def finish(self, result: Any) -> None:
        self.step += 1
        strange = unsearched(result)
        if strange is not None:
            self.refuse(
                f"fn returns a {strange}, in which tensors may be: return tensors in tuples, lists or dicts", after=0
            )
        for tensor in tensors_inside(result):
            if self.depends_on_events(tensor):
                self.use(tensor)
            note = self.notes.get(tensor)
            if note is not None:
                self._is_known(tensor, note)
            if note is not None and self.usages:
                self.usages[-1].roots |= note.roots
        for tensor, key in list(self._current.items()):  # type: ignore[no-untyped-call]
            self.note_graph(tensor, key)
        settle_views(self.calls, self.values, self.note_of, self._views)

    # ---- operations --------------------------------------------------------------------------------------------------
    def before(self, operation: Operation) -> None:
        for tensor in operation.writes:
            note = self.notes.get(tensor)
            if note is None or note.foreign:
                self.undo.before_write(tensor)
                self.writes.note(tensor, self.step)

    def after(self, operation: Operation, results: list[Tensor]) -> None:
        if self.running is not None:
            self._after_in_event(self.running, operation, results)
        else:
            self._after_in_glue(operation, results)

    def _after_in_event(self, event: Running, operation: Operation, results: list[Tensor]) -> None:
        usage = self.usages[event.index]
        event.reads_values |= operation.name in VALUE_OPERATIONS
        given = {storage_key(tensor) for tensor in operation.tensors}
        for tensor in operation.reads:
            note = self.notes.get(tensor)
            if note is None or note.event == event.index:
                continue
            usage.roots |= note.roots
            if note.tainted or note.values or note.event is not None:
                self._read_in_event(event, tensor, note)
        for tensor in operation.writes:
            note = self.notes.get(tensor) or self.notes.put(tensor, Note(event=event.index, foreign=True))
            if note.event == event.index:
                continue
            self._note_write(note)
            usage.writes |= note.state
            if not note.tainted and not note.state:
                event.written.append(storage_key(tensor))
        for tensor in results:
            if self.notes.get(tensor) is None and storage_key(tensor) not in given:
                self.notes.put(tensor, Note(event=event.index, made=self.step))

    def _read_in_event(self, event: Running, tensor: Tensor, note: Note) -> None:
        if not self._is_known(tensor, note):
            return
        arguments = [t for t in event.arguments if storage_key(t) == storage_key(tensor) and self.key_of(t) is not None]
        for read in arguments or [tensor]:
            self.use(read)

    def _is_known(self, tensor: Tensor, note: Note) -> bool:
        """Whether what an event made and is read outside it can be followed to there; refused where it cannot."""
        if note.event is None or note.values or tensor in self._current:
            return True
        self.refuse(
            f"a tensor of shape {tuple(tensor.shape)} that event {note.event} made is read outside its block, and did "
            "not come out as an output, an attribute of a module, or through a hook (a list given to the block?); "
            + MADE_ONCE,
            after=self.event_steps[note.event],
        )
        return False

    def _after_in_glue(self, operation: Operation, results: list[Tensor]) -> None:
        context = self._context or GlueContext()
        roots: set[Root] = set()
        tainted = operation.random and bool(self.usages)
        for tensor in operation.reads:
            note = self.notes.get(tensor)
            roots |= note.roots if note is not None else set()
            if self.depends_on_events(tensor):
                tainted = True
                if storage_key(tensor) not in context.made:
                    context.read[storage_key(tensor)] = tensor
                if note is not None:
                    self._is_known(tensor, note)
        context.roots |= roots
        context.tainted |= tainted
        if tainted and self._context is None:
            for tensor in context.read.values():
                self.use(tensor)
            self.refuse(f"{operation.name} works on what an event made, inside a compiled function")
        if tainted and operation.shape_depends_on_values:
            self.refuse(f"the shape of what {operation.name} makes depends on values that an event made")
        for tensor in operation.writes:
            note = self.notes.get(tensor) or self.notes.put(tensor, Note(foreign=True))
            self._note_write(note)
            context.writes = True
            if tainted and not note.tainted and storage_key(tensor) not in context.made:
                context.written.add(storage_key(tensor))
            elif not tainted and note.state:
                context.state = True  # what it is made from has to be there, whether an event reads it or not
                needed = self.usages[-1].roots if self.usages else self.everywhere
                needed |= roots
                self.rewritten |= note.state
            elif not tainted:
                note.roots |= roots
            note.tainted |= tainted
            if self.usages:  # before the first event every stage comes here
                self.usages[-1].writes |= note.state
        given = set() if operation.is_fresh else {storage_key(tensor) for tensor in operation.tensors}
        for tensor in results:
            # A view of unknown memory (a table of the program's, a weight on the device) makes nothing.
            if self.notes.get(tensor) is None and storage_key(tensor) not in given:
                context.made.add(storage_key(tensor))
                made_from = frozenset() if tainted else frozenset(roots)
                self.notes.put(tensor, Note(tainted=tainted, roots=made_from, made=self.step))

    def _note_write(self, note: Note) -> None:
        note.writes.append(self.step)
        if any(self.values[key].everywhere for key in note.values):
            self.refuse("a tensor is written to after Python code has read it, which later stages would read then")

    # ---- glue --------------------------------------------------------------------------------------------------------
    def glue(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call and takes its number."""
        self.next_step()
        arguments = [*tensors_in((args, kwargs))]
        sources = [tensor for tensor in arguments if self.depends_on_events(tensor)]
        context = self._context = GlueContext()
        number = len(self.calls)
        self.calls.append(GlueCall(name))
        try:
            result = called(name, function, args, kwargs)
        finally:
            self._context = None
        if name == "__iter__":
            result = list(result)
        if context.writes:
            self.note_written_graphs()
        if name in GRADIENT_HOOKS:
            self._refuse_between(name, arguments)
        if sources or context.tainted:
            result = self._note_tainted(number, result, arguments, sources, context)
        elif name in VALUE_READS or name in VALUE_COPIES:
            self._note_everywhere(context.roots, arguments)
        elif not (context.writes or [*tensors_in(result)]):
            self._note_everywhere(context.roots, [])
        elif context.state and self.usages:
            self._note_state_written(number, result, arguments)
        return iter(result) if name == "__iter__" else result

    def _refuse_between(self, name: str, arguments: list[Tensor]) -> None:
        """No cut between what made a tensor and what asks for its gradient: each stage has its own part of that."""
        for tensor in arguments:
            key = self.key_of(tensor)
            self.refuse(
                f"{name} is called for the gradient of a tensor of shape {tuple(tensor.shape)}, of which each stage "
                "has a part: call it in the block that makes the tensor, or where no block is called between the two",
                after=self.values[key].made if key is not None else 0,
                until=self.step if key is not None else None,
            )

    def _note_state_written(self, number: int, result: Any, arguments: list[Tensor]) -> None:
        """Only the stage that has the state, and what it is made from, needs to make the call."""
        leaves, tree = tree_flatten(result)
        if all(_is_one_of(leaf, arguments) if isinstance(leaf, Tensor) else isinstance(leaf, PLAIN) for leaf in leaves):
            found = tuple(self._leaf(number, place, leaf, arguments) for place, leaf in enumerate(leaves))
            self.calls[number] = replace(self.calls[number], structure=Structure(found, tree))

    def _note_everywhere(self, roots: Iterable[Root], arguments: list[Tensor]) -> None:
        self.everywhere |= set(roots)
        for tensor in arguments:
            note = self.notes.get(tensor)
            self.everywhere |= note.roots if note is not None else set()

    def _note_tainted(
        self, number: int, result: Any, arguments: list[Tensor], sources: list[Tensor], context: GlueContext
    ) -> Any:
        name = self.calls[number].name
        leaves, tree = tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not _is_one_of(leaf, arguments)]
        returns_nothing = context.tainted and not context.writes and not any(isinstance(t, Tensor) for t in leaves)
        if returns_nothing or name in VALUE_READS or name in VALUE_COPIES:
            for tensor in sources:
                self.use(tensor, everywhere=True)
            self._note_everywhere(context.roots, arguments)
            self.calls[number] = replace(self.calls[number], reads_value=True)
            return result
        memory = {storage_key(tensor) for tensor in arguments}
        is_view = bool(made) and not context.writes and all(storage_key(tensor) in memory for tensor in made)
        if made and not is_view and not context.tainted:
            return result  # new zeros like something: every stage makes them
        if is_view:
            self._views.append((number, self.step))
        shared = {storage_key(tensor) for tensor in made} & memory
        for tensor in sources:
            if storage_key(tensor) in context.read or storage_key(tensor) in shared:
                self.use(tensor)
        for key in context.read.keys() - {storage_key(tensor) for tensor in sources}:
            self.use(context.read[key])
        self.usages[-1].roots |= context.roots
        written = self._note_written(Key("call", number, "argument"), arguments, context.written)
        found = [self._leaf(number, place, leaf, arguments) for place, leaf in enumerate(leaves)]
        self.calls[number] = GlueCall(name, Structure(tuple(found), tree), written)
        if context.tainted and any(isinstance(leaf, Constant) and not isinstance(leaf.value, PLAIN) for leaf in found):
            self.refuse(f"{name} returns an object that is no tensor, made from what an event made")
        return tree_unflatten(leaves, tree)

    def note_first_writes(self, event: Running) -> tuple[tuple[int, Key], ...]:
        """Memory that depends on events since the event which ends now has written to it."""
        found = self._note_written(Key("event", event.index, "argument"), event.arguments, set(event.written))
        known = {storage_key(event.arguments[position]) for position, _ in found}
        for memory in set(event.written) - known:
            note = self.notes.at(memory)
            if note is not None:
                note.event = event.index  # what is read there cannot be followed
        return found

    def _note_written(self, key: Key, arguments: list[Tensor], written: set[int]) -> tuple[tuple[int, Key], ...]:
        """Values for the whole memory of these arguments, of which there may be many views."""
        found: dict[int, tuple[int, Key]] = {}
        for position, argument in enumerate(arguments):
            memory = storage_key(argument)
            if memory in written and memory not in found:
                whole = whole_of(argument)
                if whole.untyped_storage().nbytes() != whole.nbytes:
                    self.refuse("a part of a tensor is written to, and the whole of it cannot be told")
                made = self.make_value(replace(key, place=f"{key.place} {position}"), whole)
                found[memory] = (position, made)
        return tuple(found.values())

    def _leaf(self, number: int, place: int, leaf: Any, arguments: list[Tensor]) -> Leaf:
        if not isinstance(leaf, Tensor):
            is_node = leaf is not None and self.calls[number].name == GRAPH_NODE
            return Constant(GraphElsewhere() if is_node else leaf)
        for i, argument in enumerate(arguments):
            if leaf is argument:
                return Argument(i)
        known = self.key_of(leaf)
        if known is not None and known.kind == "call" and known.index == number:
            return Made(known)
        return Made(self.make_value(Key("call", number, f"output {place}"), leaf))


def _is_one_of(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)
