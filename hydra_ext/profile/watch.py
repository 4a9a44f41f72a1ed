"""What happens in one microbatch: calls of modules, what they save and take, and every operator with its bytes.

Forward is followed by the calls of modules. Backward is followed by the sequence numbers of autograd's nodes: a node
belongs to the innermost call in which it was made.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.calls import StandIn
from hydra_ext.profile.figures import Amount
from hydra_ext.profile.timeline import Part, Timeline
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.numbers import version_of
from hydra_ext.tracing import not_traced

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr

SMALLEST = 1024  # bytes of a tensor that is counted among those saved, or among inputs

Saved = tuple[int, int]  # number of a storage, and the version of its numbers
Place = tuple[int, torch.Size, tuple[int, ...]]  # offset, size and strides
TensorOn = Callable[[Any, torch.dtype, Place], Tensor]
RunOperator = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
OperatorSeconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: Its number in the model; 0 for the microbatch as a whole.
        parent: Number of the call around it.
        first_node: Sequence number of the first node of autograd that it may have made.
        next_node: Sequence number of the first node after it.
        writes: Whether it writes to one of its inputs.
        saved: Bytes by storage and version.
        fresh: Those that no call before it has saved.
        inputs: As saved.
        seconds: Of its operators, forward and backward, with the calls inside.
    """

    module: int
    parent: int
    first_node: int
    next_node: int = -1
    writes: bool = False
    saved: dict[Saved, int] = field(default_factory=dict)
    fresh: dict[Saved, int] = field(default_factory=dict)
    inputs: dict[Saved, int] = field(default_factory=dict)
    fresh_inputs: dict[Saved, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])


