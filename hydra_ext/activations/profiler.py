"""Measures one microbatch, module by module, while it runs under a stash that keeps nothing on the device."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.calls import StandIn
from hydra_ext.profile import Amount, ModuleFigures, Peaks, Profile
from hydra_ext.profile.figures import BlockFigures
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.numbers import version_of
from hydra_ext.tracing import not_traced

_LEAST_BYTES = 1024  # a stash leaves smaller tensors where they are
_Key = tuple[int, int]  # of a storage, and its version


@dataclass
class _Measured:
    """A module's figures while they are counted."""

    order: int = 0
    calls: int = 0
    seconds: float = 0.0
    saved: list[int] = field(default_factory=lambda: [0, 0])  # fresh, all
    inputs: list[int] = field(default_factory=lambda: [0, 0])
    parked: int = 0
    writes: bool = False
    seen: set[tuple[int, int]] = field(default_factory=set)  # what it has saved


class Profiler:
    """Watches the modules' calls, and the tensors that they save, of one thread in one forward.

    Args:
        model: Model whose modules are measured.
        layout: Its blocks, and the modules that use them.
        core: Its pages.
        activation_bytes: Gives the bytes of activations on the device now.
        device: Device on which it computes.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        core: _C.PagedModel,
        activation_bytes: Callable[[], int],
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._core = core
        self._activation_bytes = activation_bytes
        self._clock = _Clock(device)
        self._names = {module: name for name, module in model.named_modules()}
        self._storages = _Storages(model)
        self._measured = {name: _Measured() for name in self._names.values()}
        self._marks: list[tuple[_Measured, Any, Any]] = []
        self._running: list[_Measured] = []
        self._calls = itertools.count(1)
        self._forward = _Forward()

    @property
    def has_run(self) -> bool:
        """Whether a whole forward was measured."""
        return self._forward.end is not None

    @property
    def failed(self) -> bool:
        """Whether the last forward has raised."""
        return self._forward.failed

    @property
    def runs(self) -> bool:
        """Whether a forward is under way."""
        return bool(self._running)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context for a forward of the model, in which calls and saved tensors are counted. There may be several."""
        this = self._forward
        this.thread = threading.get_ident()
        model = self._measured[""]
        model.calls += 1
        number = next(self._calls)
        model.order = model.order or number
        self._running.append(model)
        # Not kept: they hold this object, and the calls that they stand in for hold the run.
        calls = [
            _MeasuredCall(self, module)
            for module, name in self._names.items()
            if name and not isinstance(module, torch.jit.ScriptModule)
        ]
        for call in calls:
            call.install()
        begin = self._clock.mark()
        this.failed = True
        try:
            yield
            this.failed = False
        finally:
            self._running.clear()
            for call in calls:
                call.remove()
        this.end = self._clock.mark()
        self._marks.append((model, begin, this.end))
        this.recorded += self._core.pager.recorded(_C.PassKind.FORWARD)

    @not_traced
    def saves(self, tensor: Tensor) -> None:
        """Counts a tensor that is saved for backward, before the stash takes it."""
        if threading.get_ident() != self._forward.thread or not self._running:
            return
        with _unseen():
            if not self._storages.counts(tensor):
                return
            key, size, fresh = self._storages.save(tensor)
        for module in self._running:
            if fresh or key not in module.seen:
                module.seen.add(key)
                module.saved[0] += size if fresh else 0
                module.saved[1] += size

    # ---- calls of modules -------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a module's call, and counts it."""
        if threading.get_ident() != self._forward.thread or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        measured = self._measured[self._names[module]]
        measured.calls += 1
        number = next(self._calls)
        measured.order = measured.order or number
        with _unseen():
            given = self._count_inputs(measured, tensors_in((args, kwargs)))
        measured.parked = max(measured.parked, self._activation_bytes())
        self._running.append(measured)
        begin = self._clock.mark()
        try:
            return inner(*args, **kwargs)
        finally:
            self._marks.append((measured, begin, self._clock.mark()))
            self._running.pop()
            with _unseen():
                measured.writes |= any(version_of(tensor) != version for tensor, version in given)

    def _count_inputs(self, measured: _Measured, tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
        given = {id(tensor): tensor for tensor in tensors if self._storages.counts(tensor)}
        for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in given.values()}.values():
            size = tensor.untyped_storage().nbytes()
            measured.inputs[0] += size if self._storages.is_fresh(tensor) else 0
            measured.inputs[1] += size
        return [(tensor, version_of(tensor)) for tensor in given.values()]

    # ---- the result -------------------------------------------------------------------------------------------------

    def profile(self, blocks: Sequence[BlockFigures]) -> Profile:
        """The figures, with those of the model's blocks. Called when the microbatch's backward has ended."""
        end = self._clock.mark()
        self._clock.settle()
        for measured, begin, mark in self._marks:
            measured.seconds += self._clock.seconds(begin, mark)
        forward = self._measured[""].seconds
        backward = self._clock.seconds(self._forward.end, end)
        peaks = _Peaks(self._layout, self._forward.recorded, self._core.pager.recorded(_C.PassKind.BACKWARD))
        order = sorted((measured.order, name) for name, measured in self._measured.items() if measured.calls)
        of_modules = peaks.of_modules([name for _, name in order])
        return Profile(
            modules={name: self._figures(name, module, of_modules) for module, name in self._names.items()},
            blocks=tuple(blocks),
            sites={site.name: site.blocks for site in self._layout.sites if site.name in self._measured},
            backward_ratio=max(0.5, backward / forward) if forward > 0 else 2.0,
        )

    def _figures(self, name: str, module: nn.Module, peaks: dict[str, tuple[int, int]]) -> ModuleFigures:
        measured = self._measured[name]
        forward_bytes, backward_bytes = peaks.get(name, (0, 0))
        is_leaf = next(module.children(), None) is None  # code around inner modules counts for these
        return ModuleFigures(
            name=name,
            order=measured.order,
            calls=measured.calls,
            forward_seconds=measured.seconds,
            saved=Amount(fresh=measured.saved[0], all=measured.saved[1]),
            inputs=Amount(fresh=measured.inputs[0], all=measured.inputs[1]),
            parked_bytes=measured.parked,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            own=Peaks(forward_bytes=forward_bytes, backward_bytes=backward_bytes) if is_leaf else Peaks(),
            is_repeatable=measured.calls == 1 and not measured.writes and not _has_hooks(module),
        )


