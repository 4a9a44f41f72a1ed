"""Means of the gradients of tables over ranks, of which only the rows that some rank has a gradient of travel.

Sparse gradients have the bits that ``DistributedDataParallel`` gives them with gloo: each rank divides its own by the
number of ranks, and the quotients are added in the order of the ranks. Dense gradients are added in the order of the
ranks and divided then, row by row: all other rows are zero on every rank, and stay so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ext.optim import rows as by_rows
from hydra_ext.tables.lookup import TableRows

NONE, DENSE, SPARSE = range(3)  # kinds of gradients; of a dense one the rows that are left out are zero

_NUMBER_BYTES = 8


@dataclass(frozen=True)
class Share:
    """One rank's part of the sum of a table's gradients.

    Attributes:
        kind: :data:`NONE`, :data:`DENSE` or :data:`SPARSE`.
        rows: Numbers of rows, int64, each once and in order.
        values: Their gradients, without gaps.
    """

    kind: int
    rows: Tensor
    values: Tensor


def no_share(table: TableRows) -> Share:
    """That of a rank without a gradient."""
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    return Share(NONE, nothing, torch.empty((0, *table.host.shape[1:]), dtype=table.host.dtype, device="cpu"))


def share_of(table: TableRows, ranks: int) -> Share:
    """This rank's part. The gradient is strided or sparse, and stays as it is."""
    gradient = by_rows.gradient_of(table.host)
    if gradient is None:
        return no_share(table)
    if by_rows.has_rows(table.host):
        rows, values = by_rows.rows_of(table.host)
        return Share(DENSE, rows.contiguous(), values.contiguous())
    if gradient.layout == torch.sparse_coo:
        part = (gradient / ranks).coalesce()
        return Share(SPARSE, part._indices()[0].contiguous(), part._values().contiguous())
    # By its bits: the sign of a zero counts, and a NaN is a number here.
    bits = gradient.reshape(len(gradient), -1).contiguous().view(torch.int16)
    rows = bits.any(dim=1).nonzero().squeeze(1)
    return Share(DENSE, rows, gradient.index_select(0, rows))


def row_bytes(table: TableRows) -> int:
    """Bytes of a row that travels, with its number."""
    return _NUMBER_BYTES + table.host.nbytes // len(table.host)


def packed(shares: Sequence[Share]) -> Tensor:
    """The bytes of these shares: of each the numbers of its rows, then their gradients."""
    parts = [part.reshape(-1).view(torch.uint8) for share in shares for part in (share.rows, share.values)]
    return torch.cat(parts)


def unpacked(data: Tensor, tables: Sequence[TableRows], heads: Sequence[Sequence[int]]) -> list[Share]:
    """Undoes :func:`packed`: the shares in tables, whose kinds and numbers of rows are given."""
    shares = []
    for table, (kind, count) in zip(tables, heads, strict=True):
        own, data = data.tensor_split((count * row_bytes(table),))
        numbers, values = own.tensor_split((count * _NUMBER_BYTES,))
        # Copies, whose memory begins where a number of this type may lie.
        shape = (count, *table.host.shape[1:])
        values = values.clone().view(table.host.dtype).reshape(shape)
        shares.append(Share(kind, numbers.clone().view(torch.int64), values))
    return shares


def put_mean(table: TableRows, shares: Sequence[Share]) -> None:
    """Makes the mean of all ranks' shares, in the order of the ranks, this rank's gradient."""
    if any(share.kind == SPARSE for share in shares):
        _put_sparse(table, _sparse_sum(table, shares))
    else:
        rows, total = _dense_sum(shares)
        _put_rows(table, rows, total.div_(len(shares)))


def _sparse_sum(table: TableRows, shares: Sequence[Share]) -> Tensor:
    total, *others = (
        torch.sparse_coo_tensor(share.rows[None], share.values, table.host.shape, check_invariants=False)
        for share in shares
    )
    for other in others:
        total += other
    return total.coalesce()


def _put_sparse(table: TableRows, mean: Tensor) -> None:
    gradient = by_rows.gradient_of(table.host)
    if gradient is None:
        table.host.grad = mean
    else:
        gradient.copy_(mean)


def _dense_sum(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    """The rows of all shares, and their sums. A rank adds zeros to rows that it lacks, as with the whole gradient."""
    rows = torch.unique(torch.cat([share.rows for share in shares]))
    parts = (_at(rows, share) for share in shares)
    total = next(parts)
    for part in parts:  # one at a time: each takes as much memory as the sum
        total += part
    return rows, total


def _at(rows: Tensor, share: Share) -> Tensor:
    spread = share.values.new_zeros((len(rows), *share.values.shape[1:]))
    return spread.index_copy_(0, torch.searchsorted(rows, share.rows), share.values)


def _put_rows(table: TableRows, rows: Tensor, mean: Tensor) -> None:
    host = table.host
    gradient = by_rows.gradient_of(host)
    if gradient is not None and gradient.layout == torch.strided:
        gradient.index_copy_(0, rows, mean)
    elif table.steps is not None:
        host.grad = torch.sparse_coo_tensor(rows[None], mean, host.shape, check_invariants=False, is_coalesced=True)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            host.grad = torch.zeros_like(host).index_copy_(0, rows, mean)
