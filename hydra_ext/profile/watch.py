"""What happens in one microbatch: which storages live, what modules save and take, and how long operators take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.calls import StandIn
from hydra_ext.heads.unmade import Unmade
from hydra_ext.profile.call_log import UNKNOWN, CallLog
from hydra_ext.profile.figures import Storage
from hydra_ext.profile.timeline import Timeline
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.numbers import version_of
from hydra_ext.tracing import not_traced

Made = TypeVar("Made")

_DEVICE_OF_A_FAKE = torch.ops.prim.device.default  # asked of fake tensors only

SMALLEST = 1024  # bytes of a tensor that is counted among those saved, or among inputs

Place = tuple[int, torch.Size, tuple[int, ...]]  # offset, size and strides
TensorOn = Callable[[Any, torch.dtype, Place], Tensor]
RunOperator = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
OperatorCost = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[float, int]]


class Storages:
    """Numbers of storages that are alive.

    Args:
        died: Called with the number and the bytes of a storage that has died.
    """

    def __init__(self, died: Callable[[int, int], None]) -> None:
        self._died = died
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._outside: set[int] = set()
        self._count = 0

    def exempt(self, tensors: Iterable[Tensor]) -> None:
        """Their storages get no numbers. The tensors have to stay alive."""
        self._outside.update(tensor.untyped_storage()._cdata for tensor in tensors if _has_storage(tensor))

    def is_exempt(self, storage: Any) -> bool:
        return storage._cdata in self._outside

    def number_of(self, storage: Any) -> int | None:
        found = self._alive.get(storage._cdata)
        return None if found is None else found[0]

    def add(self, storage: Any) -> int:
        key, size = storage._cdata, storage.nbytes()
        self._count += 1
        number = self._count

        def gone(_: Any) -> None:
            del self._alive[key]
            self._died(number, size)

        self._alive[key] = number, weakref.ref(storage, gone)
        return number


class Elsewhere:
    """Where the bytes of saved storages are: nowhere, as fake tensors have none."""

    def take(self, storage: Any) -> Any:
        """Gives what :meth:`bring` needs to fill another storage alike."""

    def bring(self, storage: Any, taken: Any) -> None:
        """Fills a storage with what was taken."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one microbatch, on the thread that enters it.

    Args:
        cost: The seconds of an operator, and the bytes that it takes while it runs beside its arguments and its result;
            from its function, these arguments, those with names, and the result.
        run: Runs an operator.
        tensor_on: Makes a tensor on a storage, from its dtype and its place.
        elsewhere: Where the bytes of saved storages are.

    Attributes:
        log: Calls of modules, with what they save and take.
        timeline: Storages that live, without parameters and buffers.
        gradients: Numbers of the storages that were gradients of parameters in the end.
    """

    def __init__(
        self,
        cost: OperatorCost,
        *,
        run: RunOperator,
        tensor_on: TensorOn,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cost = cost
        self._run = run
        self._tensor_on = tensor_on
        self._elsewhere = elsewhere or Elsewhere()
        self.log = CallLog()
        self.timeline = Timeline()
        self.gradients: set[int] = set()
        self._storages = Storages(lambda number, size: self.timeline.add(self.log.part, number, -size))
        self._known: set[Storage] = set()
        self._away: weakref.WeakValueDictionary[Storage, _Away] = weakref.WeakValueDictionary()
        self._back: dict[Storage, weakref.ref[Any]] = {}
        self._sleeps = False

    # ---- storages ---------------------------------------------------------------------------------------------------
    def exempt(self, tensors: Iterable[Tensor]) -> None:
        """Parameters and buffers are counted neither as activations nor as saved."""
        self._storages.exempt(tensors)

    def born(self, value: Any) -> None:
        """Storages in a value are alive from now on, if they were not before."""
        for tensor in tensors_in(value):
            if _has_storage(tensor) and not self._storages.is_exempt(tensor.untyped_storage()):
                self._number(tensor.untyped_storage())

    def _number(self, storage: Any) -> int:
        number = self._storages.number_of(storage)
        if number is None:
            number = self._storages.add(storage)
            self.timeline.add(self.log.part, number, storage.nbytes())
        return number

    def _key(self, tensor: Tensor) -> Storage | None:
        """None if the tensor does not count."""
        if not _has_storage(tensor) or tensor.nbytes < SMALLEST:
            return None
        storage = tensor.untyped_storage()
        return None if self._storages.is_exempt(storage) else (self._number(storage), version_of(tensor))

    def _number_of(self, tensor: Tensor) -> int:
        known = self._storages.number_of(tensor.untyped_storage()) if _has_storage(tensor) else None
        return UNKNOWN if known is None or tensor.untyped_storage().nbytes() < SMALLEST else known

    # ---- operators --------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Unmade) for kind in types):
            return NotImplemented  # it makes what the operator needs, which is seen then
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        if not self._sleeps and func is not _DEVICE_OF_A_FAKE:
            self.log.follow_backward()
            part = self.log.part
            self.born(out)
            seconds, taken = self._cost(func, args, kwargs, out)
            self.timeline.pass_by(part, taken)
            self.log.spend(seconds)
        return out

    def begin_backward(self) -> None:
        self.log.begin_backward()

    # ---- calls of modules -------------------------------------------------------------------------------------------
    @contextmanager
    def watched_calls(self, model: nn.Module) -> Iterator[None]:
        """Calls of the model's modules are noted."""
        stand_ins = [_WatchedCall(self, module, number) for number, module in enumerate(model.modules())]
        try:
            for each in stand_ins:
                each.install()
            yield
        finally:
            for each in reversed(stand_ins):
                each.remove()

    def call(self, number: int, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a module's call."""
        if self.log.part.is_backward:  # a checkpoint makes it again
            return inner(*args, **kwargs)
        call = self.log.begin(number)
        self.timeline.begin(self.log.part)
        versions = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        for tensor, _ in versions:
            key = self._key(tensor)
            if key is not None:
                call.inputs[key] = tensor.untyped_storage().nbytes()
                if key not in self._known:
                    call.fresh_inputs[key] = call.inputs[key]
        try:
            return inner(*args, **kwargs)
        finally:
            for tensor, version in versions:
                if version_of(tensor) != version:
                    call.writes.add(self._number_of(tensor))
            self.log.end(call)

    # ---- saved tensors ----------------------------------------------------------------------------------------------
    def pack(self, tensor: Tensor) -> Any:
        """Notes a tensor that is saved for backward, and lets go of its storage."""
        if not self.log.part.is_backward:
            self.log.saves()
        key = None if self.log.part.is_backward else self._key(tensor)
        if key is None:
            return self._asleep(tensor.detach)
        size = tensor.untyped_storage().nbytes()
        for call in self.log.open_calls:
            call.saved[key] = size
            if key not in self._known:
                call.fresh[key] = size
        self._known.add(key)
        away = self._away.get(key)
        if away is None:
            taken = self._asleep(lambda: self._elsewhere.take(tensor.untyped_storage()))
            away = self._away[key] = _Away(key, size, taken)
        return _SavedTensor(away, tensor)

    def unpack(self, saved: Any) -> Tensor:
        """A saved tensor comes back. Its storage is one with those that came back before and are still alive."""
        if isinstance(saved, Tensor):
            return saved
        self.log.follow_backward()
        away = saved.away
        there = self._back.get(away.key)
        storage = None if there is None else there()
        if storage is None:
            made = self._asleep(lambda: torch.empty(away.size, dtype=torch.uint8, device=saved.device))
            storage = made.untyped_storage()
            self._asleep(lambda: self._elsewhere.bring(storage, away.taken))
            self._back[away.key] = weakref.ref(storage)
            self.born(made)
        return self._asleep(lambda: self._tensor_on(storage, saved.dtype, saved.place))

    def take_gradient(self, parameter: Tensor) -> None:
        """A gradient leaves when it is whole."""
        gradient = parameter.grad
        if gradient is not None and _has_storage(gradient):
            number = self._storages.number_of(gradient.untyped_storage())
            if number is not None:
                self.gradients.add(number)
        parameter.grad = None

    def _asleep(self, made: Callable[[], Made]) -> Made:
        """What a hook does itself is not part of the microbatch."""
        was, self._sleeps = self._sleeps, True
        try:
            return made()
        finally:
            self._sleeps = was


class _Away:
    """A storage that was saved, of which nothing is left here."""

    def __init__(self, key: Storage, size: int, taken: Any) -> None:
        self.key = key
        self.size = size
        self.taken = taken


class _SavedTensor:
    """What is needed to make a saved tensor again."""

    def __init__(self, away: _Away, tensor: Tensor) -> None:
        self.away = away
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.place = tensor.storage_offset(), tensor.size(), tensor.stride()


class _WatchedCall(StandIn):
    def __init__(self, watch: Watch, module: nn.Module, number: int) -> None:
        super().__init__(module)
        self._watch = watch
        self._number = number

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.call(self._number, self.inner, args, kwargs)


def _has_storage(tensor: Tensor) -> bool:
    return not isinstance(tensor, Unmade) and tensor.layout is torch.strided and not tensor.is_nested
