"""The devices of a fleet, as values that travel to workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hydra_ext.errors import InvalidArgument, InvalidDevice
from hydra_ext.policy import SimulatedDevice, parse_bytes
from hydra_ext.runtime.placement.host_memory import memory_limit

_SHARE_OF_HOST = 0.5  # of the host's memory, for all simulated devices together
_SHARE_OF_CARD = 0.9  # of a card's memory, where the budget is "auto"
_DEFAULT_HOST = 2**33


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, and the bytes that a job may use there.

    Attributes:
        name: Of the card, or "simulated".
        card: Number of the CUDA device; None for a simulated one.
        simulated: Settings of a simulated device; None for a CUDA device.
        budget: Device bytes.
    """

    name: str
    card: int | None
    simulated: SimulatedDevice | None
    budget: int

    @property
    def given(self) -> SimulatedDevice | str:
        """As ``offload(device=...)`` takes it."""
        return f"cuda:{self.card}" if self.simulated is None else self.simulated

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.card is None else torch.device("cuda", self.card)

    def describe(self) -> dict[str, Any]:
        """The device as JSON."""
        simulated = None
        if self.simulated is not None:
            simulated = {field.name: getattr(self.simulated, field.name) for field in fields(SimulatedDevice)}
        return {"name": self.name, "card": self.card, "simulated": simulated, "budget": self.budget}

    @staticmethod
    def of(described: dict[str, Any]) -> Device:
        simulated = described["simulated"]
        settings = None if simulated is None else SimulatedDevice(**simulated)
        return Device(**{**described, "simulated": settings})

    def kind(self) -> dict[str, Any]:
        """What two devices with the same speed and room have in common."""
        return self.describe() | {"card": None}

    def moved(self, microbatch: Any) -> Any:
        """A microbatch with its tensors on the device."""
        if self.simulated is not None:
            return microbatch
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.torch_device), microbatch)

    def synchronize(self) -> None:
        if self.simulated is None:
            torch.cuda.synchronize(self.torch_device)


def choose(given: int | Sequence[SimulatedDevice | str] | None, budget: int | str) -> list[Device]:
    """The devices of this machine that a fleet uses.

    Args:
        given: Devices, or the number of them; None for all CUDA devices, or one simulated device without any.
        budget: Bytes of each, or ``"auto"``: 90 % of a card's memory, or half of the host's for all simulated ones.

    Raises:
        InvalidArgument: There are no devices, or they are not given as here.
        InvalidBudget: The budget is not a size.
        InvalidDevice: A device does not exist.
    """
    cards = torch.cuda.device_count()
    if given is None:
        given = cards or 1
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        if cards and given > cards:
            raise InvalidDevice(f"devices={given}: this machine has {cards} CUDA devices")
        given = [f"cuda:{i}" for i in range(given)] if cards else [SimulatedDevice()] * given
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InvalidArgument(f"devices={given!r}: give a number from 1 on, or a list of devices such as ['cuda:0']")
    return [_device(each, budget, len(given)) for each in given]


def _device(given: SimulatedDevice | str, budget: int | str, count: int) -> Device:
    if isinstance(given, SimulatedDevice) or given == "simulated":
        simulated = given if isinstance(given, SimulatedDevice) else SimulatedDevice()
        if simulated.faults is not None:
            raise InvalidArgument(
                "a simulated device with scripted faults cannot be sent to workers: leave faults= out"
            )
        whole = int(_SHARE_OF_HOST * (memory_limit() or _DEFAULT_HOST))
        size = whole // count if budget == "auto" else parse_bytes(budget)
        return Device(name="simulated", card=None, simulated=simulated, budget=size)
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InvalidDevice(
            f"devices: {given!r} is no device: give 'cuda:0', 'simulated' or a SimulatedDevice"
        ) from error
    if device.type != "cuda" or not 0 <= (device.index or 0) < torch.cuda.device_count():
        raise InvalidDevice(f"devices: there is no {given!r} here: {torch.cuda.device_count()} CUDA devices were found")
    card = device.index or 0
    total = torch.cuda.get_device_properties(card).total_memory
    size = int(_SHARE_OF_CARD * total) if budget == "auto" else parse_bytes(budget)
    return Device(name=torch.cuda.get_device_name(card), card=card, simulated=None, budget=size)
