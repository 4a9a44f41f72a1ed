"""The glue of a rehearsal: every call of a function of torch outside events, and the operations that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hydra_ext.split.metrics import tensors_inside, unsearched
from hydra_ext.split.rehearsal.glue_mode import called
from hydra_ext.split.rehearsal.notes import Note, Root
from hydra_ext.split.rehearsal.operations import GRADIENT_HOOKS, GRAPH_NODE, VALUE_COPIES, VALUE_READS, Operation
from hydra_ext.split.rehearsal.record import PLAIN, Argument, Constant, GlueCall, Key, Leaf, Made, Structure, View
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.rehearsal.usage import GlueContext
from hydra_ext.split.rehearsal.values import Values
from hydra_ext.split.stages.graph_nodes import GraphElsewhere
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import storage_key


class GlueRecorder:
    """Records the calls between events."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._notes = recorder.notes
        self._values = recorder.values
        self._cuts = recorder.cuts
        self._context: GlueContext | None = None
        self._views: list[tuple[int, int]] = []  # calls that return views, and their steps

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call and records it under the next number."""
        self._cuts.next_step()
        arguments = [*tensors_in((args, kwargs))]
        sources = [tensor for tensor in arguments if self._values.depends_on_events(tensor)]
        context = self._context = GlueContext()
        number = len(self._recorder.calls)
        self._recorder.calls.append(GlueCall(name))
        try:
            result = called(name, function, args, kwargs)
        finally:
            self._context = None
        if name == "__iter__":
            result = list(result)
        if context.writes:
            self._values.note_written_graphs()
        if name in GRADIENT_HOOKS:
            self._refuse_between(name, arguments)
        if sources or context.tainted:
            result = self._note_tainted(number, result, arguments, sources, context)
        elif name in VALUE_READS or name in VALUE_COPIES:
            self._note_everywhere(context.roots, arguments)
        elif not (context.writes or [*tensors_in(result)]):
            self._note_everywhere(context.roots, [])
        elif context.state and self._recorder.usages:
            self._note_state_written(number, result, arguments)
        return iter(result) if name == "__iter__" else result

    def _refuse_between(self, name: str, arguments: list[Tensor]) -> None:
        """Refuses cuts between the call that made a tensor and the call that asks for its gradient.

        Each stage would have only a part of that gradient.
        """
        for tensor in arguments:
            key = self._values.key_of(tensor)
            self._cuts.refuse(
                f"{name} is called for the gradient of a tensor of shape {tuple(tensor.shape)}, and each stage would "
                "have only a part of that gradient: call it in the block that makes the tensor, or before the next "
                "block",
                after=self._values.known[key].made if key is not None else 0,
                until=self._cuts.step if key is not None else None,
            )

    def _note_state_written(self, number: int, result: Any, arguments: list[Tensor]) -> None:
        """Notes the call's result, so that stages whose part begins later can skip the call: they lack the state."""
        leaves, tree = tree_flatten(result)
        if all(_is_one_of(leaf, arguments) if isinstance(leaf, Tensor) else isinstance(leaf, PLAIN) for leaf in leaves):
            found = tuple(self._leaf(number, place, leaf, arguments) for place, leaf in enumerate(leaves))
            self._recorder.calls[number] = replace(self._recorder.calls[number], structure=Structure(found, tree))

    def _note_everywhere(self, roots: Iterable[Root], arguments: list[Tensor]) -> None:
        self._recorder.everywhere.roots |= set(roots)
        for tensor in arguments:
            note = self._notes.get(tensor)
            self._recorder.everywhere.roots |= note.roots if note is not None else set()

    def _note_tainted(
        self, number: int, result: Any, arguments: list[Tensor], sources: list[Tensor], context: GlueContext
    ) -> Any:
        name = self._recorder.calls[number].name
        leaves, tree = tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not _is_one_of(leaf, arguments)]
        returns_nothing = context.tainted and not context.writes and not any(isinstance(t, Tensor) for t in leaves)
        if returns_nothing or name in VALUE_READS or name in VALUE_COPIES:
            for tensor in sources:
                self._values.use(tensor, everywhere=True)
            self._note_everywhere(context.roots, arguments)
            self._recorder.calls[number] = replace(self._recorder.calls[number], reads_value=True)
            return result
        memory = {storage_key(tensor) for tensor in arguments}
        is_view = bool(made) and not context.writes and all(storage_key(tensor) in memory for tensor in made)
        if made and not is_view and not context.tainted:
            return result  # like a value in shape only (zeros_like): every stage makes it
        if is_view:
            self._views.append((number, self._cuts.step))
        shared = {storage_key(tensor) for tensor in made} & memory
        for tensor in sources:
            if storage_key(tensor) in context.read or storage_key(tensor) in shared:
                self._values.use(tensor)
        for key in context.read.keys() - {storage_key(tensor) for tensor in sources}:
            self._values.use(context.read[key])
        self._recorder.usages[-1].roots |= context.roots
        written = self._values.make_written(Key("call", number, "argument"), arguments, context.written)
        found = [self._leaf(number, place, leaf, arguments) for place, leaf in enumerate(leaves)]
        self._recorder.calls[number] = GlueCall(name, Structure(tuple(found), tree), written)
        if context.tainted and any(isinstance(leaf, Constant) and not isinstance(leaf.value, PLAIN) for leaf in found):
            self._cuts.refuse(f"{name} returns an object other than a tensor, made from a result of a block")
        return tree_unflatten(leaves, tree)

    def after(self, operation: Operation, results: list[Tensor]) -> None:
        context = self._context or GlueContext()
        roots: set[Root] = set()
        tainted = operation.random and bool(self._recorder.usages)
        for tensor in operation.reads:
            note = self._notes.get(tensor)
            roots |= note.roots if note is not None else set()
            if self._values.depends_on_events(tensor):
                tainted = True
                if storage_key(tensor) not in context.made:
                    context.read[storage_key(tensor)] = tensor
                if note is not None:
                    self._recorder.is_known(tensor, note)
        context.roots |= roots
        context.tainted |= tainted
        if tainted and self._context is None:
            for tensor in context.read.values():
                self._values.use(tensor)
            self._cuts.refuse(f"{operation.name} reads a result of a block in a compiled function between blocks")
        if tainted and operation.shape_depends_on_values:
            self._cuts.refuse(f"the shape of the result of {operation.name} depends on numbers that a block computed")
        for tensor in operation.writes:
            note = self._notes.get(tensor) or self._notes.put(tensor, Note(foreign=True))
            self._recorder.note_write(note)
            context.writes = True
            if tainted and not note.tainted and storage_key(tensor) not in context.made:
                context.written.add(storage_key(tensor))
            elif not tainted and note.state:
                context.state = True  # its sources must be present, whether an event reads it or not
                needed = self._recorder.usages[-1].roots if self._recorder.usages else self._recorder.everywhere.roots
                needed |= roots
                self._recorder.everywhere.writes |= note.state
            elif not tainted:
                note.roots |= roots
            note.tainted |= tainted
            if self._recorder.usages:  # every stage runs the glue before the first event
                self._recorder.usages[-1].writes |= note.state
        given = set() if operation.is_fresh else {storage_key(tensor) for tensor in operation.tensors}
        for tensor in results:
            # A view of unknown memory (a table of the program's, a weight on the device) is no new memory.
            if self._notes.get(tensor) is None and storage_key(tensor) not in given:
                context.made.add(storage_key(tensor))
                made_from = frozenset() if tainted else frozenset(roots)
                self._notes.put(tensor, Note(tainted=tainted, roots=made_from, made=self._cuts.step))

    def finish(self, result: Any) -> None:
        """Records the end of the forward, in which ``fn`` returned ``result``."""
        self._cuts.step += 1
        strange = unsearched(result)
        if strange is not None:
            self._cuts.refuse(
                f"fn returns a {strange}, which may hide tensors: return tensors in tuples, lists or dicts", after=0
            )
        for tensor in tensors_inside(result):
            if self._values.depends_on_events(tensor):
                self._values.use(tensor)
            note = self._notes.get(tensor)
            if note is not None:
                self._recorder.is_known(tensor, note)
            if note is not None and self._recorder.usages:
                self._recorder.usages[-1].roots |= note.roots
        self._values.note_graphs()
        settle_views(self._recorder.calls, self._values, self._views)

    def _leaf(self, number: int, place: int, leaf: Any, arguments: list[Tensor]) -> Leaf:
        if not isinstance(leaf, Tensor):
            is_node = leaf is not None and self._recorder.calls[number].name == GRAPH_NODE
            return Constant(GraphElsewhere() if is_node else leaf)
        for i, argument in enumerate(arguments):
            if leaf is argument:
                return Argument(i)
        known = self._values.key_of(leaf)
        if known is not None and known.kind == "call" and known.index == number:
            return Made(known)
        return Made(self._values.make(Key("call", number, f"output {place}"), leaf))


