"""The values of a rehearsal: tensors that an event or a glue call has made, and when they are read.

A ``torch.autograd.Function`` whose forward is glue, and a reentrant checkpoint, build their graph around calls that
have already returned. They replace the graph node that the call gave to its tensor. A stage that skips the call would
replace the node of the arrived tensor, and its gradient would no longer reach the stage before. So the nodes are noted,
too.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hydra_ext.errors import SplitError
from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.split.rehearsal.record import Key, Value
from hydra_ext.split.rehearsal.usage import Cuts
from hydra_ext.split.stages.tensors import whole_of
from hydra_ext.state.memory import ByStorage, storage_key


class Values:
    """
    Args:
        notes: Notes about the tensors' memory.
        cuts: Gets a refusal for each value that cannot be determined.

    Attributes:
        known: All values, by key.
        note_of: Note about the memory that each value lies in.
    """

    def __init__(self, notes: ByStorage[Note], cuts: Cuts) -> None:
        self.known: dict[Key, Value] = {}
        self.note_of: dict[Key, Note] = {}
        self._notes = notes
        self._cuts = cuts
        self._current = WeakTensorKeyDictionary()  # the key of each tensor object's value
        self._graphs = _Graphs()

    def key_of(self, tensor: Tensor) -> Key | None:
        key: Key | None = self._current.get(tensor)  # type: ignore[no-untyped-call]
        return key

    def is_value(self, tensor: Tensor) -> bool:
        return tensor in self._current

    def depends_on_events(self, tensor: Tensor) -> bool:
        note = self._notes.get(tensor)
        return tensor in self._current or (note is not None and (note.tainted or note.event is not None))

    def make(self, key: Key, tensor: Tensor) -> Key:
        if tensor.is_nested:
            raise SplitError(
                f"{key} is a nested tensor, which cannot cross between stages: build nn.TransformerEncoder with "
                "enable_nested_tensor=False, or keep nested tensors inside a block"
            )
        note = self._notes.get(tensor) or self._notes.put(tensor, Note(foreign=True))
        self.known[key] = Value(
            key, self._cuts.step, self._cuts.step, False, tensor.shape, tensor.dtype, tensor.requires_grad
        )
        self.note_of[key] = note
        note.values.append(key)
        note.tainted = True
        self.note_same(tensor, key)
        return key

    def make_written(self, key: Key, arguments: list[Tensor], written: set[int]) -> tuple[tuple[int, Key], ...]:
        """Makes a value for each written memory among the arguments, as a whole: views of it may be in use."""
        found: dict[int, tuple[int, Key]] = {}
        for position, argument in enumerate(arguments):
            memory = storage_key(argument)
            if memory in written and memory not in found:
                whole = whole_of(argument)
                if whole.untyped_storage().nbytes() != whole.nbytes:
                    self._cuts.refuse("a part of a tensor is written to, and the whole tensor cannot be determined")
                made = self.make(replace(key, place=f"{key.place} {position}"), whole)
                found[memory] = (position, made)
        return tuple(found.values())

    def note_same(self, tensor: Tensor, key: Key) -> None:
        """Notes that this tensor object, too, is the value ``key``."""
        self._current[tensor] = key
        if not key.is_inner:
            self._graphs.note(tensor)

    def use(self, tensor: Tensor, *, everywhere: bool = False) -> None:
        """Notes a read of the tensor: of its own value, or else of all values that lie in its memory."""
        key = self.key_of(tensor)
        note = self._notes.get(tensor)
        keys = [key] if key is not None else list(note.values) if note is not None else []
        keys = [key for key in keys if self.known[key].made < self._cuts.step]
        if not keys and note is not None and note.tainted and note.event is None:
            self._cuts.refuse(
                "a tensor is read that depends on a block in a way that cannot be followed", after=note.made
            )
        for used in keys:
            value = self.known[used]
            self.known[used] = replace(value, last_use=self._cuts.step, everywhere=value.everywhere or everywhere)
        if key is not None:
            self.note_graph(tensor, key)

    def note_graph(self, tensor: Tensor, key: Key) -> None:
        """Notes whether the tensor requires a gradient now, or has another graph than when it was made."""
        value = self.known[key]
        note = self._notes.get(tensor)
        written = note is not None and note.writes[-1:] == [self._cuts.step]  # then its new node is the right one
        attached = value.attached_later or (not written and self._graphs.is_other(tensor))
        if tensor.requires_grad and (attached, True) != (value.attached_later, value.requires_grad):
            self.known[key] = replace(value, requires_grad=True, attached_later=attached)

    def note_graphs(self) -> None:
        """At the end of the forward: :meth:`note_graph` for every tensor that is alive."""
        for tensor, key in list(self._current.items()):  # type: ignore[no-untyped-call]
            self.note_graph(tensor, key)

    def note_written_graphs(self) -> None:
        """At the end of a call that may have written to tensors: their new nodes are the right ones."""
        self._graphs.note_written(self._notes, self._cuts.step)


class _Graphs:
    """The number of each tensor's graph node. Neither tensor nor node is kept alive."""

    def __init__(self) -> None:
        self._nodes = WeakTensorKeyDictionary()

    def note(self, tensor: Tensor) -> None:
        """Notes the tensor's current node as the right one."""
        self._nodes[tensor] = _node(tensor)

    def note_written(self, notes: ByStorage[Note], step: int) -> None:
        """Tensors written to at this step have a new node on every stage that makes the call; it is the right one."""
        for tensor in list(self._nodes.keys()):  # type: ignore[no-untyped-call]
            note = notes.get(tensor)
            if note is not None and note.writes[-1:] == [step]:
                self.note(tensor)

    def is_other(self, tensor: Tensor) -> bool:
        node = _node(tensor)
        return node is not None and node != self._nodes.get(tensor, node)  # type: ignore[no-untyped-call]


def _node(tensor: Tensor) -> int | None:
    if not tensor.requires_grad:
        return None
    try:
        node = tensor.grad_fn
    except RuntimeError:  # torch has invalidated this view, since its base was written to; it cannot be used
        return None
    return None if node is None else node._sequence_nr()
