"""Running out of device memory in a step: what is taken for it, and what the user is told at last."""

from __future__ import annotations

import torch

from hydra_ext.errors import BudgetTooSmall

OUT_OF_MEMORY = (torch.OutOfMemoryError, BudgetTooSmall)
PHRASE = " out of memory."  # which tools ask for that look for a batch size that fits
_ADVICE = (
    "Raise budget=; or let activations leave the device, or make them again (activations=hydra_ext.Offload() or "
    "hydra_ext.Recompute(), recompute=True in run.step); or run fewer microbatches together (round_size= in run.step), "
    "name smaller blocks=, or shrink the batch."
)


def told(error: BaseException, tried: str) -> torch.OutOfMemoryError:
    """The error as the user gets it: with what run.step has tried, and with the options there are."""
    text = str(error)
    parts = [text if PHRASE in text else f"hydra_ext is out of memory. {text}", tried]
    if "round_size=" not in text:
        parts.append(_ADVICE)
    return torch.OutOfMemoryError(" ".join(part for part in parts if part))
