"""A table at home on the disk: its weight and its moments have no bytes on the host, and rows are read and written.

The tensors stay the user's own objects. Their storages have no bytes meanwhile. Whatever reads a tensor brings it to
the host first (:mod:`hydra_ext.tables.watching`). There it stays until the next step by rows sends it away again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.errors import SpillError
from hydra_ext.tables import watching
from hydra_ext.tables.report import DiskReport

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 2**20  # of rows that move together when a whole tensor does


class _Place:
    """Room for the rows of one tensor, and the tensor that has it."""

    def __init__(self, file: _C.RowFile) -> None:
        self.file = file
        self.tensor: weakref.ref[Tensor] | None = None
        self.is_away = False

    def held(self) -> Tensor | None:
        return None if self.tensor is None else self.tensor()


class DiskHome:
    """The files of one table, and which of its tensors have their bytes there. Thread-safe.

    Args:
        weight: The table, fp32 and contiguous.
        tensors: Number of tensors with room there: the weight, and its moments.
        folder: On a disk of this machine.
        files: As in :class:`hydra_ext.Checks`.

    Attributes:
        settle: Brings rows that are behind up to date.
        forget: Drops what rows have missed.
        whole_reads: Number of times that all rows of a tensor have come to the host.

    Raises:
        SpillError: The folder cannot be used, or has no room.
    """

    def __init__(self, weight: Tensor, tensors: int, folder: str, files: Any = None) -> None:
        self.settle: Callable[[], None] = _nothing
        self.forget: Callable[[], None] = _nothing
        self.whole_reads = 0
        self._rows = len(weight)
        self._row_bytes = weight.nbytes // len(weight)
        self._places = [_Place(_C.RowFile(folder, self._rows, self._row_bytes, files)) for _ in range(tensors)]
        self._watched: dict[int, weakref.ref[Tensor]] = {}  # by identity
        self._moved: DiskReport | None = None  # once it has ended
        self._lock = threading.RLock()
        self._warned = False

    def report(self) -> DiskReport:
        """Also after the end, when nothing is here."""
        if self._moved is not None:
            return self._moved
        away = sum(place.is_away for place in self._places)
        return DiskReport(
            nbytes=away * self._rows * self._row_bytes,
            read_bytes=sum(place.file.bytes_read for place in self._places),
            written_bytes=sum(place.file.bytes_written for place in self._places),
        )

    def chunks(self) -> Iterator[Tensor]:
        """The numbers of all rows, in order, as many at a time as move together."""
        many = max(1, _CHUNK_BYTES // self._row_bytes)
        for first in range(0, self._rows, many):
            yield torch.arange(first, min(first + many, self._rows), device="cpu")

    def is_away(self, tensor: Tensor) -> bool:
        with self._lock:
            return self._away(tensor) is not None

    # ---- whole tensors ----------------------------------------------------------------------------------------------

    def leave(self, *tensors: Tensor, strict: bool) -> None:
        """Sends tensors' bytes to the disk.

        A tensor stays if something else, such as a view or an array, can read its memory. A warning says so, and with
        ``strict=False`` also if the disk failed.

        Raises:
            SpillError: The disk failed, and so ``strict``. The tensor has its bytes on the host.
        """
        for tensor in tensors:
            try:
                self._leave(tensor)
            except SpillError as error:
                if strict:
                    raise
                self._warn(str(error))

    def new(self, weight: Tensor) -> Tensor:
        """A tensor of zeros, like the weight, that is here if there is room."""
        with self._inside():
            made = _C.make_bare(weight)
            place = self._place_for(made)
            if place is None:
                return torch.zeros_like(weight)
            for numbers in self.chunks():
                if not bool(place.file.blank(numbers).all()):  # rows of a tensor that had this place before
                    place.file.write(numbers, torch.zeros(len(numbers), self._row_bytes // 4, device="cpu"))
            self._gone(place, made)
            return made

    def overwrite(self, tensor: Tensor) -> None:
        """Gives a tensor zeros on the host, to be written as a whole. What was here, or was lost, is forgotten."""
        self.forget()
        with self._inside():
            place = self._away(tensor)
            if place is not None:
                _C.give_memory(tensor)
                tensor.detach().zero_()
                place.is_away = False

    def come(self) -> None:
        """Brings all tensors that are here to the host, with all rows up to date.

        Raises:
            SpillError: The disk failed, or has lost rows.
        """
        for tensor in [place.held() for place in self._places]:
            if tensor is not None:
                self._come(tensor)

    def watch(self, tensor: Tensor) -> None:
        """Has whatever reads the tensor bring it to the host first, until :meth:`close`."""
        self._watched[id(tensor)] = reference = weakref.ref(tensor)
        watching.watch(tensor, partial(self._come_to, reference))

    def copy(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor that is here, with all rows up to date; None if it is not."""
        self.settle()
        with self._inside():
            place = self._away(tensor)
            if place is None:
                return None
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for numbers in self.chunks():
                place.file.read(numbers, copy[int(numbers[0]) : int(numbers[-1]) + 1])
            return copy

    def close(self) -> None:
        """Brings all tensors to the host, and watches them no more. One that the disk has lost raises when it is read.

        Raises:
            SpillError: The disk failed.
        """
        failed: SpillError | None = None
        for reference in self._watched.values():
            tensor = reference()
            if tensor is None:
                continue
            try:
                self._come(tensor)
                watching.unwatch(tensor)
            except SpillError as error:
                failed = error
                watching.watch(tensor, partial(_raise_lost, str(error)))
        self._moved = replace(self.report(), nbytes=0)
        self._places, self.settle, self.forget = [], _nothing, _nothing  # the files end
        if failed is not None:
            raise failed

    # ---- rows -------------------------------------------------------------------------------------------------------

    def rows(self, tensor: Tensor, rows: Tensor, to: Tensor | None = None) -> Tensor:
        """A copy of rows, wherever they are, in ``to`` if that is given."""
        with self._inside():
            if to is None:
                to = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            place = self._away(tensor)
            if place is None:
                return torch.index_select(tensor.detach(), 0, rows, out=to)
            place.file.read(rows, to)
            return to

    def put(self, tensor: Tensor, rows: Tensor, values: Tensor) -> None:
        """Writes rows, each named once, where they are."""
        with self._inside():
            place = self._away(tensor)
            if place is None:
                tensor.detach().index_copy_(0, rows, values)
            else:
                place.file.write(rows, values.contiguous())

    def put_step(
        self, tensors: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor], made: Tensor, now: Tensor
    ) -> None:
        """Writes rows of several tensors, and how many steps they have made.

        What is here is lost together if the disk fails: no row is of two steps.

        Args:
            made: Steps of each row of the table.
            now: Of these rows from now on.
        """
        with self._inside():
            places = [self._away(tensor) for tensor in tensors]
            for tensor, place, its_values in zip(tensors, places, values, strict=True):
                if place is None:
                    tensor.detach().index_copy_(0, rows, its_values)
            here = [(place, its) for place, its in zip(places, values, strict=True) if place is not None]
            _C.write_rows([place.file for place, _ in here], rows, [its for _, its in here], made, now)

    def read_ahead(self, rows: Tensor) -> None:
        """Has the system read these rows of all tensors that are here, and returns at once."""
        with self._inside():
            for place in self._places:
                if place.is_away:
                    place.file.read_ahead(rows)

    def blank(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Which of the rows are known to be zeros, without reading them: bool, one for each."""
        with self._inside():
            place = self._away(tensor)
            return torch.zeros(len(rows), dtype=torch.bool, device="cpu") if place is None else place.file.blank(rows)

    # -----------------------------------------------------------------------------------------------------------------

    def _leave(self, tensor: Tensor) -> None:
        """Sends the tensor's bytes to the disk, if nothing else can read its memory."""
        with self._inside():
            if self._away(tensor) is not None:
                return
            if not _C.is_alone(tensor):
                self._warn("its memory has another owner (a view, a numpy array, a kept state_dict())")
                return
            place = self._place_for(tensor)
            if place is None:
                self._warn("it has more moments than there is room for on the disk")
                return
            for numbers in self.chunks():
                place.file.write(numbers, tensor.detach()[int(numbers[0]) : int(numbers[-1]) + 1])
            self._gone(place, tensor)  # noted before: nothing may take a tensor without bytes for one with them
            _C.bare(tensor)

    def _come(self, tensor: Tensor) -> None:
        """Brings a tensor's bytes to the host, with all rows up to date.

        Raises:
            SpillError: The disk failed, or has lost rows. The tensor has no bytes on the host.
        """
        self.settle()
        with self._inside():
            place = self._away(tensor)
            if place is None:
                return
            _C.give_memory(tensor)
            try:
                for numbers in self.chunks():
                    place.file.read(numbers, tensor.detach()[int(numbers[0]) : int(numbers[-1]) + 1])
            except BaseException:  # re-raised: the tensor stays here
                _C.bare(tensor)
                raise
            place.is_away = False
            self.whole_reads += 1

    def _away(self, tensor: Tensor) -> _Place | None:
        return next((place for place in self._places if place.is_away and place.held() is tensor), None)

    def _place_for(self, tensor: Tensor) -> _Place | None:
        """The tensor's own place, or a free one; None if there is none."""
        own = next((place for place in self._places if place.held() is tensor), None)
        free = next((place for place in self._places if place.held() is None), None)
        place = own or free
        if place is not None:
            place.tensor, place.is_away = weakref.ref(tensor), False
        return place

    def _gone(self, place: _Place, tensor: Tensor) -> None:
        place.is_away = True
        self.watch(tensor)

    def _come_to(self, reference: weakref.ref[Tensor]) -> None:
        tensor = reference()
        if tensor is not None:
            self._come(tensor)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("a table stays on the host, beyond host_budget=: %s", why)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock, torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _C.Uncharged():
            yield


def _raise_lost(why: str) -> None:
    raise SpillError(
        f"the numbers of this tensor were lost when its context ended: {why}; load_state_dict(..., assign=True) "
        "replaces it by another one"
    )


def _nothing() -> None:
    pass
