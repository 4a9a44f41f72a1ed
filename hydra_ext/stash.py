"""``hydra_ext.stash``: what autograd saves for backward, away from the device until backward needs it."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.choice import Choice
from hydra_ext.activations.report import StashReport
from hydra_ext.activations.saving import Saving
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.policy import Offload, SimulatedDevice, parse_bytes
from hydra_ext.runtime.placement import devices
from hydra_ext.runtime.rounds import fibers


class stash:  # noqa: N801 - a verb: it is used as a function
    """What is saved for backward inside the context leaves the device, and comes back ahead of its use.

    Any model, wrapped or not: in place of :class:`torch.autograd.graph.save_on_cpu`. Gradients are bit for bit those of
    plain PyTorch, in-place writes to saved tensors raise as there. Transfers run beside forward and backward, each
    tensor once however often it is saved, the oldest first, and come back newest first. Parameters, their views, and
    tensors below 1 KiB stay. Only forwards have to be inside; backward may follow outside. One object may be entered
    again for each step, and should: it then uses its host memory again and knows what will fit. Several threads may
    be inside at once.

    Inside ``torch.compile`` and ``torch.func`` transforms nothing is seen by such hooks: compile blocks, not the whole.
    Tensors that a custom ``autograd.Function`` keeps without ``save_for_backward`` stay, too.

    Args:
        policy: :class:`hydra_ext.Offload`, :class:`hydra_ext.Compress` or :class:`hydra_ext.Keep` for everything; or
            for each module, by a mapping from names (patterns as of :mod:`fnmatch`, ``"layers.*"``) to policies, or by
            a function of a module's name and the module, that returns a policy or None. What is saved in no such module
            stays. :class:`hydra_ext.Recompute` can only be chosen so.
        budget: device bytes of saved tensors that may stay: an int, or a text such as ``"6GiB"``; the newest stay. What
            forward and backward themselves use at a moment comes on top. Without one as little as transfers need stays:
            twice the largest saved tensor.
        model: whose parameters and buffers are left alone, wherever views of them are saved; needed for policies by
            module, and for the names of layers in the report.
        optimizer: whose momentum :class:`hydra_ext.Compress` measures errors by, where it is adaptive.
        device: where tensors are saved: ``None`` takes CUDA if there is one, else a simulated device; or as
            :class:`hydra_ext.offload` takes it.

    Raises:
        InvalidArgument: a policy is none, or names no module.
        UnsupportedModel: a module's policy cannot be followed.
        InvalidBudget: the budget is no size.
        InvalidDevice: there is no such device, or this build cannot use it.
    """

    def __init__(
        self,
        policy: Choice = Offload(),  # noqa: B008 - frozen
        *,
        budget: int | str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: SimulatedDevice | devices.Place | torch.device | str | None = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise InvalidArgument(f"model is a {type(model).__name__}: give a torch.nn.Module")
        place = devices.choose(device)
        room = None if budget is None else parse_bytes(budget)
        core = _C.Stash(backend=place.make_backend(), arena=place.make_arena(), device=place.device, budget=room)
        self._saving = Saving(
            core,
            policy,
            model,
            whole=lambda _: fibers.current() is None,
            optimizer=optimizer,
            budget=room,
        )
        self._lock = threading.Lock()
        self._inside = 0
        self._threads = threading.local()
        # Graphs keep the core alive, but what it keeps for a next pass is not wanted then.
        weakref.finalize(self, core.close)

    def report(self) -> StashReport:
        """What was saved and moved so far, once the transfers under way have ended."""
        return self._saving.report()

    def __enter__(self) -> stash:
        with self._lock:
            if self._inside == 0:
                self._saving.hook()
            self._inside += 1
        inside = self._saving.inside()
        inside.__enter__()
        self._entered().append(inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered()
        if not entered:
            raise StateError("this stash was not entered on this thread")
        entered.pop().__exit__(kind, error, trace)
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._saving.unhook()

    def _entered(self) -> list[AbstractContextManager[None]]:
        if not hasattr(self._threads, "entered"):
            self._threads.entered = []
        entered: list[AbstractContextManager[None]] = self._threads.entered
        return entered
