"""One microbatch on real tensors, counted by brute force: an oracle for dry runs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.outputs import split
from hydra_ext.state.arguments import tensors_in

SMALLEST = 1024
Key = tuple[int, int]


@dataclass
class Counted:
    """Of one module, in one forward; by address of the storage and version."""

    calls: int = 0
    saved: dict[Key, int] = field(default_factory=dict)
    fresh: dict[Key, int] = field(default_factory=dict)
    inputs: dict[Key, int] = field(default_factory=dict)
    fresh_inputs: dict[Key, int] = field(default_factory=dict)


def protected(model: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}


def saved_by_modules(model: nn.Module, example: Any, fn: Callable[[Any], Any]) -> dict[str, Counted]:
    """What modules save and take. Everything is kept, so that no address is used twice."""
    counted = {name: Counted() for name, _ in model.named_modules()}
    outside, kept, known, inside = protected(model), [], set(), [""]

    def key_of(tensor: Tensor) -> Key | None:
        storage = tensor.untyped_storage()
        if tensor.nbytes < SMALLEST or storage.data_ptr() in outside:
            return None
        kept.append(tensor.detach())
        return storage.data_ptr(), tensor._version

    def pack(tensor: Tensor) -> Tensor:
        key = key_of(tensor)
        if key is not None:
            size = tensor.untyped_storage().nbytes()
            for name in inside:
                counted[name].saved[key] = size
                if key not in known:
                    counted[name].fresh[key] = size
            known.add(key)
        return tensor.detach()

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            counted[name].calls += 1
            inside.append(name)
            for tensor in tensors_in((args, kwargs)):
                key = key_of(tensor)
                if key is not None:
                    counted[name].inputs[key] = tensor.untyped_storage().nbytes()
                    if key not in known:
                        counted[name].fresh_inputs[key] = tensor.untyped_storage().nbytes()

        return note

    with _hooks(model, before, lambda: inside.pop()), saved_tensors_hooks(pack, lambda tensor: tensor):
        fn(example)
    return counted


@contextmanager
def _hooks(model: nn.Module, before: Callable[[str], Callable[..., None]], after: Callable[[], Any]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(lambda *_: (after(), None)[1], always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which storages operators make, and when they are freed."""

    def __init__(self, outside: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside = outside
        self.numbers: dict[int, tuple[int, Any]] = {}
        self.events: list[tuple[int, int, tuple[str, ...]]] = []  # number, bytes more or fewer, open modules
        self.gradients: set[int] = set()
        self.inside = [""]
        self.sleeps = False

    def born(self, value: Any) -> None:
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self.numbers or (size and storage.data_ptr() in self.outside):
                continue
            number = len(self.events)

            def gone(_: Any, key: int = key, size: int = size, number: int = number) -> None:
                del self.numbers[key]
                self.events.append((number, -size, tuple(self.inside)))

            self.numbers[key] = number, weakref.ref(storage, gone)
            self.events.append((number, size, tuple(self.inside)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.sleeps:
            self.born(out)
            self.events.append((-1, 0, tuple(self.inside)))
        return out

    def take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found = self.numbers.get(parameter.grad.untyped_storage()._cdata)
        if found is not None:
            self.gradients.add(found[0])
        parameter.grad = None

    def most(self) -> dict[str, int]:
        """By module, and by "backward"."""
        most: dict[str, int] = {}
        total = 0
        for number, size, inside in self.events:
            total += 0 if number in self.gradients else size
            for name in inside:
                most[name] = max(most.get(name, 0), total)
        return most


def peaks(model: nn.Module, example: list[Any], fn: Callable[[Any], Any]) -> dict[str, int]:
    """The most bytes alive in forward, by module, and in backward, where saved tensors leave at once.

    Gradients do not count. ``example`` is a list of one, which is emptied.
    """
    alive = Alive(protected(model))
    back: dict[int, Any] = {}
    elsewhere: list[bytes] = []
    numbers: dict[int, tuple[Any, int]] = {}

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if tensor.nbytes < SMALLEST or storage.data_ptr() in alive.outside:
            return tensor.detach()
        known = numbers.get(storage._cdata)
        if known is None or known[0]() is not storage:
            known = numbers[storage._cdata] = weakref.ref(storage), len(elsewhere)
            elsewhere.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
        return known[1], tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        number, dtype, *place = saved
        storage = back[number]() if number in back else None
        alive.sleeps = True
        if storage is None:
            made = torch.frombuffer(bytearray(elsewhere[number]), dtype=torch.uint8).clone()
            storage = made.untyped_storage()
            back[number] = weakref.ref(storage)
            alive.born(made)
        tensor = torch.empty(0, dtype=dtype).set_(storage, *place)
        alive.sleeps = False
        return tensor

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(alive.take) for parameter in trained]
    alive.born(example)
    with alive, saved_tensors_hooks(pack, unpack):
        with _hooks(model, lambda name: lambda *_: alive.inside.append(name), lambda: alive.inside.pop()):
            loss, metrics = split(fn(example.pop()))
        kept, root = loss.detach(), [loss]
        del loss
        alive.inside = ["backward"]
        root.pop().backward()
    del kept, metrics
    for handle in handles:
        handle.remove()
    return alive.most()
