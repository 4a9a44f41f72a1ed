"""Undoes the first stage's run of a microbatch that leaves the path of its rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hydra_ext.split.stages.run import OtherWay
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.split.state.carried import attribute_tensors
from hydra_ext.split.state.lasting import Lasting
from hydra_ext.state.arguments import named_tensors
from hydra_ext.state.memory import Places, Undo
from hydra_ext.state.randomness import RandomState
from hydra_ext.state.snapshot import Snapshot


@contextmanager
def undone_on_another_way(model: nn.Module, lasting: Lasting, microbatch: Any) -> Iterator[None]:
    """Restores what the body changed if it raises :class:`OtherWay`.

    This covers the contents of modules and of the microbatch, the named tensors that the rehearsal saw written, and the
    user's own generators.
    """
    held = Snapshot(model, microbatch)
    places = Places(held.tensors)
    undo = Undo()
    for tensor in _written(model, lasting, microbatch):
        undo.before_write(tensor)
    generators = RandomState(host=False, own=lasting.alive())
    try:
        yield
    except OtherWay:
        held.restore()
        places.restore()
        undo.restore()
        generators.restore()
        raise


def _written(model: nn.Module, lasting: Lasting, microbatch: Any) -> list[Tensor]:
    if not lasting.named:
        return []
    tensors = {("buffer", name): tensor for name, tensor in (*attribute_tensors(model), *model.named_buffers())}
    tensors |= {("input", name): tensor for name, tensor in named_tensors(microbatch)}
    return [tensors[root] for root in lasting.named if root in tensors and not is_absent(tensors[root])]
