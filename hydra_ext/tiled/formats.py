"""Memory formats of maps, which are those of plain torch: contiguous, or channels last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._prims_common import suggest_memory_format


def format_of(*maps: torch.Tensor) -> torch.memory_format:
    """Channels last if one of the maps, or parts of maps, has it, as for the result of torch's convolutions."""
    last = any(each.dim() == 4 and suggest_memory_format(each) == torch.channels_last for each in maps)
    return torch.channels_last if last else torch.contiguous_format


def empty_map(
    shape: Sequence[int], dtype: torch.dtype, *like: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """An empty map with the memory format of ``like``, on the host unless a device is given."""
    return torch.empty(shape, dtype=dtype, device=device, memory_format=format_of(*like))
