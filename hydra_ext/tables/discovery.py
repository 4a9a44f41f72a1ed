"""Which weights are tables: those of embeddings alone that ask for sparse gradients, or that are too large to move.

And what a run does with them. The modules that look rows up are imported for models that have tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.blocks import Table, chosen
from hydra_ext.calls import is_compiled
from hydra_ext.optim.host_optimizer import HostOptimizer

if TYPE_CHECKING:
    from hydra_ext.tables.disk_home import DiskHome
    from hydra_ext.tables.lookup import TableRows
    from hydra_ext.tables.report import TableReport

# A weight of more than this part of the budget moves by rows: as a block it would leave no room for the next block.
_BLOCKS_PER_BUDGET = 2

_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
_COMPILED = "OptimizedModule"  # what torch.compile returns, whose class only importing Dynamo would give


def find_tables(model: nn.Module, *, budget: int, blocks: Sequence[nn.Module | str] | None = None) -> list[Table]:
    """The weights of which rows move.

    They are the weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, and those of more than half
    of the budget. They are contiguous, no other module has such a weight, and no compiled module or module of
    ``blocks`` is around.

    Args:
        model: Any module.
        budget: Device bytes.
        blocks: Modules, or their names, that move as one.

    Raises:
        UnsupportedModel: ``blocks`` names a module that the model does not have, or one inside another.
    """
    whole = chosen(model, blocks or ())
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, []).append(module)
    inside = {module for outer in _whole(model, whole) for module in outer.modules()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        Table(names[parameter], parameter, tuple(modules), all(module.sparse for module in modules))
        for parameter, modules in users.items()
        if parameter.numel() > 0
        and parameter.is_contiguous()  # other rows would lie differently on the device, and torch sum them otherwise
        and all(_looks_up(module) and module not in inside for module in modules)
        and (all(module.sparse for module in modules) or parameter.nbytes > budget // _BLOCKS_PER_BUDGET)
    ]


def _whole(model: nn.Module, named: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose weights move whole, whatever they are."""
    return (
        module
        for module in model.modules()
        if module in named or is_compiled(module) or type(module).__name__ == _COMPILED
    )


def _looks_up(module: nn.Module) -> bool:
    """Whether a module does nothing with its weight but look rows up, as torch's embeddings do."""
    return (
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and type(module).forward in _FORWARDS
        and "forward" not in module.__dict__
        and [parameter is not None for parameter in module._parameters.values()] == [True]
    )


def can_be_on_disk(table: Table, optimizer: HostOptimizer | None) -> bool:
    """Whether steps change a table by rows, or none does, so that nothing needs all of it on the host.

    Args:
        table: As :func:`find_tables` has found it, with the types that its rows have elsewhere.
        optimizer: That makes the steps; None if nothing is trained.
    """
    from hydra_ext.tables import watching

    weight = table.weight
    casts = table.dtype not in (None, weight.dtype) or table.gradient_dtype is not None
    sparse = any(module.sparse for module in table.modules)
    fits = weight.dtype == torch.float32 and (weight.is_meta or watching.can_be_watched(weight))
    if optimizer is None or not weight.requires_grad:
        return fits
    return fits and not casts and not sparse and optimizer.can_step_rows(weight)


# ---- a run's tables --------------------------------------------------------------------------------------------------


def table_rows(
    tables: Sequence[Table], device: torch.device, on_disk: Mapping[nn.Parameter, DiskHome]
) -> list[TableRows]:
    """The rows of these tables, which the device looks up.

    Args:
        on_disk: The tables whose home is the disk, and where they are there.
    """
    if not tables:
        return []
    from hydra_ext.tables.lookup import TableRows

    return [TableRows(table, device, on_disk.get(table.weight)) for table in tables]


def open_tables(tables: Sequence[TableRows], gate: _C.WindowGate, optimizer: torch.optim.Optimizer | None) -> None:
    """The context of these tables begins: modules show faces in their places while a window is open."""
    if not tables:
        return
    from hydra_ext.tables.face import TableFace

    for table in tables:
        table.open(optimizer)
        gate.show(table.host, TableFace.of(table))


def report_on(tables: Sequence[TableRows]) -> TableReport | None:
    """The report on these tables; None if there are none."""
    if not tables:
        return None
    from hydra_ext.tables.report import DiskReport, TableReport

    homes = [table.disk.report() for table in tables if table.disk is not None]
    return TableReport(
        names=tuple(table.name for table in tables),
        nbytes=sum(table.host.nbytes for table in tables),
        rows_moved_bytes=sum(table.moved.rows for table in tables),
        rows_written_back_bytes=sum(table.moved.written_back for table in tables),
        gradients_moved_bytes=sum(table.moved.gradients for table in tables),
        gradients_averaged_bytes=sum(table.moved.averaged for table in tables),
        stepped_by_rows=tuple(table.name for table in tables if table.steps is not None),
        disk=DiskReport(
            nbytes=sum(home.nbytes for home in homes),
            read_bytes=sum(home.read_bytes for home in homes),
            written_bytes=sum(home.written_bytes for home in homes),
        ),
    )