class Storages:
    """Numbers storages that are alive. A storage that dies is told to the timeline."""

    def __init__(self, died: Callable[[int, int], None]) -> None:
        self._died = died
        self._numbers: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def number_of(self, storage: Any) -> int | None:
        return self._numbers.get(storage._cdata)

    def add(self, storage: Any) -> int:
        key, size = storage._cdata, storage.nbytes()
        self._count += 1
        number = self._numbers[key] = self._count

        def gone(_: Any) -> None:
            del self._numbers[key], self._watched[key]
            self._died(number, size)

        self._watched[key] = weakref.ref(storage, gone)
        return number


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one microbatch, on the thread that enters it.

    Args:
        model: The model.
        seconds: The time of an operator, from its function, its arguments and its result.
        run: Runs an operator.
        tensor_on: Makes a tensor on a storage, from its dtype and its place.
    """

    def __init__(self, model: nn.Module, seconds: OperatorSeconds, *, run: RunOperator, tensor_on: TensorOn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._tensor_on = tensor_on
        self._modules = list(model.modules())
        self._seconds = seconds
        self.timeline = Timeline()
        self._storages = Storages(lambda number, size: self.timeline.add(self._part, number, -size))
        self._outside: set[int] = set()
        self._known: set[Saved] = set()
        self._back: dict[int, weakref.ref[Any]] = {}  # by the number of the storage that was saved
        self._sleeps = False
        self.calls = [Call(module=0, parent=-1, first_node=_next_node())]
        self._open = [0]
        self._part = Part(0)
        self.gradients: set[int] = set()
        self.largest_saved = 0

    # ---- storages ---------------------------------------------------------------------------------------------------
    def exempt(self, tensors: Iterable[Tensor]) -> None:
        """Parameters and buffers are counted neither as activations nor as saved."""
        self._outside.update(tensor.untyped_storage()._cdata for tensor in tensors if _has_storage(tensor))

    def born(self, value: Any) -> None:
        """Storages in a value are alive from now on, if they were not before."""
        for tensor in tensors_in(value):
            if _has_storage(tensor) and tensor.untyped_storage()._cdata not in self._outside:
                self._number(tensor.untyped_storage())

    def _number(self, storage: Any) -> int:
        number = self._storages.number_of(storage)
        if number is None:
            number = self._storages.add(storage)
            self.timeline.add(self._part, number, storage.nbytes())
        return number

    # ---- operators --------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        if not self._sleeps:
            self._follow_backward()
            self.born(out)
            self.timeline.add(self._part, 0, 0)
            seconds = self._seconds(func, args, kwargs, out)
            self.calls[self._part.call].seconds[self._part.is_backward] += seconds
        return out

    def _follow_backward(self) -> None:
        if not self._part.is_backward:
            return
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() >= self.calls[0].next_node:  # sums of gradients, and their last places
            return
        self._part = Part(self._call_of(node._sequence_nr()), is_backward=True)

    def _call_of(self, node: int) -> int:
        call = bisect.bisect_right(self._first_nodes, node) - 1
        while call > 0 and self.calls[call].next_node <= node:
            call = self.calls[call].parent
        return max(call, 0)

    # ---- calls ------------------------------------------------------------------------------------------------------
    @contextmanager
    def watched_calls(self) -> Iterator[None]:
        """Calls of the model's modules are noted."""
        stand_ins = [_WatchedCall(module, self, number) for number, module in enumerate(self._modules)]
        try:
            for each in stand_ins:
                each.install()
            yield
        finally:
            for each in reversed(stand_ins):
                each.remove()

    def begin_call(self, module: int, arguments: Any) -> tuple[int, list[tuple[Tensor, int]]]:
        call = Call(module=module, parent=self._open[-1], first_node=_next_node())
        number = len(self.calls)
        self.calls.append(call)
        self.timeline.begin(number)
        tensors = list(tensors_in(arguments))
        for tensor in tensors:
            key = self._key(tensor)
            if key is not None:
                size = tensor.untyped_storage().nbytes()
                call.inputs[key] = size
                if key not in self._known:
                    call.fresh_inputs[key] = size
        self._open.append(number)
        self._part = Part(number)
        self.timeline.add(self._part, 0, 0)
        return number, [(tensor, version_of(tensor)) for tensor in tensors]

    def end_call(self, number: int, versions: list[tuple[Tensor, int]]) -> None:
        call = self.calls[number]
        call.next_node = _next_node()
        call.writes = any(version_of(tensor) != version for tensor, version in versions)
        self._open.pop()
        self._part = Part(self._open[-1])

    @property
    def is_backward(self) -> bool:
        return self._part.is_backward

    def begin_backward(self) -> None:
        self.calls[0].next_node = _next_node()
        self._first_nodes = [call.first_node for call in self.calls]
        self._part = Part(0, is_backward=True)

    def end(self) -> None:
        self._sleeps = True

    # ---- saved tensors ----------------------------------------------------------------------------------------------
    def pack(self, tensor: Tensor) -> Any:
        """Notes a tensor that is saved for backward, and lets go of its storage."""
        key = self._key(tensor)
        if key is None or self.is_backward:
            return self._asleep(tensor.detach)
        size = tensor.untyped_storage().nbytes()
        self.largest_saved = max(self.largest_saved, size)
        for number in self._open:
            self.calls[number].saved[key] = size
            if key not in self._known:
                self.calls[number].fresh[key] = size
        self._known.add(key)
        return _SavedTensor(key[0], size, tensor)

    def unpack(self, saved: Any) -> Tensor:
        """A saved tensor comes back. Its storage is one with those that came back before and are still alive."""
        if isinstance(saved, Tensor):
            return saved
        self._follow_backward()
        there = self._back.get(saved.storage)
        storage = None if there is None else there()
        if storage is None:
            made = self._asleep(lambda: torch.empty(saved.size, dtype=torch.uint8, device=saved.device))
            storage = made.untyped_storage()
            self._back[saved.storage] = weakref.ref(storage)
            self.born(made)
        return self._asleep(lambda: self._tensor_on(storage, saved.dtype, saved.place))

    def _asleep(self, made: Callable[[], Tensor]) -> Tensor:
        was, self._sleeps = self._sleeps, True
        try:
            return made()
        finally:
            self._sleeps = was

    def take_gradient(self, parameter: Tensor) -> None:
        """A gradient leaves when it is whole."""
        gradient = parameter.grad
        if gradient is not None and _has_storage(gradient):
            number = self._storages.number_of(gradient.untyped_storage())
            if number is not None:
                self.gradients.add(number)
        parameter.grad = None

    def _key(self, tensor: Tensor) -> Saved | None:
        if not _has_storage(tensor) or tensor.nbytes < SMALLEST:
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._outside:
            return None
        return self._number(storage), version_of(tensor)


class _SavedTensor:
    """What is needed to make a saved tensor again."""

    def __init__(self, storage: int, size: int, tensor: Tensor) -> None:
        self.storage = storage
        self.size = size
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()


class _WatchedCall(StandIn):
    def __init__(self, module: nn.Module, watch: Watch, number: int) -> None:
        super().__init__(module)
        self._watch = watch
        self._number = number

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._watch.is_backward:  # a checkpoint calls it again
            return self.inner(*args, **kwargs)
        number, versions = self._watch.begin_call(self._number, (args, kwargs))
        try:
            return self.inner(*args, **kwargs)
        finally:
            self._watch.end_call(number, versions)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def amount(fresh: Iterable[dict[Saved, int]], every: Iterable[dict[Saved, int]]) -> Amount:
    """Bytes of the storages of several calls, each counted once."""
    return Amount(fresh=_sum(fresh), all=_sum(every))


def _sum(parts: Iterable[dict[Saved, int]]) -> int:
    together: dict[Saved, int] = {}
    for part in parts:
        together.update(part)
    return sum(together.values())
