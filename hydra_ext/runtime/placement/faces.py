"""What Python sees of a device parameter: the class and the attributes of its host parameter.

Users keep things on parameters (``weight.infshape``, ``weight.gain``), and libraries give them classes with methods of
their own. The attributes are one dictionary for both, so that what a forward sets is there afterwards.
"""

from __future__ import annotations

import torch


def dress(face: torch.Tensor, host: torch.Tensor) -> None:
    # Past a __setattr__ of the class's own.
    object.__setattr__(face, "__dict__", host.__dict__)
    object.__setattr__(face, "__class__", type(host))


def can_dress(host: torch.Tensor) -> bool:
    """Not where the class has slots: values that are in no dictionary."""
    try:
        dress(torch.empty(0, device="cpu"), host)
    except TypeError:
        return False
    return True
