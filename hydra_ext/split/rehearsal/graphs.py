"""Whether tensors have still the graph that they had when they became values.

What makes a graph round calls that have returned (a ``torch.autograd.Function`` whose forward is glue, a reentrant
checkpoint) puts another node on the tensor than the call has made. A stage that skips the call would put it on what
arrives, whose way back to the stage before would be lost then.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.state.memory import ByStorage


class Graphs:
    """The node of each tensor, which is not kept alive."""

    def __init__(self) -> None:
        self._nodes = WeakTensorKeyDictionary()

    def note(self, tensor: Tensor) -> None:
        """As it is now it is right."""
        self._nodes[tensor] = _node(tensor)

    def note_written(self, notes: ByStorage[Note], step: int) -> None:
        """What has been written to at this step has another graph in every stage that makes the call."""
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
    except RuntimeError:  # a view that torch refuses to follow since its base was written to; it cannot be used
        return None
    return None if node is None else node._sequence_nr()
