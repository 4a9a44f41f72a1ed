"""What the nodes of a pipeline begin an epoch with, which a state from between two epochs has to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchdata.nodes import BaseNode

from hydra_ext.data.stages.ahead import Ahead, below
from hydra_ext.data.stages.order import Batch, Shuffle
from hydra_ext.data.stages.samples import Keys, Samples

# Counts of this package's nodes and torchdata's, from which an epoch's order follows.
_COUNTS = ("_epoch", "epoch", "_started")
_GENERATOR = "generator"


def nodes_of(root: BaseNode[Any]) -> list[BaseNode[Any]]:
    """The nodes of a pipeline, each once, in the order of the data."""
    found: list[BaseNode[Any]] = []
    for source in below(root):
        found += [node for node in nodes_of(source) if all(node is not each for each in found)]
    return [*found, root]


def kinds(nodes: Sequence[BaseNode[Any]]) -> list[str]:
    """What this package's nodes are, as far as a state depends on it."""
    own = [node for node in nodes if isinstance(node, Ahead | Batch | Shuffle | Keys | Samples)]
    return [type(node).__name__ + (" with a generator" if _generator(node) else "") for node in own]


def taken(nodes: Sequence[BaseNode[Any]]) -> list[dict[str, Any]]:
    """As JSON has it, of each node that has something of the kind."""
    return [held for node in nodes if (held := _held(node))]


def put_back(nodes: Sequence[BaseNode[Any]], beginnings: Sequence[Mapping[str, Any]]) -> None:
    """
    Args:
        beginnings: What :func:`taken` has returned.

    Raises:
        KeyError, TypeError, ValueError: They are those of other nodes.
    """
    for node, held in zip(filter(_held, nodes), beginnings, strict=True):
        vars(node).update({name: held[name] for name in _counts(node)})
        if (generator := _generator(node)) is not None:
            generator.set_state(torch.frombuffer(bytearray.fromhex(held[_GENERATOR]), dtype=torch.uint8))


def _held(node: BaseNode[Any]) -> dict[str, Any]:
    generator = _generator(node)
    kept = {} if generator is None else {_GENERATOR: generator.get_state().numpy().tobytes().hex()}
    return {**_counts(node), **kept}


def _counts(node: BaseNode[Any]) -> dict[str, int]:
    return {name: count for name in _COUNTS if isinstance(count := vars(node).get(name), int)}


def _generator(node: BaseNode[Any]) -> torch.Generator | None:
    found = vars(node).get("_generator")
    return found if isinstance(found, torch.Generator) else None
