"""Emulated machines for gpu_step.py: a card, its link and its host by published figures, with a clock that is virtual.

Importing this module with ``--emulated`` among the arguments puts the emulated CUDA machine under torch, so it goes
before ``import torch``. Nothing is computed then, and no figure that comes out was measured on a card.

Peaks are those of :mod:`hydra_ext.profile.cards`, which names their sources. Programs reach a part of them:

==============  ====  =================================================================================================
Part            Of    Why
==============  ====  =================================================================================================
``PRODUCTS``    0.70  an H100 keeps up about 600 of 989 TFLOP/s under its power limit; an H200 reaches 770 for a while
``LINK``        0.85  53.5 of 63 GB/s, as published for weights that are streamed over generation 5 (Surogate, RTX 5090)
``MEMORY``      0.80  of the device: what large elementwise kernels reach
``HOST``        0.70  of the host: what loops over several arrays reach on all channels
==============  ====  =================================================================================================

A kernel or a copy takes two microseconds at least; a launch costs the host five, another call of the runtime one.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from typing import Any

if "--emulated" in sys.argv:
    import emulated_cuda

    emulated_cuda.load()

import torch
from torch import Tensor
from transformers import masking_utils

from hydra_ext import _C
from hydra_ext.optim import AdamW
from hydra_ext.profile.cards import CARDS, Card

PRODUCTS, LINK, MEMORY, HOST = 0.70, 0.85, 0.80, 0.70
OPERATION_SECONDS, LAUNCH_SECONDS, CALL_SECONDS = 2e-6, 5e-6, 1e-6
GENERATIONS = {"pcie4": 31.5e9, "pcie5": 63e9}  # bytes a second of 16 lanes, one direction, after encoding

_CARDS = {"h100": "h100-80", "h200": "h200-141", "rtx4090": "rtx4090-24", "a10": "a10-24"}
MACHINES = ("h100-pcie4", "h100-pcie5", "h200-pcie4", "h200-pcie5", "rtx4090-pcie4", "a10-pcie4")


@dataclass(frozen=True)
class Machine:
    """What a card, its link and its host do in a second, as programs reach it."""

    name: str
    card: Card
    products: float
    link: float
    device_memory: float
    host_memory: float

    @classmethod
    def named(cls, name: str) -> Machine:
        card_name, generation = name.split("-")
        card = CARDS[_CARDS[card_name]]
        return cls(
            name=name,
            card=card,
            products=PRODUCTS * card.half_flops,
            link=LINK * GENERATIONS[generation],
            device_memory=MEMORY * card.memory_bytes_per_second,
            host_memory=HOST * card.host_bytes_per_second,
        )

    def start(self) -> None:
        """Starts the clock. From now on kernels, copies and the host's optimizer only take time."""
        emulated_cuda.configure(devices=1, bytes=self.card.memory_bytes)
        emulated_cuda.start_clock(
            half_flops=self.products,
            full_flops=PRODUCTS * self.card.full_flops,
            device_memory=self.device_memory,
            to_device=self.link,
            to_host=self.link,
            host_memory=self.host_memory,
            operation_seconds=OPERATION_SECONDS,
            launch_seconds=LAUNCH_SECONDS,
            call_seconds=CALL_SECONDS,
        )
        _take_host_work(emulated_cuda.host_work_address())
        answer_as_one_sequence()
        time.perf_counter = time.monotonic = seconds
        time.monotonic_ns = lambda: int(seconds() * 1e9)

    def stop(self) -> None:
        _take_host_work(0)
        emulated_cuda.stop_clock()

    def describe(self) -> str:
        return (
            f"EMULATION of {self.name}, nothing computed and nothing measured on a card: products at "
            f"{self.products / 1e12:.0f} TFLOP/s, device memory {self.device_memory / 1e9:.0f} GB/s, link "
            f"{self.link / 1e9:.1f} GB/s a direction, host memory {self.host_memory / 1e9:.0f} GB/s"
        )


def answer_as_one_sequence() -> None:
    """Lets transformers ask the device whether several sequences are packed into one, and hear that there is one.

    It waits for the answer before each forward. Under the clock the answer would be a zero, which says the opposite.
    """
    ask = masking_utils.find_packed_sequence_indices

    def asked(position_ids: Tensor) -> None:
        ask(position_ids)

    masking_utils.find_packed_sequence_indices = asked


def _take_host_work(function: int) -> None:
    take = ctypes.CDLL(_C.__file__).hydra_take_host_work
    take.argtypes = [ctypes.c_void_p]
    take(function)


_perf_counter = time.perf_counter


def seconds() -> float:
    """The time now: virtual under a clock. What plans steps by time sees this one, too."""
    return float(_report()["seconds"]) if "emulated_cuda" in sys.modules else _perf_counter()


def _report() -> dict[str, Any]:
    return emulated_cuda.clock_report()


@dataclass(frozen=True)
class Interval:
    """Seconds, per step, of what the units did, and of what the processors waited for."""

    busy: dict[str, float]
    waited: dict[str, float]

    def describe(self) -> str:
        busy = {unit: seconds for unit, seconds in self.busy.items() if unit != "program"}
        return (
            f"in a step the units were busy: {_listed(busy)}; saved tensors count with the copies\n"
            f"in a step the processors had nothing to do, and waited for: {_listed(self.waited)}"
        )


_NAMES = {
    "program": "the host's program",
    "processors": "processors",
    "to_device": "copies to the device",
    "to_host": "copies to the host",
    "host_memory": "the host's memory",
}


def _listed(seconds_of: dict[str, float]) -> str:
    return ", ".join(f"{_NAMES[unit]} {taken:.3f} s" for unit, taken in seconds_of.items())


class Watch:
    """Looks at the clock now, and says what has happened since."""

    def __init__(self) -> None:
        self._before = _report()

    def since(self, steps: int) -> Interval:
        now = _report()
        return Interval(
            *(
                {unit: (value - self._before[kind][unit]) / steps for unit, value in now[kind].items()}
                for kind in ("busy", "waited")
            )
        )


def give_state(optimizer: AdamW) -> None:
    """Makes the optimizer's state without touching it, as if a step had been taken."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": _untouched(parameter, torch.float32),
                "exp_avg_sq": _untouched(parameter, torch.float32),
                "master_lower": _untouched(parameter, torch.int16),
            }


def _untouched(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
