"""Measures one microbatch, module by module, while it runs under a stash that keeps nothing on the device."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.calls import StandIn, calls_in_turn, same_modules
from hydra_ext.heads.unmade import Unmade
from hydra_ext.profile import Amount, ModuleFigures, Peaks, Profile
from hydra_ext.profile.call_log import amount
from hydra_ext.profile.figures import BlockFigures, Chain, Link, Storage
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.numbers import version_of
from hydra_ext.tracing import not_traced

_LEAST_BYTES = 1024  # a stash leaves smaller tensors where they are


@dataclass
class _Call:
    """A call of a module while it is measured.

    Attributes:
        order: Its number among all calls of modules.
        inputs: Bytes of its arguments: fresh ones, and all.
        given: Storages of its arguments.
        taken: Those of them that were saved before.
        written: Those of them that it writes to.
        inside: Calls directly inside it.
        last_save: When it saved its last tensor; None if it saved none.
        seconds: From its beginning to its end, and until then.
    """

    module: nn.Module
    order: int
    seconds: tuple[float, float | None] = field(default=(0.0, None), init=False)
    fresh: dict[Storage, int] = field(default_factory=dict, init=False)
    saved: dict[Storage, int] = field(default_factory=dict, init=False)
    inputs: tuple[int, int] = field(default=(0, 0), init=False)
    given: list[StorageWeakRef] = field(default_factory=list, init=False)
    taken: set[Storage] = field(default_factory=set, init=False)
    written: list[StorageWeakRef] = field(default_factory=list, init=False)
    parked: int = field(default=0, init=False)
    inside: list[_Call] = field(default_factory=list, init=False)
    last_save: Any = field(default=None, init=False)


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
        self._clock = _Clock(device, core.memory.backend.stalls)
        self._names = {module: name for name, module in model.named_modules()}
        self._storages = _Storages(model)
        self._calls: dict[nn.Module, list[_Call]] = {module: [] for module in self._names}
        self._model = model
        self._marks: list[tuple[_Call, Any, Any]] = []
        self._running: list[_Call] = []
        self._numbers = itertools.count(1)
        self._forward = _Forward()

    @property
    def has_run(self) -> bool:
        """Whether a whole forward was measured."""
        return self._forward.end is not None

    @property
    def has_saved(self) -> bool:
        """Whether anything was saved for backward."""
        return any(call.saved for call in self._calls[self._model])

    @property
    def runs(self) -> bool:
        """Whether a forward is under way."""
        return bool(self._running)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context for a forward of the model, in which calls and saved tensors are counted. There may be several."""
        this = self._forward
        if self.has_run:
            this.recorded += self._core.pager.recorded(_C.PassKind.FORWARD)
        this.thread = threading.get_ident()
        whole = self._noted(self._model)
        self._running.append(whole)
        # Not kept: they hold this object, and the calls that they stand in for hold the run.
        calls = [
            _MeasuredCall(self, module)
            for module, name in self._names.items()
            if name and not isinstance(module, torch.jit.ScriptModule)
        ]
        for call in calls:
            call.install()
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._running.clear()
            for call in calls:
                call.remove()
        this.end = self._clock.mark()
        self._marks.append((whole, begin, this.end))

    @not_traced
    def saves(self, tensor: Tensor) -> None:
        """Counts a tensor that is saved for backward, before the stash takes it."""
        if threading.get_ident() != self._forward.thread or not self._running:
            return
        now = self._clock.mark()
        for call in self._running:
            call.last_save = now
        with _unseen():
            if not self._storages.counts(tensor):
                return
            key, size, fresh = self._storages.save(tensor)
        for call in self._running:
            call.saved[key] = size
            if fresh:
                call.fresh[key] = size

    # ---- calls of modules -------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a module's call, and counts it."""
        if threading.get_ident() != self._forward.thread or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        call = self._noted(module)
        with _unseen():
            given = self._count_inputs(call, tensors_in((args, kwargs)))
        call.parked = self._activation_bytes()
        self._running.append(call)
        begin = self._clock.mark()
        try:
            return inner(*args, **kwargs)
        finally:
            self._marks.append((call, begin, self._clock.mark()))
            self._running.pop()
            with _unseen():
                call.written = [_weakly(tensor) for tensor, version in given if version_of(tensor) != version]

    def _noted(self, module: nn.Module) -> _Call:
        call = _Call(module, next(self._numbers))
        if self._running:
            self._running[-1].inside.append(call)
        self._calls[module].append(call)
        return call

    def _count_inputs(self, call: _Call, tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
        given = {id(tensor): tensor for tensor in tensors if not isinstance(tensor, Unmade) and _has_storage(tensor)}
        call.given += map(_weakly, {tensor.untyped_storage()._cdata: tensor for tensor in given.values()}.values())
        counted = [tensor for tensor in given.values() if self._storages.counts(tensor)]
        fresh, every = 0, 0
        for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in counted}.values():
            size, known = tensor.untyped_storage().nbytes(), self._storages.known(tensor)
            fresh += size if known is None else 0
            every += size
            call.taken |= set() if known is None else {known}
        call.inputs = fresh, every
        return [(tensor, version_of(tensor)) for tensor in given.values()]

    # ---- the result -------------------------------------------------------------------------------------------------

    def profile(self, blocks: Sequence[BlockFigures]) -> Profile:
        """The figures, with those of the model's blocks. Called when the microbatch's backward has ended."""
        end = self._clock.mark()
        self._clock.settle()
        for call, begin, mark in self._marks:
            saved = call.last_save
            again = None if saved is None else self._clock.seconds(begin, saved)
            call.seconds = self._clock.seconds(begin, mark), again
        forward = sum(call.seconds[0] for call in self._calls[self._model])
        backward = self._clock.seconds(self._forward.end, end)
        forwards = self._forward.recorded + self._core.pager.recorded(_C.PassKind.FORWARD)
        peaks = _Peaks(self._layout, forwards, self._core.pager.recorded(_C.PassKind.BACKWARD))
        order = sorted((calls[0].order, self._names[module]) for module, calls in self._calls.items() if calls)
        of_modules = peaks.of_modules([name for _, name in order])
        names = {*self._names.values()}
        return Profile(
            modules={
                self._names[module]: self._figures(module, calls, of_modules) for module, calls in self._calls.items()
            },
            blocks=tuple(blocks),
            sites={site.name: site.blocks for site in self._layout.sites if site.name in names},
            backward_ratio=max(0.5, backward / forward) if forward > 0 else 2.0,
            chains={
                self._names[module]: self._chain(calls[0], of_modules)
                for module, calls in self._calls.items()
                if _is_chain(calls)
            },
        )

    def _chain(self, call: _Call, peaks: dict[str, tuple[int, int]]) -> Chain:
        links = [
            Link(
                figures=replace(self._figures(each.module, [each], peaks), is_repeatable=not _has_hooks(each.module)),
                fresh=each.fresh,
                saved=each.saved,
                inputs=each.taken,
                intact_until=_intact_until(at, call.inside),
            )
            for at, each in enumerate(call.inside)
        ]
        return Chain(name=self._names[call.module], links=links)

    def _figures(self, module: nn.Module, calls: list[_Call], peaks: dict[str, tuple[int, int]]) -> ModuleFigures:
        name = self._names[module]
        forward_bytes, backward_bytes = peaks.get(name, (0, 0))
        is_leaf = next(module.children(), None) is None  # code around inner modules counts for these
        return ModuleFigures(
            name=name,
            order=calls[0].order if calls else 0,
            calls=len(calls),
            forward_seconds=sum(call.seconds[0] for call in calls),
            again_seconds=calls[0].seconds[1] if len(calls) == 1 else None,
            saved=amount((call.fresh for call in calls), (call.saved for call in calls)),
            inputs=Amount(fresh=sum(call.inputs[0] for call in calls), all=sum(call.inputs[1] for call in calls)),
            parked_bytes=max((call.parked for call in calls), default=0),
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            own=Peaks(forward_bytes=forward_bytes, backward_bytes=backward_bytes) if is_leaf else Peaks(),
            is_repeatable=len(calls) == 1 and not calls[0].written and not _has_hooks(module),
        )


