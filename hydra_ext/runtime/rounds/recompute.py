"""Blocks whose activations are made again in backward instead of kept.

A site's call becomes a non-reentrant checkpoint. What the first call changed is as it was when the second runs: the
module's buffers, and the containers among the arguments (caches that a block appends to). What a module keeps elsewhere
cannot be known; so the calls of one microbatch are repeated once, before the first backward that relies on them, and
sites that do not give the same again keep their activations from then on.

Only sites that hold no other site are recomputed, and not inside a user's checkpoint or hooks of his on saved tensors.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hydra_ext import _C
from hydra_ext.activations.saving import goes_to_a_stash
from hydra_ext.blocks import Site
from hydra_ext.runtime.rounds.buffers import BlockBuffers
from hydra_ext.runtime.rounds.fibers import Fiber
from hydra_ext.runtime.rounds.isolation import generators
from hydra_ext.runtime.sites import tensors_in
from hydra_ext.runtime.tracing import not_traced

logger = logging.getLogger(__name__)

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Fingerprint = list[tuple[torch.Size, torch.dtype, int]]
_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Repetition:
    """One call of a site, and what it takes to see whether a second one gives the same."""

    number: int
    site: Site
    call: RepeatableCall
    context: _C.ThreadContext
    random: list[Tensor]
    result: Fingerprint


class Recomputation:
    """Which sites of a run are recomputed.

    Attributes:
        checked: whether every site has been seen to give the same again.
        last_stay: the number of a fiber's stay that backward follows at once, so that nothing is recomputed there.
    """

    def __init__(self, sites: Sequence[Site], device: torch.device) -> None:
        modules = {site.module for site in sites}
        self._kept = {
            number
            for number, site in enumerate(sites)
            if any(inner in modules for inner in site.module.modules() if inner is not site.module)
        }
        self._device = device
        self._noted: list[Repetition] = []
        self.checked = False
        self.last_stay: int | None = None

    @not_traced
    def call(self, fiber: Fiber[Any], number: int, site: Site, call: Call, args: Any, kwargs: Any) -> Any:
        """``call(args, kwargs)``; with a graph, as a checkpoint."""
        at_the_end = len(fiber.marks) == self.last_stay
        if number in self._kept or at_the_end or not torch.is_grad_enabled() or _hooked_by_others():
            return call(args, kwargs)
        repeatable = RepeatableCall(site.module, call, args, kwargs)
        notes = not self.checked and fiber.index == 0
        context = _C.ThreadContext() if notes else None
        random = _C.random_states(generators(self._device)) if notes else []
        # The tensors say which devices' random states to keep.
        output = checkpoint(repeatable, *tensors_in((args, kwargs)), use_reentrant=False)
        if context is not None:
            self._noted.append(Repetition(number, site, repeatable, context, random, fingerprint(output)))
        return output

    def repeat(self, fiber: Fiber[bool]) -> bool:
        """Run in a fiber: repeats the calls that were noted. Returns whether all gave the same."""
        different: set[str] = set()
        for noted in self._noted:
            noted.context.enter()
            with fiber.inside(noted.number, noted.site), torch.no_grad():
                for generator, state in zip(generators(self._device), noted.random, strict=True):
                    generator.set_state(state)
                if fingerprint(noted.call.again()) != noted.result:
                    self._kept.add(noted.number)
                    different.add(noted.site.name)
        self.checked = True
        self._noted.clear()
        if different:
            logger.warning(
                "run.step keeps the activations of %s: calling them again gives something else", sorted(different)
            )
        return not different

    def forget(self) -> None:
        """The forward was not finished."""
        self._noted.clear()


class RepeatableCall:
    """A call that can be made again as it was made first."""

    def __init__(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._call = call
        self._arguments = containers_copied((args, kwargs))
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._buffers: BlockBuffers | None = None

    @not_traced
    def __call__(self, *_tensors: Tensor) -> Any:
        if self._first is None:
            return self.again()
        (args, kwargs), self._first = self._first, None
        self._buffers = BlockBuffers(self._module)
        output = self._call(args, kwargs)
        self._buffers.drop_unchanged()
        return output

    @not_traced
    def again(self) -> Any:
        args, kwargs = containers_copied(self._arguments)
        with self._buffers.in_place() if self._buffers is not None else nullcontext():
            return self._call(args, kwargs)


def fingerprint(output: Any) -> Fingerprint:
    """Of every tensor in a site's output: its shape, and the sum of its bits."""
    found: Fingerprint = []
    for tensor in tensors_in(output):
        value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = value.detach().contiguous().view(_INTEGERS[value.itemsize])
        found.append((tensor.shape, tensor.dtype, int(bits.sum(dtype=torch.int64))))
    return found


@not_traced
def containers_copied(value: Any) -> Any:
    """The value with its containers copied, however deep; tensors, modules and torch's own objects are shared."""
    return _copy(value, {})


def _copy(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    if _is_shared(value):
        return value
    if id(value) in known:
        return known[id(value)][0]
    if isinstance(value, tuple):
        parts = [_copy(part, known) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    made = copy.copy(value)
    known[id(value)] = (made, value)  # the original is held so that no other object takes its identity
    if isinstance(value, list):
        made[:] = [_copy(part, known) for part in value]
    elif isinstance(value, dict):
        for key in value:
            dict.__setitem__(made, key, _copy(value[key], known))
    if hasattr(value, "__dict__"):
        for key, part in value.__dict__.items():
            made.__dict__[key] = _copy(part, known)
    return made


def _hooked_by_others() -> bool:
    hooks = _saved_tensors_hooked(True)
    return hooks is not None and not goes_to_a_stash(hooks)


def _is_shared(value: Any) -> bool:
    if isinstance(value, (list, dict, set, tuple)):
        return False
    return (
        not hasattr(value, "__dict__")
        or callable(value)
        or isinstance(value, (type, ModuleType))
        or type(value).__module__.partition(".")[0] == "torch"
    )
