"""Techniques by name."""

from __future__ import annotations

import importlib

from hydra_ext.errors import InvalidArgument
from hydra_ext.fleet.techniques.interface import Technique

BUILT_IN = {
    "plain": "hydra_ext.fleet.techniques.plain:Plain",
    "offload": "hydra_ext.fleet.techniques.offloading:Offloading",
    "shared offload": "hydra_ext.fleet.techniques.offloading:Sharing",
    "common base": "hydra_ext.fleet.techniques.common:CommonBase",
    "data parallel": "hydra_ext.fleet.techniques.offloading:DataParallel",
    "fsdp": "hydra_ext.fleet.techniques.sharded:FullySharded",
    "pipeline": "hydra_ext.fleet.techniques.staged:Staged",
    "pipeline 2bw": "hydra_ext.fleet.techniques.staged:Delayed",
}
# Jobs that share a process also share what their modules keep: so it has to be asked for.
DEFAULT = tuple(name for name in BUILT_IN if name not in ("shared offload", "common base"))


def technique_named(place: str) -> Technique:
    """A technique by the place of its class, as ``module:Class``.

    Raises:
        InvalidArgument: There is no such class, or it is no :class:`Technique`.
    """
    module, _, name = BUILT_IN.get(place, place).partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"techniques: {place!r} cannot be found: give one of {', '.join(map(repr, BUILT_IN))}, or a class as "
            "'module:Class'"
        ) from error
    if not isinstance(found, type) or not issubclass(found, Technique):
        raise InvalidArgument(f"techniques: {place!r} is no class derived from hydra_ext.fleet.Technique")
    return found()