@dataclass
class _Forward:
    """The forwards that were measured.

    Attributes:
        thread: Which made the last one.
        failed: Whether that one has raised.
        end: When the last whole one ended; None before.
        recorded: Blocks, and the activations in use at each.
    """

    thread: int | None = None
    failed: bool = False
    end: Any = None
    recorded: list[tuple[int, int]] = field(default_factory=list)


class _Storages:
    """The storages of saved tensors, without those of the model's own tensors."""

    def __init__(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        with _unseen():
            self._own = {tensor.untyped_storage()._cdata for tensor in own if _has_storage(tensor)}
        self._known: dict[_Key, StorageWeakRef] = {}

    def counts(self, tensor: Tensor) -> bool:
        """Whether a stash would take the tensor."""
        if not _has_storage(tensor) or tensor.nbytes < _LEAST_BYTES or tensor.is_meta:
            return False
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if (base.is_leaf and base.requires_grad) or _C.is_face(base):
            return False
        return tensor.untyped_storage()._cdata not in self._own

    def is_fresh(self, tensor: Tensor) -> bool:
        """Whether this storage, at this version, has not been saved yet. Its place may be another one's by now."""
        known = self._known.get(_key_of(tensor))
        return known is None or bool(known.expired())  # type: ignore[no-untyped-call]

    def save(self, tensor: Tensor) -> tuple[_Key, int, bool]:
        """Returns the storage's key and bytes, and whether it was fresh."""
        key, size, fresh = _key_of(tensor), tensor.untyped_storage().nbytes(), self.is_fresh(tensor)
        if fresh:
            self._known[key] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return key, size, fresh


def _unseen() -> AbstractContextManager[None]:
    """A context in which modes of the user see nothing of tensors."""
    made: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return made


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def _key_of(tensor: Tensor) -> _Key:
    return tensor.untyped_storage()._cdata, version_of(tensor)


class _Peaks:
    """The most activations in use in each module, from those in use at each block.

    What runs before a block is announced counts for the block before it, and in backward for the block after it.
    """

    def __init__(self, layout: Layout, forward: list[tuple[int, int]], backward: list[tuple[int, int]]) -> None:
        self._sites = {site.name: site.blocks for site in layout.sites}
        self._forward = _largest(forward)
        self._backward = _largest(backward)

    def of_modules(self, called: list[str]) -> dict[str, tuple[int, int]]:
        """By module; ``called``: their names in the order of their first calls."""
        found: dict[str, list[int]] = {}
        last = max(self._forward.values(), default=0)
        for name in called:
            own = self._own(name, self._forward)
            found[name] = [last if own is None else own, 0]
            last = found[name][0] if name in self._sites else last
        last = max(self._backward.values(), default=0)
        for name in reversed(called):
            own = self._own(name, self._backward)
            found[name][1] = last if own is None else own
            last = found[name][1] if name in self._sites else last
        return {name: (forward, backward) for name, (forward, backward) in found.items()}

    def _own(self, name: str, peaks: dict[int, int]) -> int | None:
        prefix = f"{name}." if name else ""
        used = {b for site, blocks in self._sites.items() if site == name or site.startswith(prefix) for b in blocks}
        return max((peaks[block] for block in used if block in peaks), default=None)


def _largest(recorded: list[tuple[int, int]]) -> dict[int, int]:
    largest: dict[int, int] = {}
    for block, size in recorded:
        largest[block] = max(size, largest.get(block, 0))
    return largest


def _has_hooks(module: nn.Module) -> bool:
    return any(
        inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
        for inner in module.modules()
    )


class _MeasuredCall(StandIn):
    """Stands in for a module's call while it is measured."""

    def __init__(self, profiler: Profiler, module: nn.Module) -> None:
        super().__init__(module)
        self._profiler = profiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        return self._measured(args, kwargs)

    @not_traced
    def _measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._profiler.call(self.module, self.inner, args, kwargs)


class _Clock:
    """Time that a device computes: of the thread on the CPU, which waits take none of, or of the stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Waits until the marks have their times."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self._on_gpu else float(end - begin)
