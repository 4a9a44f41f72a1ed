"""Blocks whose activations are recomputed in backward instead of kept.

A site's call becomes a non-reentrant checkpoint of a repeatable call. Not all state of a module is visible, so the
calls of one microbatch are repeated once, before the first backward that relies on them. Sites whose repetition
computes something else keep their activations from then on. A site that differs in a later backward raises an error
there, before its gradients are computed, and keeps its activations from then on as well.

Only sites that contain no other site are recomputed, and not inside a user's checkpoint or hooks on saved tensors.
Unless the user has asked, sites with forward hooks of the user are not: what such hooks do would happen twice.
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
from hydra_ext.activations.functional import goes_to_a_stash
from hydra_ext.activations.recompute import CALLS_IN_FULL
from hydra_ext.activations.repeatable import Call, Deviation, RepeatableCall
from hydra_ext.blocks import Site
from hydra_ext.calls import has_forward_hooks_of_user
from hydra_ext.runtime.rounds.fibers import Fiber
from hydra_ext.state.randomness import RandomState
from hydra_ext.tracing import not_traced, nothing_traced

logger = logging.getLogger(__name__)

_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True)
class Repetition:
    """One call of a site, with the state that a repetition needs for a comparison."""

    number: int
    site: Site
    call: RepeatableCall
    tensors: list[Tensor]
    context: _C.ThreadContext
    random: RandomState


class _SiteCall(RepeatableCall):
    """A repeatable call of a site. A repetition that differs adds the site to those whose activations are kept."""

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
            "forward changes or reads state that is neither a buffer nor an attribute of its modules nor an argument. "
            "No wrong gradient was computed; from now on the block's activations are kept. To keep all activations, "
            "give recompute=False"
        )


class Recomputation:
    """The recomputation of a run's sites: chooses the sites, makes their calls, and checks that calls can be repeated.

    Attributes:
        asked: Whether the user has asked for recomputation.
        checked: Whether the calls of one microbatch have been repeated and compared.
        last_stay: Number of a fiber's stay that is followed by its backward at once, so that recomputation there would
            save nothing; None if there is none.
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
        self.asked = False
        self.checked = False
        self.last_stay: int | None = None

    @not_traced
    def call(self, fiber: Fiber[Any], number: int, site: Site, call: Call, args: Any, kwargs: Any) -> Any:
        """Makes ``call(args, kwargs)``; as a checkpoint if it records a graph and its site is recomputed."""
        at_the_end = len(fiber.marks) == self.last_stay
        if number in self._kept or at_the_end or not torch.is_grad_enabled() or _hooked_by_others():
            return call(args, kwargs)
        if not self.asked and has_forward_hooks_of_user(site.module):  # a microbatch may register them at any time
            return call(args, kwargs)
        notes = not self.checked and fiber.index == 0
        in_full = notes or self._calls[number] < CALLS_IN_FULL
        self._calls[number] += 1
        repeatable = _SiteCall(self._kept, number, site, call, args, kwargs, in_full=in_full)
        context = _C.ThreadContext() if notes else None
        random = RandomState(self._device, host=False) if notes else None
        tensors = repeatable.tensors
        # From the tensors checkpoint() also derives the devices whose random states it keeps.
        output = checkpoint(repeatable, *tensors, use_reentrant=False, early_stop=not in_full)
        if context is not None and random is not None:
            self._noted.append(Repetition(number, site, repeatable, tensors, context, random))
        return output

    def repeat(self, fiber: Fiber[bool]) -> bool:
        """Repeats the noted calls, in a fiber. Returns whether all computed the same as before."""
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
                "run.step keeps the activations of %s: a second call computes something else", sorted(different)
            )
        return not different

    def forget(self) -> None:
        """Drops the noted calls of a forward that has failed."""
        self._noted.clear()


def _dropped(_tensor: Any) -> Any:
    """Drops a saved tensor, as a repetition has no backward."""


def _hooked_by_others() -> bool:
    hooks = _saved_tensors_hooked(True)
    return hooks is not None and not goes_to_a_stash(hooks)
