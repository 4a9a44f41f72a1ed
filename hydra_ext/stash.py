"""``hydra_ext.stash``: keeps the tensors that autograd saves off the device until backward needs them."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
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
    """Moves tensors that are saved for backward off the device, and brings them back ahead of their use.

    It works on any model, offloaded or not, in place of :class:`torch.autograd.graph.save_on_cpu`. Gradients are bit
    for bit those of plain PyTorch, and in-place writes to saved tensors raise as there. Transfers run beside forward
    and backward. Each tensor moves once however often it is saved: the oldest leaves first, the newest returns first.
    Parameters, their views, and tensors below 1 KiB stay.

    Only forwards have to be inside; backward may follow outside. Enter one object again for each step: it then reuses
    its host memory and knows which tensors will fit. Several threads may be inside at once.

    Hooks on saved tensors see nothing inside ``torch.compile`` and ``torch.func`` transforms: compile blocks, not the
    whole model. Tensors that a custom ``autograd.Function`` keeps without ``save_for_backward`` stay, too.

    Args:
        policy: :class:`hydra_ext.Offload`, :class:`hydra_ext.Compress` or :class:`hydra_ext.Keep` for everything; or a
            policy for each module. These are given as a mapping from names (:mod:`fnmatch` patterns such as
            ``"layers.*"``) to policies, or as a function of a module's name and the module that returns a policy or
            None. Tensors that are saved in no such module stay. :class:`hydra_ext.Recompute` has to be chosen by
            module.
        budget: Device bytes of saved tensors that may stay, an int or a text such as ``"6GiB"``; the newest stay.
            Memory that forward and backward themselves use comes on top. By default as little stays as transfers need:
            twice the largest saved tensor, or an eighth of what a step saves if that is more.
        model: Model whose parameters and buffers stay, wherever views of them are saved. Needed for policies by module
            and for the names of layers in the report.
        optimizer: Optimizer whose momentum an adaptive :class:`hydra_ext.Compress` measures errors by.
        device: Device whose tensors are saved, as :class:`hydra_ext.offload` takes it. ``None`` takes CUDA if there is
            one, otherwise a simulated device.

    Raises:
        InvalidArgument: A policy has the wrong type, or its name fits no module.
        UnsupportedModel: A module's policy cannot be followed.
        InvalidBudget: The budget is not a size.
        InvalidDevice: The device does not exist, or this build cannot use it.
    """

    def __init__(
        self,
        policy: Choice = Offload(),  # noqa: B008 - frozen
        *,
        budget: int | str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: SimulatedDevice | devices.PlaceMaker | devices.Place | torch.device | str | None = None,
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
            whole=lambda _: nullcontext() if fibers.current() is None else None,
            optimizer=optimizer,
            budget=room,
        )
        self._lock = threading.Lock()
        self._inside = 0
        self._threads = threading.local()
        # Graphs may keep the core alive for longer, but it need not keep host memory for a next pass.
        weakref.finalize(self, core.close)

    def report(self) -> StashReport:
        """Waits for the transfers under way, and reports what was saved and moved so far."""
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
