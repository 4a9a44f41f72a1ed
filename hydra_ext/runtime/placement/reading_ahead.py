"""Rows that a later step looks up are read from the disk while this one computes.

The system's cache keeps them. So nothing has to be kept up to date, and no number depends on whether it was done.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hydra_ext.errors import InvalidArgument
from hydra_ext.runtime import engine


def read_ahead(rows: Mapping[nn.Module, Tensor]) -> None:
    """Has the system read rows of tables that are at home on the disk, ahead of their lookup.

    It returns at once and changes no number. Call it with the indices of a later batch, in any thread: the loader
    knows them. For tables on the host, and outside their contexts, it does nothing.

    Args:
        rows: Indices, int32 or int64 of any shape, by the ``nn.Embedding`` or ``nn.EmbeddingBag`` that will look them
            up.

    Raises:
        InvalidArgument: A key is another module.
        IndexError: The table has no such row.
    """
    for module, indices in rows.items():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise InvalidArgument(
                f"read_ahead was given a {type(module).__name__}: give the indices by the nn.Embedding or "
                "nn.EmbeddingBag that will look them up"
            )
        for run in engine.everywhere():
            for table in run.tables:
                if table.looks_up(module):
                    table.read_ahead(indices)