def _is_chain(calls: list[_Call]) -> bool:
    """Whether they are one call, of a module that has called its children in turn."""
    if len(calls) != 1 or not calls_in_turn(calls[0].module):
        return False
    return same_modules([call.module for call in calls[0].inside], calls[0].module._modules.values())


def _intact_until(at: int, calls: list[_Call]) -> int:
    """The first of some calls, from one on, that writes to that one's arguments."""
    given = calls[at].given
    return next(
        (number for number in range(at, len(calls)) if any(each in given for each in calls[number].written)), len(calls)
    )


@dataclass
class _Forward:
    """The forwards that were measured.

    Attributes:
        thread: Which made the last one.
        end: When the last whole one ended; None before.
        recorded: Blocks, and the activations in use at each.
    """

    thread: int | None = None
    end: Any = None
    recorded: list[tuple[int, int]] = field(default_factory=list)


class _Storages:
    """The storages of saved tensors, without those of the model's own tensors."""

    def __init__(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        with _unseen():
            self._own = {tensor.untyped_storage()._cdata for tensor in own if _has_storage(tensor)}
        self._numbers = itertools.count()
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, Storage]] = {}

    def counts(self, tensor: Tensor) -> bool:
        """Whether a stash would take the tensor."""
        if isinstance(tensor, Unmade) or not _has_storage(tensor) or tensor.nbytes < _LEAST_BYTES or tensor.is_meta:
            return False
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        if (base.is_leaf and base.requires_grad) or _C.is_face(base):
            return False
        return tensor.untyped_storage()._cdata not in self._own

    def known(self, tensor: Tensor) -> Storage | None:
        """This storage, at this version, if it was saved. Its place may be another one's by now."""
        reference, storage = self._known.get(_key_of(tensor), (None, None))
        return None if reference is None or reference.expired() else storage  # type: ignore[no-untyped-call]

    def save(self, tensor: Tensor) -> tuple[Storage, int, bool]:
        """Returns the storage, its bytes, and whether it was fresh."""
        storage, size = self.known(tensor), tensor.untyped_storage().nbytes()
        if storage is not None:
            return storage, size, False
        made = next(self._numbers), version_of(tensor)
        self._known[_key_of(tensor)] = _weakly(tensor), made
        return made, size, True


def _unseen() -> AbstractContextManager[None]:
    """A context in which modes of the user see nothing of tensors."""
    made: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return made


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def _weakly(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _key_of(tensor: Tensor) -> tuple[int, int]:
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
    """Time that a device computes: of the thread on the CPU, which waits take none of.

    On a GPU it is that of the stream, without its stalls. Where the host is late it is the host's time.
    """

    def __init__(self, device: torch.device, stalls: _C.StallLog | None) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._stalls = stalls
        if stalls is not None:
            stalls.start()

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event, 0 if self._stalls is None else self._stalls.count

    def settle(self) -> None:
        """Waits until the marks have their times."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        if self._stalls is not None:
            self._stalls.stop()

    def seconds(self, begin: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(end - begin)
        (began, first), (ended, last) = begin, end
        stalled = 0.0 if self._stalls is None else self._stalls.seconds(first, last)
        return max(0.0, float(began.elapsed_time(ended)) / 1000 - stalled)
