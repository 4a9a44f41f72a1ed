"""Looks rows up in a table: those that a call needs go to the device once, and their gradient comes back.

The graph begins at the host parameter. So its gradient is summed, hooked and asked for as that of any parameter of the
host: it is the one that torch makes, dense or sparse, with the same sums in the same order.

torch's own operation runs on the device, on the rows alone. The numbers of the rows there are in the order of the
table, so nothing that depends on the order of the numbers differs from a call with the whole table.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_ext import _C
from hydra_ext.activations.call_state import is_repeating
from hydra_ext.blocks import Table
from hydra_ext.errors import ModelChanged, UnsupportedModel
from hydra_ext.optim import rows as by_rows
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.state.layout import Layout
from hydra_ext.tables import watching
from hydra_ext.tables.disk_home import DiskHome
from hydra_ext.tables.row_steps import RowSteps


class MovedBytes:
    """Bytes moved for one table.

    Attributes:
        rows: From host to device.
        written_back: Of rows that ``max_norm`` has changed, from device to host.
        gradients: Of rows, from device to host.
        averaged: Of gradients of rows, with the rows' numbers, from this rank to others.
    """

    def __init__(self) -> None:
        self.rows = self.written_back = self.gradients = self.averaged = 0


class TableRows:
    """One table inside its context.

    Attributes:
        name: Name of the weight in the model.
        host: The weight, whose rows stay on the host.
        device: Device on which rows are looked up.
        dtype: Dtype of rows on the device.
        moved: Bytes that were moved.
        steps: Steps of a native optimizer by rows; None if steps read a gradient of the whole table.
        disk: Where the table is at home; None if it is the host.
    """

    def __init__(self, table: Table, device: torch.device, disk: DiskHome | None = None) -> None:
        self._table = table
        self.name = table.name
        self.host = table.weight
        self.device = device
        self.dtype = self.host.dtype if table.dtype is None else table.dtype
        self.moved = MovedBytes()
        self.steps: RowSteps | None = None
        self.disk = disk
        self._form = _form(self.host)
        self._sums: _Sums | None = None
        self._log: Callable[[], OverwrittenRows | None] = lambda: None

    def open(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The context begins, in which this optimizer makes the steps. :meth:`close` ends it."""
        host = self.host
        self._watch_sums()
        casts = self.dtype != host.dtype or self._table.gradient_dtype is not None
        sparse = any(module.sparse for module in self._table.modules)
        native = isinstance(optimizer, HostOptimizer) and optimizer.can_step_rows(host)
        watched = self.disk is not None or watching.can_be_watched(host)
        if native and host.requires_grad and not sparse and not casts and watched:
            self.steps = RowSteps(host, self.disk)
            by_rows.mark(host, self.steps.come_home)
        if self.disk is not None:
            self.disk.leave(host, strict=True)
            if self.steps is not None and isinstance(optimizer, HostOptimizer):
                self.disk.leave(*optimizer.tensors_beside(host), strict=False)

    def _watch_sums(self) -> None:
        if self._sums is None and self.host.requires_grad:
            self._sums = _Sums(self.host)

    def backward_begins(self) -> None:
        if self._sums is not None:
            self._sums.version = self.host._version

    @property
    def was_written(self) -> bool:
        """Whether something other than this object has written to the table since a backward has begun."""
        return self._sums is not None and self._sums.version != self.host._version

    def take_arrived(self) -> bool:
        """Whether a gradient has been added since the last call."""
        arrived = self._sums is not None and self._sums.arrived
        if self._sums is not None:
            self._sums.arrived = False
        return arrived

    def settle(self, *, to_host: bool) -> None:
        """Brings all rows up to date, and with ``to_host`` to the host if they are at home on the disk."""
        if self.steps is not None:
            self.steps.settle()
        if self.disk is not None and to_host:
            self.disk.come()

    def _end_steps(self) -> None:
        """From now on steps read a gradient of the whole table.

        So it is if calls ask for sparse gradients: torch sums those and dense ones in the order in which they come.
        """
        if self.steps is not None:
            self.steps.come_home()
            by_rows.make_dense(self.host)
            by_rows.unmark(self.host)
            if self.disk is None:
                watching.unwatch(self.host)
            self.steps = None

    def backward_failed(self) -> None:
        """A backward of this thread has raised."""
        if self._sums is not None:
            self._sums.end()

    def close(self) -> None:
        try:
            self._end_steps()
        finally:
            by_rows.unmark(self.host)
            self.steps = None
            if self._sums is not None:
                self._sums.close()
                self._sums = None
            if self.disk is not None:
                self.disk.close()

    def embedding(
        self,
        input: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """``torch.nn.functional.embedding`` with this table's weight."""
        _expect_indices(input, functional.embedding)
        if sparse:
            self._end_steps()
        rows, local = self._numbered(input, IndexError, padding_idx=None)
        taken = self._taken(rows, local, max_norm, norm_type)
        padding = self._local_padding(rows, padding_idx)
        return functional.embedding(
            local, taken, padding_idx=padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
        )

    def embedding_bag(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Tensor:
        """``torch.nn.functional.embedding_bag`` with this table's weight."""
        _expect_indices(input, functional.embedding_bag, offsets)
        if sparse:
            self._end_steps()
        # torch sums bags with and without a padding index in different kernels, whether or not it is in one of them.
        rows, local = self._numbered(input, RuntimeError, padding_idx=padding_idx)
        taken = self._taken(rows, local, max_norm, norm_type)
        return functional.embedding_bag(
            local,
            taken,
            offsets if offsets is None else offsets.to(self.device),
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=self._local_padding(rows, padding_idx),
        )

    def _numbered(self, given: Tensor, error: type[Exception], *, padding_idx: int | None) -> tuple[Tensor, Tensor]:
        """The rows that are needed, in order, on the host; and for each index the row's place among them.

        Args:
            error: What to raise for an index that the table lacks.
            padding_idx: A row that is among them in any case.
        """
        with torch.no_grad(), _C.Uncharged():
            indices = given.detach()
            if padding_idx is not None:
                indices = torch.cat([indices.flatten(), indices.new_tensor([self._from_start(padding_idx)])])
            rows, places = torch.unique(indices, return_inverse=True)
            if padding_idx is not None:
                places = places[:-1].reshape(given.shape)
            rows = rows.to("cpu", torch.int64)
            if len(rows) == 0:
                rows = torch.zeros(
                    1, dtype=torch.int64, device="cpu"
                )  # torch's operations want a row, also for no index
        if rows[0] < 0 or rows[-1] >= len(self.host):
            raise error(
                f"index out of range in self: '{self.name}' has {len(self.host)} rows, and was asked for "
                f"{rows[0]} to {rows[-1]}"
            )
        return rows, places.to(self.device, given.dtype, copy=True)

    def _local_padding(self, rows: Tensor, padding: int | None) -> int | None:
        if padding is None:
            return None
        padding = self._from_start(padding)
        place = int(torch.searchsorted(rows, padding))
        return place if place < len(rows) and rows[place] == padding else None

    def _from_start(self, padding: int) -> int:
        if not -len(self.host) <= padding < len(self.host):
            raise AssertionError("Padding_idx must be within num_embeddings")
        return padding % len(self.host)

    def _taken(self, rows: Tensor, local: Tensor, max_norm: float | None, norm_type: float) -> Tensor:
        if torch.is_grad_enabled():
            self._watch_sums()  # it may be trained since the context began
        with torch.no_grad():
            copied = self._copied(rows)
            # In a second call the first has written these rows. Of no indices there is one row, which is not looked up.
            if max_norm is not None and not is_repeating() and local.numel() > 0:
                self._renormalise(rows, local, copied, max_norm, norm_type)
        taken: Tensor = _Take.apply(self.host, self, rows, [copied])  # type: ignore[no-untyped-call]
        return taken

    def _copied(self, rows: Tensor) -> Tensor:
        """The rows on the device."""
        with torch._C.DisableTorchFunctionSubclass():
            if (now := _form(self.host)) != self._form:
                raise ModelChanged(
                    f"parameters changed inside the offload context: '{self.name}' has {now}, had {self._form}. Leave "
                    "the context, change them, and enter it again"
                )
        taken = self._at_home(rows, pinned=self.device.type != "cpu").to(self.dtype)
        taken = taken.to(self.device, non_blocking=True)
        self.moved.rows += taken.nbytes
        return taken

    def _at_home(self, rows: Tensor, *, pinned: bool = False) -> Tensor:
        """A copy of the rows, up to date."""
        host = self._numbers()
        taken = torch.empty((len(rows), *host.shape[1:]), dtype=host.dtype, device="cpu", pin_memory=pinned)
        if self.steps is not None:
            self.steps.take(rows, taken)
        elif self.disk is not None:
            self.disk.rows(self.host, rows, taken)
        else:
            torch.index_select(host, 0, rows, out=taken)
        return taken

    def _numbers(self) -> Tensor:
        """The table as it lies on the host: rows may have missed steps, or be on the disk."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.host.detach()

    def looks_up(self, module: nn.Module) -> bool:
        return any(module is each for each in self._table.modules)

    def read_ahead(self, indices: Tensor) -> None:
        """Has the system read the rows with these indices, if they are on the disk."""
        if self.disk is not None:
            rows, _ = self._numbered(indices, IndexError, padding_idx=None)
            self.disk.read_ahead(rows)

    def write(self, rows: Tensor, numbers: Tensor) -> None:
        """Writes rows that are up to date."""
        known = not self.was_written
        if self.disk is None:
            with torch._C.DisableTorchFunctionSubclass():
                self.host.index_copy_(0, rows, numbers)
        else:
            self.disk.put(self.host, rows, numbers)
        if known:
            self.backward_begins()  # so that this write does not count as one of others

    def _renormalise(self, rows: Tensor, local: Tensor, copied: Tensor, max_norm: float, norm_type: float) -> None:
        """Does to the rows, here and on the host, what torch does with ``max_norm`` before it looks them up."""
        if self.dtype != self.host.dtype:
            raise UnsupportedModel(
                f"'{self.name}' has max_norm, so its forward writes to it, and param_dtype= casts it: the write would "
                "be lost; leave one of the two out"
            )
        before = copied.clone()
        torch.embedding_renorm_(copied, local, max_norm, norm_type)
        changed = ((copied != before) & ~before.isnan()).any(dim=1)
        written = copied[changed]
        if not len(written):
            return
        self.moved.written_back += written.nbytes
        log = self._log()
        with _C.Uncharged():
            places = rows[changed.to("cpu")]
            if self.steps is not None:
                self.steps.catch_up(places)
            if log is not None:
                log.add(places, self._at_home(places))
            self.write(places, written.to("cpu"))

    def log_overwritten(self) -> OverwrittenRows:
        """A log of the rows that forwards write to from now on, while the caller keeps it."""
        log = OverwrittenRows(self)
        self._log = weakref.ref(log)
        return log

    def host_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """The table's gradient from that of the rows: sparse if that is, otherwise dense."""
        if torch.is_grad_enabled():
            raise UnsupportedModel(
                f"the gradient of '{self.name}' is asked for with a graph of its own (create_graph=True), which rows "
                "that have left do not have: name the table's module in blocks= of hydra_ext.offload"
            )
        host = self.host
        if gradient.layout == torch.sparse_coo:
            values = self._on_host(gradient._values())
            with _C.Uncharged():
                indices = rows[gradient._indices()[0].to("cpu")]
                return torch.sparse_coo_tensor(
                    indices[None],
                    values,
                    host.shape,
                    check_invariants=False,
                    is_coalesced=gradient.is_coalesced(),
                )
        values = self._on_host(gradient)
        with _C.Uncharged(), torch._C.DisableTorchFunctionSubclass():
            if self.steps is not None and not self.host._backward_hooks:  # hooks get the gradient as torch makes it
                return torch.sparse_coo_tensor(
                    rows[None], values, host.shape, check_invariants=False, is_coalesced=True
                )
            return torch.zeros_like(host).index_copy_(0, rows, values)

    def _on_host(self, values: Tensor) -> Tensor:
        """A copy with the same layout: torch adds sparse tensors in another order if their values have gaps."""
        dtype = self._table.gradient_dtype
        leaving = values if dtype is None else values.to(dtype)
        self.moved.gradients += leaving.nbytes
        with _C.Uncharged():
            layout = replace(Layout.of(leaving), dtype=self.host.dtype)
            return layout.copy(leaving, torch.device("cpu"))


def _form(host: Tensor) -> str:
    return f"shape {tuple(host.shape)}, strides {host.stride()} and {host.dtype} on {host.device}"


def _expect_indices(given: Any, function: Callable[..., Tensor], *others: Any) -> None:
    """Has this function of torch raise, as it does with the whole table, if it is given what are no indices."""
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
        function(given, torch.empty(1, 1, device=getattr(given, "device", "cpu")), *others)


class OverwrittenRows:
    """The rows of one table that forwards have written to, with their numbers from before."""

    def __init__(self, table: TableRows) -> None:
        self._table = table
        self._writes: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, before: Tensor) -> None:
        self._writes.append((rows, before))

    @property
    def name(self) -> str:
        return self._table.name

    def __len__(self) -> int:
        """Number of writes so far."""
        return len(self._writes)

    @torch.no_grad()
    def undo(self, first: int) -> None:
        """Undoes the writes from number ``first`` on."""
        while len(self._writes) > first:
            self._table.write(*self._writes.pop())


class _Take(torch.autograd.Function):
    """The rows on the device as a function of the table on the host."""

    @staticmethod
    def forward(ctx: Any, _host: Tensor, table: TableRows, rows: Tensor, copied: list[Tensor]) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return copied.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.table.host_gradient(ctx.rows, gradient), None, None, None


class _Sums:
    """Sums of a parameter's gradients, which autograd makes on the host: the simulated device is not charged for them.

    Its memory is host memory, too, so that it cannot tell them apart.

    Attributes:
        arrived: Whether there was one.
        version: Version of the parameter when the latest backward began.
    """

    def __init__(self, host: nn.Parameter) -> None:
        self.arrived = False
        self.version = host._version
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            view: Any = host.view_as(host)
        self._node = view.grad_fn.next_functions[0][0]  # kept, because the parameter does not keep it
        self._uncharged = threading.local()
        self._handles = [self._node.register_prehook(self._begin), self._node.register_hook(self._sum_ended)]

    def close(self) -> None:
        self.end()
        for handle in self._handles:
            handle.remove()

    def _begin(self, _gradients: object) -> None:
        self.end()  # of a sum that has raised in a backward inside another one
        inside = _C.Uncharged()
        inside.__enter__()
        self._uncharged.inside = inside

    def _sum_ended(self, *_: object) -> None:
        self.end()
        self.arrived = True

    def end(self) -> None:
        """A sum of this thread has ended, or raised."""
        inside = self._uncharged.__dict__.pop("inside", None)
        if inside is not None:
            inside.__exit__(None, None, None)
