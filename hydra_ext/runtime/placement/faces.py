"""Gives a device parameter the class and the attributes of its host parameter.

Users set attributes on parameters (``weight.infshape``, ``weight.gain``), and libraries give them classes with methods
of their own. Both faces share one dictionary of attributes, so those that a forward sets exist afterwards.
"""

from __future__ import annotations

import torch


def dress(face: torch.Tensor, host: torch.Tensor) -> None:
    # Bypasses a __setattr__ of the class's own.
    object.__setattr__(face, "__dict__", host.__dict__)
    object.__setattr__(face, "__class__", type(host))


def can_dress(host: torch.Tensor) -> bool:
    """Whether :func:`dress` works. It does not for a class with ``__slots__``, whose values are in no dictionary."""
    try:
        dress(torch.empty(0, device="cpu"), host)
    except TypeError:
        return False
    return True
