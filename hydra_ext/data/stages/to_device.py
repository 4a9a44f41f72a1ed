"""A node that copies what it gives to a GPU, before it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torchdata.nodes import BaseNode

from hydra_ext.data.stages.ahead import Ahead, Flow
from hydra_ext.data.workers.pool import Made
from hydra_ext.errors import InvalidArgument


class ToDevice(Ahead[Any]):
    """Copies the tensors of each item to a device, in a thread and on a stream of its own.

    Items are any nests of dicts, lists, tuples, named tuples and dataclasses. Tensors go through pinned memory of
    torch's. When an item is given, its copies have ended, and its memory counts as used by the current stream. So the
    source may write to what it gave before.

    At most ``depth`` items wait on the device, and count toward a run's budget there. What does not fit now is given as
    it is: a run's forward copies it. On the host, where the simulated device has its memory, nothing is copied.

    Not yet run on a GPU.

    Args:
        source: Any node.
        device: Such as ``run.device``.
        depth: Items that may wait.

    Raises:
        InvalidArgument: The device is neither a GPU nor the host, or ``depth`` is not a positive number.
    """

    def __init__(self, source: BaseNode[Any], device: torch.device | str, *, depth: int = 2) -> None:
        super().__init__(source, depth=depth)
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"device={str(device)!r}: give run.device, 'cuda' or 'cpu'")
        self._stream = _stream_on(device) if device.type == "cuda" else None

    def next(self) -> Any:
        item = super().next()
        if self._stream is not None:
            _replaced(item, partial(_used, torch.cuda.current_stream(self._stream.device)))
        return item

    def _submit(self) -> Callable[[Flow, int, Any], None]:
        return partial(_copy, self._stream)


def _stream_on(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _copy(stream: torch.cuda.Stream | None, flow: Flow, number: int, item: Any) -> None:
    if stream is not None:
        pinned: list[Tensor] = []  # until the copies have read them
        with torch.cuda.stream(stream):
            item = _replaced(item, partial(_copied, stream.device, pinned))
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(stream)
        end.synchronize()
    flow.finish(number, [Made(item, 0.0)])


def _copied(device: torch.device, pinned: list[Tensor], tensor: Tensor) -> Tensor:
    """A copy on the device, which may be under way; the tensor itself if it is none to copy, or does not fit."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
        return tensor
    with suppress(torch.OutOfMemoryError):
        host = tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        pinned.append(host)
        return host.to(device, non_blocking=True)
    return tensor


def _used(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    """The tensor, whose memory is not given back before the stream has used it."""
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor


def _replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """A nest with its tensors replaced. What has none of them in it stays the same object."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, PackedSequence):  # its lengths have to stay on the host
        return value
    parts = _parts(value)
    changed = {key: new for key, part in parts.items() if (new := _replaced(part, replace)) is not part}
    if not changed:
        return value
    if isinstance(value, tuple):
        made = [changed.get(key, part) for key, part in parts.items()]
        return value._make(made) if hasattr(value, "_make") else type(value)(made)
    result = copy.copy(value)
    for key, new in changed.items():
        if is_dataclass(value):
            object.__setattr__(result, key, new)  # of a frozen one, too
        else:
            result[key] = new
    return result


def _parts(value: Any) -> dict[Any, Any]:
    """What is in a container, by its place there."""
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    return {}
