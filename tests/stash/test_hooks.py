"""The hooks that a stash gives to autograd: what they take, and what they hand over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext import _C

SMALL, LARGE = 4, 1024  # elements: below and above the bytes from which on tensors move
Saved: Any = _C.SavedTensor


def make() -> _C.Stash:
    return _C.Stash(
        backend=_C.SimulatedDevice(poison=False), arena=_C.HostArena(), device=torch.device("cpu"), budget=None
    )


def test_a_parameter_is_handed_over_as_itself() -> None:
    stash, parameter = make(), nn.Parameter(torch.ones(LARGE))
    assert stash.unpack(stash.pack(parameter)) is parameter


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_result_is_handed_over_without_its_graph(size: int) -> None:
    stash, x = make(), torch.ones(size, requires_grad=True)
    result = x * 2
    saved = stash.pack(result)
    found = stash.unpack(saved)
    assert (found.grad_fn, found.requires_grad, found._version) == (None, False, result._version)
    assert torch.equal(found, result)
    leaf = weakref.ref(x)
    del x, result
    gc.collect()
    assert leaf() is None, "the graph is alive"


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.clone])
def test_a_write_raises(size: int, kind: Callable[[Tensor], Tensor]) -> None:
    stash, tensor = make(), kind(torch.ones(size))
    saved = stash.pack(tensor)
    with torch.no_grad():
        tensor.add_(1)
    message = rf"modified by an inplace operation: \[torch.FloatTensor \[{size}\]\] is at version 1; expected version 0"
    with pytest.raises(RuntimeError, match=message):
        stash.unpack(saved)


def test_other_objects_are_refused() -> None:
    stash = make()
    with pytest.raises(TypeError, match="tensor is not a torch"):
        stash.pack(1)  # type: ignore[arg-type]
    for wrong in (None, torch.ones(LARGE)):
        with pytest.raises(TypeError, match="not a SavedTensor"):
            stash.unpack(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Saved()
    with pytest.raises(TypeError):
        _C.Stash.pack(1, torch.ones(LARGE))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="never constructed"):
        _C.Stash.__new__(_C.Stash).pack(torch.ones(LARGE))


def test_the_collector_need_not_look_at_saved_tensors() -> None:
    stash = make()
    saved = [stash.pack(torch.ones(LARGE)) for _ in range(8)]
    assert not any(gc.is_tracked(each) for each in saved)
    assert stash.statistics().intervals == 8
    saved.clear()
    assert stash.statistics().held_bytes == 0
