"""``torch.amp.GradScaler`` with gradients on the host and a scale on the device.

The scaler copies its factors to the gradients' device without waiting for the copies. Copies to the host race with
their use: gradients are unscaled by stale memory, and the flag for an infinity that was found is overwritten. While a
context is open on a GPU, copies to the host are synchronous.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.amp import grad_scaler

_lock = threading.Lock()
_users = 0
_before: Any = None


def _get(replicator: Any, device: torch.device) -> torch.Tensor:
    known: dict[torch.device, torch.Tensor] = replicator._per_device_tensors
    if torch.device(device).type == "cpu" and device not in known:
        known[device] = replicator.master.to(device=device, non_blocking=False, copy=True)
    return _before(replicator, device)  # type: ignore[no-any-return]


def read_blocking() -> None:
    """Makes the scaler's copies to the host synchronous, until as many calls of :func:`read_as_before`."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = grad_scaler._MultiDeviceReplicator.get
            grad_scaler._MultiDeviceReplicator.get = _get  # type: ignore[method-assign, assignment]


def read_as_before() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and grad_scaler._MultiDeviceReplicator.get is _get:
            grad_scaler._MultiDeviceReplicator.get = _before  # type: ignore[method-assign]
