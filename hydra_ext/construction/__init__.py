"""Builds a model without ever holding all of it in memory."""

from hydra_ext.construction.operations import give_back_freed
from hydra_ext.construction.recipes import check_fillable, fill, has_source, in_groups, materialize

__all__ = ["check_fillable", "fill", "give_back_freed", "has_source", "in_groups", "materialize"]
