"""The state of what a caller has beside model and optimizer: a schedule of learning rates, a ``GradScaler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from hydra_ext.checkpoint.format.values import BadValue, Encoder, decode
from hydra_ext.checkpoint.optimizer_state import kind
from hydra_ext.errors import UnsupportedState


class Stateful(Protocol):
    """A schedule of ``torch.optim.lr_scheduler``, a ``GradScaler``, or what has such methods."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def capture(helper: Stateful | None, name: str, encoder: Encoder) -> dict[str, Any] | None:
    """As JSON has it; None for one that is not there.

    Raises:
        UnsupportedState: something of it cannot be given back, or it is no dict.
    """
    if helper is None:
        return None
    state = helper.state_dict()
    if not isinstance(state, dict):
        raise UnsupportedState(f"{name}=: state_dict() of {kind(helper)} gives a {type(state).__name__}, and no dict")
    return {"class": kind(helper), "state": encoder.encode(state, name)}


def check(saved: Any, name: str, fetch: Callable[[str], Tensor]) -> None:
    """
    Args:
        fetch: gives any tensor for a tensor's name; KeyError where there is none.

    Raises:
        BadValue: this is not what :func:`capture` gives.
    """
    known = saved is None or (isinstance(saved, dict) and isinstance(saved.get("class"), str))
    if not known or (saved and not isinstance(decode(saved.get("state"), fetch, name), dict)):
        raise BadValue(f"the state of the {name} is no table")


def differences(helper: Stateful | None, name: str, saved: Any) -> list[str]:
    """Between one and what :func:`check` has found to be the state of one."""
    before, now = saved and saved["class"], helper and kind(helper)
    return [] if before == now else [f"{name}= was {before!r:.200}, and is {now!r}"]


def restore(helper: Stateful | None, saved: Any, fetch: Callable[[str], Tensor]) -> None:
    """
    Args:
        fetch: reads a tensor.
    """
    if helper is not None:
        state = decode(saved["state"], fetch)
        if state:  # that of a scaler that is switched off is empty
            helper.load_state_dict(state)
