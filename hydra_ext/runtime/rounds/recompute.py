"""Blocks whose activations are made again in backward instead of kept.

A site's call becomes a non-reentrant checkpoint of a call that can be made again. Not all that a module keeps can be
seen; so the calls of one microbatch are repeated once, before the first backward that relies on them, and sites that do
not give the same again keep their activations from then on. One that differs in a later backward raises there, before
its gradients are computed, and is kept from then on, too.

Only sites that hold no other site are recomputed, and not inside a user's checkpoint, or hooks on saved
tensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hydra_ext import _C
from hydra_ext.activations.recompute import CALLS_IN_FULL
from hydra_ext.activations.repeatable import Call, Deviation, RepeatableCall
from hydra_ext.activations.saving import goes_to_a_stash
from hydra_ext.blocks import Site
from hydra_ext.runtime.rounds.fibers import Fiber
from hydra_ext.state.randomness import RandomState
from hydra_ext.tracing import not_traced, nothing_traced

logger = logging.getLogger(__name__)

_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True)
class Repetition:
    """One call of a site, and what it takes to see whether a second one gives the same."""

    number: int
    site: Site
    call: RepeatableCall
    tensors: list[Tensor]
    context: _C.ThreadContext
    random: RandomState


class _SiteCall(RepeatableCall):
    """One whose site is kept from the moment that a repetition differs."""

    @nothing_traced
    def __init__(
        self, kept: set[int], number: int, site: Site, call: Call, args: Any, kwargs: Any, *, in_full: bool
    ) -> None:
        super().__init__(site.module, call, args, kwargs, in_full=in_full)
        self._kept = kept
        self._number = number
        self._name = site.name

    def deviation(self) -> Deviation:
        self._kept.add(self._number)
        return Deviation(
            f"{self._name}, which run.step recomputes, gives something else when it is called a second time: its "
            "forward changes, or reads, what is neither a buffer nor an attribute of its modules nor an argument. No "
            "wrong gradient was computed; from now on the block's activations are kept. To keep all of them, give "
            "recompute=False"
        )


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
        self._calls: Counter[int] = Counter()  # by site
        self.checked = False
        self.last_stay: int | None = None

    @not_traced
    def call(self, fiber: Fiber[Any], number: int, site: Site, call: Call, args: Any, kwargs: Any) -> Any:
        """``call(args, kwargs)``; with a graph, as a checkpoint."""
        at_the_end = len(fiber.marks) == self.last_stay
        if number in self._kept or at_the_end or not torch.is_grad_enabled() or _hooked_by_others():
            return call(args, kwargs)
        notes = not self.checked and fiber.index == 0
        in_full = notes or self._calls[number] < CALLS_IN_FULL
        self._calls[number] += 1
        repeatable = _SiteCall(self._kept, number, site, call, args, kwargs, in_full=in_full)
        context = _C.ThreadContext() if notes else None
        random = RandomState(self._device, host=False) if notes else None
        tensors = repeatable.tensors
        # The tensors say which devices' random states to keep, too.
        output = checkpoint(repeatable, *tensors, use_reentrant=False, early_stop=not in_full)
        if context is not None and random is not None:
            self._noted.append(Repetition(number, site, repeatable, tensors, context, random))
        return output

    def repeat(self, fiber: Fiber[bool]) -> bool:
        """Run in a fiber: repeats the calls that were noted. Returns whether all gave the same."""
        different: set[str] = set()
        for noted in self._noted:
            noted.context.enter()
            with fiber.inside(noted.number, noted.site), torch.enable_grad(), saved_tensors_hooks(_dropped, _dropped):
                noted.random.restore()
                try:
                    noted.call.again(noted.tensors)
                except Deviation:
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


def _dropped(_tensor: Any) -> Any:
    """What a repetition without a backward saves."""


def _hooked_by_others() -> bool:
    hooks = _saved_tensors_hooked(True)
    return hooks is not None and not goes_to_a_stash(hooks)