def _is_one_of(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def settle_views(calls: list[GlueCall], found: Values, views: list[tuple[int, int]]) -> None:
    """Decides which views are values, and which are made again by every stage.

    If its memory is written to later, every stage makes the view itself, and a use of the view counts as a use of the
    memory's other values. This would be correct for all views. But the memory's gradients would be summed in another
    order than in the whole model, with other rounding. So every other view stays a value.

    Args:
        calls: Glue calls of the rehearsal; those that make such views are replaced.
        found: Values of the rehearsal; those of such views, and of their memory, are replaced.
        views: Numbers of the calls that return views, and their steps.
    """
    values, note_of = found.known, found.note_of
    settled = [
        number
        for number, step in views
        if any(written > step for key in _keys(calls[number]) for written in note_of[key].writes)
    ]
    gone = {key for number in settled for key in _keys(calls[number])}
    for key in gone:
        view = values[key]
        for other in note_of[key].values:
            if other not in gone and values[other].made < view.last_use:
                values[other] = replace(
                    values[other],
                    last_use=max(values[other].last_use, view.last_use),
                    everywhere=values[other].everywhere or view.everywhere,
                )
        values[key] = replace(view, last_use=view.made, everywhere=False)
    for number in settled:
        structure = calls[number].structure
        if structure is not None:
            leaves = tuple(
                View(values[leaf.key].shape, values[leaf.key].dtype) if isinstance(leaf, Made) else leaf
                for leaf in structure.leaves
            )
            calls[number] = replace(calls[number], structure=Structure(leaves, structure.tree), is_view=True)


def _keys(call: GlueCall) -> list[Key]:
    return [leaf.key for leaf in call.structure.leaves if isinstance(leaf, Made)] if call.structure else []
