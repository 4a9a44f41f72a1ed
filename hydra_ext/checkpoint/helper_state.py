"""The state of the caller's helpers beside model and optimizer: a schedule of learning rates, a ``GradScaler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from hydra_ext.checkpoint.format.values import BadValue, Encoder, decode
from hydra_ext.checkpoint.optimizer_state import kind
from hydra_ext.errors import UnsupportedState


class Stateful(Protocol):
    """A schedule of ``torch.optim.lr_scheduler``, a ``GradScaler``, or another object with these methods."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def capture(helper: Stateful | None, name: str, encoder: Encoder) -> dict[str, Any] | None:
    """A helper's state as JSON; None for no helper.

    Raises:
        UnsupportedState: The state cannot be restored from JSON, or is not a dict.
    """
    if helper is None:
        return None
    state = helper.state_dict()
    if not isinstance(state, dict):
        raise UnsupportedState(
            f"{name}=: state_dict() of {kind(helper)} gives a {type(state).__name__}, not a dict: let it return a dict"
        )
    return {"class": kind(helper), "state": encoder.encode(state, name)}


def check(saved: Any, name: str, fetch: Callable[[str], Tensor]) -> None:
    """Checks that a value is what :func:`capture` returns.

    Args:
        fetch: Returns any tensor for a saved tensor's name; raises KeyError if there is no such tensor.

    Raises:
        BadValue: The value is something else.
    """
    known = saved is None or (isinstance(saved, dict) and isinstance(saved.get("class"), str))
    if not known or (saved and not isinstance(decode(saved.get("state"), fetch, name), dict)):
        raise BadValue(f"the state of the {name} is not a table")


def differences(helper: Stateful | None, name: str, saved: Any) -> list[str]:
    """Differences between a helper and a saved state that :func:`check` has passed."""
    before, now = saved and saved["class"], helper and kind(helper)
    return [] if before == now else [f"{name}= was {before!r:.200}, and is {now!r}"]


def restore(helper: Stateful | None, saved: Any, fetch: Callable[[str], Tensor]) -> None:
    """Loads a saved state into a helper.

    Args:
        fetch: Reads a saved tensor by its name.
    """
    if helper is not None:
        state = decode(saved["state"], fetch)
        # The state of a disabled scaler is empty, and an enabled one refuses it.
        if state or not isinstance(helper, GradScaler):
            helper.load_state_dict(state)
