"""Building a model without ever holding all of it."""

from hydra_ext.construction.recipes import fill, materialize

__all__ = ["fill", "materialize"]
