"""Copies of several tensors at once. The copies share memory with each other where the tensors do.

So a write to one of two views shows in the other one, with copies as with the originals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import StateError
from hydra_ext.state.layout import ALIGNMENT, ROOM, Layout, copied


def sharing(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups of the tensors, each tensor once. Tensors of a group share memory, directly or through others.

    Tensors of unknown memory (sparse, nested, without storage, of classes with their own dispatch) are groups of one.
    """
    groups: dict[int, list[Tensor]] = {id(tensor): [tensor] for tensor in tensors}
    found = [(_Place.of(group[0]), group[0]) for group in groups.values() if _has_plain_memory(group[0])]
    found.sort(key=lambda each: (str(each[0].device), each[0].begin))
    before: list[tuple[_Place, Tensor]] = []  # tensors whose memory may reach as far as the next one
    for place, tensor in found:
        before = [each for each in before if each[0].device == place.device and each[0].end > place.begin]
        for other_place, other in before:
            mine, others = groups[id(tensor)], groups[id(other)]
            if mine is not others and place.may_meet(other_place):
                others += mine
                groups.update((id(member), others) for member in mine)
        before.append((place, tensor))
    return list({id(group): group for group in groups.values()}.values())


def copied_together(group: Sequence[Tensor], *, aligned: bool = True) -> list[Tensor]:
    """Copies of one group of :func:`sharing`, without graphs, that share memory as the tensors do.

    The copies have the tensors' layouts. Large gaps that no tensor uses are closed, as in
    :func:`~hydra_ext.state.layout.copied`. Views of one tensor become views of one copy, so autograd sees a write to
    one of them in the others.

    Args:
        aligned: As for :func:`~hydra_ext.state.layout.copied`.
    """
    if len(group) == 1:
        return [copied(group[0], aligned=aligned)]
    places = [_Place.of(tensor) for tensor in group]
    begin = min(place.begin for place in places)
    close = _closer(places, begin)
    lead = _lead(places, begin, aligned)
    closed = [close.placed(place, begin, lead) for place in places]
    memory = torch.empty(max(place.end for place in closed), dtype=torch.uint8, device=group[0].device)
    made = [_at(memory, tensor.dtype, place) for tensor, place in zip(group, closed, strict=True)]
    for copy, tensor in zip(made, group, strict=True):
        _fill(copy, tensor)
    return _as_views(group, made, memory)


