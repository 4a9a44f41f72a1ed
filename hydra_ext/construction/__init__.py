"""Builds a model without ever holding all of it in memory."""

from hydra_ext.construction.operations import give_back_freed
from hydra_ext.construction.recipes import check_fillable, fill, in_groups, materialize, was_materialized

__all__ = ["check_fillable", "fill", "give_back_freed", "in_groups", "materialize", "was_materialized"]
