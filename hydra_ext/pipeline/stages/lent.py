"""Memory that a stage's result may share with what outlives the forward: the next microbatch may write to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hydra_ext.split.stages.tensors import storage_key, tensors_of
from hydra_ext.state.layout import copied

_NOT_TENSORS = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers"}


class Lent:
    """What a module holds, and what it got: to be made when a forward has ended.

    Parameters, buffers and attributes count, also in a list, tuple or dict; what is deeper in objects of the user's is
    not seen.
    """

    def __init__(self, module: nn.Module, microbatch: Any) -> None:
        self._keys = {storage_key(tensor) for tensor in (*_held(module), *tensors_of(microbatch))}

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor without a graph; a copy where its memory is lent."""
        return copied(tensor) if storage_key(tensor) in self._keys else tensor.detach()


def _held(root: nn.Module) -> Iterator[Tensor]:
    for module in root.modules():
        for attribute, value in module.__dict__.items():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple, dict)) and attribute not in _NOT_TENSORS:
                members = value.values() if isinstance(value, dict) else value
                yield from (member for member in members if isinstance(member, Tensor))