@dataclass(frozen=True)
class _Place:
    """Where the elements of a tensor are, in bytes.

    Attributes:
        begin: Address of the first element, or its offset from the beginning of its memory.
    """

    device: torch.device
    begin: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(tensor: Tensor) -> _Place:
        size, itemsize = tuple(tensor.shape), tensor.itemsize
        stride = tuple(step * itemsize for step in tensor.stride())
        return _Place(tensor.device, tensor.data_ptr(), size, stride, itemsize)

    @property
    def end(self) -> int:
        return self.begin + self._extent(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements. Elements in one place, by a stride of 0, count once."""
        steps = zip(self.size, self.stride, strict=True)
        return self.itemsize * math.prod([number for number, step in steps if step])

    @property
    def steps(self) -> set[int]:
        return {step for number, step in zip(self.size, self.stride, strict=True) if number > 1 and step}

    def _extent(self, period: int) -> int:
        """Bytes from the first element to the end of the last, without dimensions that repeat with the period."""
        steps = zip(self.size, self.stride, strict=True)
        return self.itemsize + sum([(n - 1) * step for n, step in steps if not period or step % period])

    def within(self, period: int, begin: int = 0) -> tuple[int, int] | None:
        """The range of bytes that it uses in each period, counted from ``begin``.

        None if it reaches from one period into the next.
        """
        first = (self.begin - begin) % period
        last = first + self._extent(period)
        return (first, last) if last <= period else None

    def may_meet(self, other: _Place) -> bool:
        """Whether the two may have memory in common. False is certain; True is not."""
        if self.end <= other.begin or other.end <= self.begin:
            return False
        for period in self.steps | other.steps:
            mine, others = self.within(period), other.within(period)
            if mine and others and (mine[1] <= others[0] or others[1] <= mine[0]):
                return False
        return True


@dataclass(frozen=True)
class _Closer:
    """Shortens a period in memory, which leaves out bytes between two periods that no tensor uses.

    Attributes:
        period: Bytes from one row to the next.
        closed: Bytes from one row to the next in the copy.
    """

    period: int = 1
    closed: int = 1

    def placed(self, place: _Place, begin: int, lead: int) -> _Place:
        """The place in the copy's memory, where ``begin`` is at ``lead``."""
        rows, rest = divmod(place.begin - begin, self.period)
        stride = tuple(s // self.period * self.closed if s % self.period == 0 else s for s in place.stride)
        return _Place(place.device, lead + rows * self.closed + rest, place.size, stride, place.itemsize)


def _closer(places: Sequence[_Place], begin: int) -> _Closer:
    """Closes the gaps of tensors that are narrow parts of a large one. Alignment stays."""
    span = max(place.end for place in places) - begin
    if span <= ROOM * sum(place.nbytes for place in places):
        return _Closer()
    for period in sorted(set[int]().union(*(place.steps for place in places)), reverse=True):
        parts = [place.within(period, begin) for place in places]
        taken = [part[1] for part in parts if part is not None]
        least = max(taken, default=period) + max(place.itemsize for place in places)
        closed = least + (period - least) % ALIGNMENT
        if len(taken) == len(parts) and closed < period:
            return _Closer(period, closed)
    return _Closer()


def _lead(places: Sequence[_Place], begin: int, aligned: bool) -> int:
    """The number of bytes before the first tensor such that every tensor lies at a multiple of its element's size.

    Raises:
        StateError: There is none, since the tensors do not lie so themselves.
    """
    leads: list[int] = [begin % ALIGNMENT if aligned else 0, *range(ALIGNMENT)]
    for lead in leads:
        if all((lead + place.begin - begin) % place.itemsize == 0 for place in places):
            return lead
    raise StateError(
        "tensors that share memory cannot be copied: they do not lie at multiples of their elements' sizes. Give each "
        "of them memory of its own, as clone() does"
    )


def _at(memory: Tensor, dtype: torch.dtype, place: _Place) -> Tensor:
    """A tensor at a place in that memory. Autograd does not see it as a view."""
    stride = [step // place.itemsize for step in place.stride]
    made = torch.empty(0, dtype=dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), place.begin // place.itemsize, place.size, stride)


def _fill(copy: Tensor, tensor: Tensor) -> None:
    """Copies the elements as they are in memory, each once."""
    source = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    source.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    once = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride()).once
    once(copy).copy_(once(source))


def _as_views(group: Sequence[Tensor], made: list[Tensor], memory: Tensor) -> list[Tensor]:
    """The copies as views of each other where the tensors are, with the tensors' classes and pending operations."""
    roots: dict[tuple[int, torch.dtype], Tensor] = {}
    for tensor, copy in zip(group, made, strict=True):
        roots[id(tensor), tensor.dtype] = copy
    related = list(made)
    for number, (tensor, copy) in enumerate(zip(group, made, strict=True)):
        base = tensor._base
        if base is not None and not tensor.requires_grad:
            key = id(base), tensor.dtype
            if key not in roots:
                elements = memory.numel() // tensor.itemsize
                place = _Place(memory.device, 0, (elements,), (tensor.itemsize,), tensor.itemsize)
                roots[key] = _at(memory, tensor.dtype, place)
            with torch.enable_grad():  # autograd refuses writes to a view that was made without gradients
                related[number] = roots[key].as_strided(copy.size(), copy.stride(), copy.storage_offset())
        related[number] = _like(related[number], tensor)
    return related


def _like(copy: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_conj():
        copy = copy.conj()
    if tensor.is_neg():
        copy = torch._neg_view(copy)
    kind: Any = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        with torch._C.DisableTorchFunctionSubclass():
            copy = copy.as_subclass(kind)
        copy.__dict__.update(tensor.__dict__)
    return copy


def _has_plain_memory(tensor: Tensor) -> bool:
    kind: Any = type(tensor)
    return (
        tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
    )
