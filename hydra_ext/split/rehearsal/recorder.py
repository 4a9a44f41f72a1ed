"""The notes of a rehearsal: which values each operation, glue call and event uses.

Inside an event only operations are seen. Outside, every call of a function of torch is a numbered *glue call*; the
operations that it consists of show what it reads and writes.
"""

from __future__ import annotations

from torch import Tensor

from hydra_ext.split.rehearsal.notes import Note, Root
from hydra_ext.split.rehearsal.operations import Operation
from hydra_ext.split.rehearsal.record import GlueCall
from hydra_ext.split.rehearsal.usage import MADE_ONCE, Cuts, Running, Usage
from hydra_ext.split.rehearsal.values import Values
from hydra_ext.split.state.generators import DrawnGenerators
from hydra_ext.split.state.lasting import Writes
from hydra_ext.state.memory import ByStorage, Undo


class Recorder:
    """The notes that the recorders of events and of glue share.

    Attributes:
        usages: Usage of each event, with the glue after it.
        everywhere: Usage of every stage. Its ``writes`` are made in glue, with numbers that depend on no event.
        event_steps: Steps at which the events begin.
        running: Event that runs now; None in glue.
        placing: Whether an argument of the model's call is being moved to the device or to the host. Operations are
            not noted meanwhile.
    """

    def __init__(self) -> None:
        self.notes: ByStorage[Note] = ByStorage()
        self.cuts = Cuts()
        self.values = Values(self.notes, self.cuts)
        self.calls: list[GlueCall] = []
        self.usages: list[Usage] = []
        self.everywhere = Usage()
        self.event_steps: list[int] = []
        self.undo = Undo()
        self.writes = Writes()
        self.drawn = DrawnGenerators()
        self.running: Running | None = None
        self.placing = False

    def note_root(self, tensor: Tensor, root: Root) -> None:
        """Notes a tensor that exists before the forward, and its name."""
        note = self.notes.get(tensor) or self.notes.put(tensor, Note(foreign=True))
        note.roots |= {root}
        self.writes.name(tensor, root)

    def stands_for(self, absent: Tensor, present: Tensor) -> None:
        """From now on a read of ``present`` counts as a read of ``absent``."""
        note = self.notes.get(absent)
        self.notes.put(present, Note(roots=note.roots if note is not None else frozenset(), foreign=True))

    def refuse(self, reason: str, *, after: int | None = None, until: int | None = None) -> None:
        """See :meth:`Cuts.refuse`."""
        self.cuts.refuse(reason, after=after, until=until)

    # ---- operations --------------------------------------------------------------------------------------------------
    def before(self, operation: Operation) -> None:
        for tensor in operation.writes:
            note = self.notes.get(tensor)
            if note is None or note.foreign:
                self.undo.before_write(tensor)
                self.writes.note(tensor, self.cuts.step)

    def note_write(self, note: Note) -> None:
        note.writes.append(self.cuts.step)
        if any(self.values.known[key].everywhere for key in note.values):
            self.refuse("a tensor is written to after Python code has read it: later stages would read the new numbers")

    def is_known(self, tensor: Tensor, note: Note) -> bool:
        """Whether the recorder knows how the tensor left the event that made it; otherwise later cuts are refused.

        Called for a tensor that is read outside its event.
        """
        if note.event is None or note.values or self.values.is_value(tensor):
            return True
        self.refuse(
            f"a tensor of shape {tuple(tensor.shape)} that event {note.event} made is read outside its block, but did "
            "not leave it as an output, as an attribute of a module, or through a hook (a list given to the block?); "
            + MADE_ONCE,
            after=self.event_steps[note.event],
        )
        return False
