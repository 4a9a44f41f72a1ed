"""Buffers that the forward replaces (``self.mean = ...``) instead of writing to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.split.rehearsal.recorder import Recorder


class ReplacedBuffers:
    """Records which part of the forward has replaced a buffer by another tensor.

    A tensor that an event has set, or that depends on one, counts as a write: only that event's stage has it. A tensor
    that glue computes alike on every stage is different: a stage that ends before this glue lacks it in the next
    microbatch.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder = recorder
        self._modules = dict(model.named_modules())
        self._before: dict[str, Tensor | None] = {}
        self._set: dict[str, int] = {}  # by glue that is alike on all stages: the last event before it

    def begin_glue(self) -> None:
        self._before = self._entries()

    def end_glue(self) -> None:
        """Called when the next event begins, or the forward has ended."""
        recorder = self._recorder
        if not recorder.usages:
            return  # every stage runs the glue before the first event
        for name, tensor in self._changed():
            if tensor is not None and recorder.values.depends_on_events(tensor):
                recorder.usages[-1].writes.add(("buffer", name))
                continue
            recorder.usages[-1].sets.add(("buffer", name))
            self._set[name] = len(recorder.usages) - 1
            note = recorder.notes.get(tensor) if tensor is not None else None
            if tensor is not None and (note is None or not note.foreign):
                self._becomes(name, tensor)

    @contextmanager
    def during_event(self) -> Iterator[list[tuple[str, Tensor | None]]]:
        """Around a block's forward, while its parameters are present. Yields the list for :meth:`after_event`."""
        found: list[tuple[str, Tensor | None]] = []
        self._before = self._entries()
        yield found
        found += self._changed()

    def after_event(self, found: list[tuple[str, Tensor | None]]) -> None:
        recorder = self._recorder
        for name, tensor in found:
            recorder.usages[-1].writes.add(("buffer", name))
            note = recorder.notes.get(tensor) if tensor is not None else None
            if tensor is not None and (note is None or not note.values):  # values are followed in any case
                self._becomes(name, tensor)

    def refuse_carried(self) -> None:
        """Refuses cuts between a reader of a buffer and later glue that sets the buffer for the next microbatch."""
        recorder = self._recorder
        for name, setter in self._set.items():
            readers = [-1] if ("buffer", name) in recorder.everywhere.roots else []
            readers += [reader for reader, usage in enumerate(recorder.usages) if ("buffer", name) in usage.roots]
            first = min(readers, default=setter)
            if first < setter:
                recorder.refuse(
                    f"buffer {name} is set for the next microbatch in code that not every stage that reads it runs",
                    after=recorder.event_steps[first] if first >= 0 else 0,
                    until=recorder.event_steps[setter],
                )

    def _becomes(self, name: str, tensor: Tensor) -> None:
        """From now on a read of the tensor counts as a read of the buffer."""
        notes = self._recorder.notes
        note = notes.get(tensor) or notes.put(tensor, Note())
        note.roots |= {("buffer", name)}
        note.foreign = True
        note.event = None

    def _entries(self) -> dict[str, Tensor | None]:
        return {
            f"{name}.{key}" if name else key: tensor
            for name, module in self._modules.items()
            for key, tensor in module._buffers.items()
        }

    def _changed(self) -> list[tuple[str, Tensor | None]]:
        before = self._before
        return [(name, tensor) for name, tensor in self._entries().items() if before.get(name) is not tensor]
