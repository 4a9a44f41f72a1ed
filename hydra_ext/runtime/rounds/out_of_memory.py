"""Errors of a step that mean device memory has run out, and the error that the user gets."""

from __future__ import annotations

import torch

from hydra_ext.errors import BudgetTooSmall

OUT_OF_MEMORY = (torch.OutOfMemoryError, BudgetTooSmall)
PHRASE = " out of memory."  # tools that search for a batch size that fits look for this phrase
_ADVICE = (
    "Raise budget=; or offload or recompute activations (activations=hydra_ext.Offload() or hydra_ext.Recompute(), "
    "recompute=True in run.step); or run fewer microbatches together (round_size= in run.step), name smaller blocks=, "
    "or shrink the batch."
)


def told(error: BaseException, tried: str) -> torch.OutOfMemoryError:
    """The error for the user: the original text, the attempts that run.step has made, and remedies."""
    text = str(error)
    parts = [text if PHRASE in text else f"hydra_ext is out of memory. {text}", tried]
    if "round_size=" not in text:
        parts.append(_ADVICE)
    return torch.OutOfMemoryError(" ".join(part for part in parts if part))
