"""Moves of the model's arguments to a device with a budget, and back to the host. They are no steps of the forward.

Whether an argument is moved depends on where its memory was allocated, and that may differ from rank to rank. So a
rehearsal treats the moved tensor and its original as one value, and a stage moves no stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra_ext.runtime.arguments import bring_home, to_device
from hydra_ext.split.rehearsal.notes import Note
from hydra_ext.split.rehearsal.recorder import Recorder
from hydra_ext.split.stages.watch import StandInWatch
from hydra_ext.state.arguments import tensors_in

PLACING = (to_device, bring_home)


def placed_in_rehearsal(recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    recorder.placing = True
    try:
        result = function(*args)
    finally:
        recorder.placing = False
    if function is to_device:
        for host, moved in zip(tensors_in(args[0]), tensors_in(result), strict=True):
            if moved is not host:
                recorder.notes.put(moved, recorder.notes.get(host) or recorder.notes.put(host, Note(foreign=True)))
                key = recorder.values.key_of(host)
                if key is not None:
                    recorder.values.note_same(moved, key)
    return result


def placed_in_stage(watch: StandInWatch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    hosts = [*tensors_in(args[0])]
    if function is to_device:
        return args[0] if any(watch.what(host) for host in hosts) else function(*args)
    moved = [*tensors_in(args[1])]
    result = function(*args)
    for host, each in zip(hosts, moved, strict=True):
        if watch.what(each):  # a skipped call would have written to it
            watch.mark(host)
    return result
