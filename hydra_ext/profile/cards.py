"""Speeds of devices: of known cards, by the figures that their makers publish, and of this machine, by a measurement.

Rates are peaks without sparsity, with sums in float32 for the half precisions. Real programs reach a part of them.

======================  =========================================================================================
Card                    Source
======================  =========================================================================================
rtx4090-24              NVIDIA Ada GPU Architecture, V2.01, appendix A: 82.6 and 165.2 TFLOPS, 1008 GB/s
rtx3090-24              NVIDIA Ampere GA102 GPU Architecture, V2.0, appendix A: 35.6 and 71 TFLOPS, 936 GB/s
a10-24                  NVIDIA A10 datasheet: 31.2 and 125 TFLOPS, 600 GB/s
l4-24                   NVIDIA L4 datasheet: 30.3 and 242 TFLOPS with sparsity, which is 121 without; 300 GB/s
a100-40, a100-80        NVIDIA A100 datasheet: 19.5 and 312 TFLOPS; 1555 GB/s (40 GB), 2039 GB/s (80 GB, SXM)
h100-80                 NVIDIA H100 datasheet, SXM: 67 TFLOPS, 1979 with sparsity, which is 989 without; 3.35 TB/s
h200-141                NVIDIA H200 datasheet, SXM: as the H100; 4.8 TB/s
t4-16                   NVIDIA T4 datasheet: 8.1 and 65 TFLOPS, 320 GB/s; no tensor cores for bfloat16
v100-16                 NVIDIA V100 datasheet, PCIe: 14 and 112 TFLOPS, 900 GB/s; no tensor cores for bfloat16
======================  =========================================================================================

The link is PCI Express with 16 lanes, in one direction, after its encoding: 15.75 GB/s for generation 3, 31.5 for 4,
63 for 5. Memory is what the maker names, in units of 2^30 bytes; the H200's 141 GB are in units of 10^9 bytes.

What the host's memory gives is assumed, as no card says it: two channels of DDR4-3200 beside a GeForce, 51.2 GB/s;
eight in a server, 204.8 GB/s, or of DDR5-4800 beside an H100 or H200, 307.2 GB/s (JEDEC JESD79-4 and JESD79-5).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hydra_ext.errors import InvalidArgument
from hydra_ext.policy import parse_bytes

_TERA, _GIGA, _GIB = 10**12, 10**9, 2**30
_GENERATION_3, _GENERATION_4, _GENERATION_5 = 15.75 * _GIGA, 31.5 * _GIGA, 63 * _GIGA
_DESKTOP, _SERVER, _NEW_SERVER = 51.2 * _GIGA, 204.8 * _GIGA, 307.2 * _GIGA  # bytes a second of a host's memory

USABLE = 0.92  # of a card's memory: the rest is the driver's, and lost between allocations
_MEASURED_SECONDS = 0.025  # of each of the two measurements
_SIDE = 512  # of the matrices that are multiplied
_COPIED = 2**23  # bytes of a copy: more than caches hold


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a device computes, and how fast it reads and writes its memory."""

    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.flops_per_second > 0 and self.bytes_per_second > 0):
            raise InvalidArgument(f"{self}: give positive numbers")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device by its published figures.

    Attributes:
        name: Model and memory, such as ``rtx4090-24``.
        memory_bytes: Of its memory.
        half_flops: Operations a second in float16 and bfloat16.
        full_flops: Operations a second in float32.
        memory_bytes_per_second: Between its memory and its processors.
        link_bytes_per_second: Between host and device, in one direction.
        host_bytes_per_second: Between the host's memory and its processors, where optimizers run.
        has_fast_bfloat16: Whether bfloat16 is as fast as float16; if not, it is as float32.
    """

    name: str
    memory_bytes: int
    half_flops: float
    full_flops: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    host_bytes_per_second: float = _DESKTOP
    has_fast_bfloat16: bool = True

    def speed(self, dtype: torch.dtype) -> Speed:
        """Its speed for a dtype of weights and activations."""
        fast = (torch.float16, torch.bfloat16) if self.has_fast_bfloat16 else (torch.float16,)
        flops = self.half_flops if dtype in fast else self.full_flops
        return Speed(flops_per_second=flops, bytes_per_second=self.memory_bytes_per_second)


def _card(
    name: str,
    gib: int,
    half: float,
    full: float,
    memory: float,
    link: float,
    host: float,
    *,
    has_fast_bfloat16: bool = True,
) -> Card:
    return Card(
        name=name,
        memory_bytes=gib * _GIB,
        half_flops=half * _TERA,
        full_flops=full * _TERA,
        memory_bytes_per_second=memory * _GIGA,
        link_bytes_per_second=link,
        host_bytes_per_second=host,
        has_fast_bfloat16=has_fast_bfloat16,
    )


_ALL = (
    _card("rtx4090-24", 24, 165.2, 82.6, 1008, _GENERATION_4, _DESKTOP),
    _card("rtx3090-24", 24, 71, 35.6, 936, _GENERATION_4, _DESKTOP),
    _card("a10-24", 24, 125, 31.2, 600, _GENERATION_4, _SERVER),
    _card("l4-24", 24, 121, 30.3, 300, _GENERATION_4, _SERVER),
    _card("a100-40", 40, 312, 19.5, 1555, _GENERATION_4, _SERVER),
    _card("a100-80", 80, 312, 19.5, 2039, _GENERATION_4, _SERVER),
    _card("h100-80", 80, 989.4, 66.9, 3350, _GENERATION_5, _NEW_SERVER),
    _card("h200-141", 141 * _GIGA // _GIB, 989.4, 66.9, 4800, _GENERATION_5, _NEW_SERVER),
    _card("t4-16", 16, 65, 8.1, 320, _GENERATION_3, _SERVER, has_fast_bfloat16=False),
    _card("v100-16", 16, 112, 14, 900, _GENERATION_3, _SERVER, has_fast_bfloat16=False),
)
CARDS = {card.name: card for card in _ALL}


def card_named(name: str) -> Card:
    """Raises InvalidArgument, with the known names, if there is no such card."""
    card = CARDS.get(name)
    if card is None:
        raise InvalidArgument(f"{name!r} is no known card: give one of {', '.join(CARDS)}, or a Card with its figures")
    return card


def link_of(link: float | str | None, card: Card | None) -> float:
    """Bytes a second of a link: the given ones, or the card's, or without a card no limit.

    Raises:
        InvalidArgument: The number is not positive.
    """
    if link is None:
        return math.inf if card is None else card.link_bytes_per_second
    return bytes_per_second(link, named="link")


def bytes_per_second(given: float | str, *, named: str) -> float:
    """The speed that an argument says.

    Raises:
        InvalidArgument: The number is not positive.
    """
    speed = float(parse_bytes(given, named=named)) if isinstance(given, str) else float(given)
    if not speed > 0:
        raise InvalidArgument(f"{named}={given!r}: nothing could move; give bytes a second, such as '25GB'")
    return speed


def speed_of_this_machine(device: torch.device, dtype: torch.dtype) -> Speed:
    """Measures a device for a twentieth of a second: products of matrices, and copies."""
    with torch.no_grad():
        matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
        source = torch.ones(_COPIED // dtype.itemsize, dtype=dtype, device=device)
        target = torch.empty_like(source)
        result = torch.empty_like(matrix)
        product = _fastest(lambda: torch.mm(matrix, matrix, out=result), device)
        copy = _fastest(lambda: target.copy_(source), device)
    return Speed(flops_per_second=2 * _SIDE**3 / product, bytes_per_second=2 * source.nbytes / copy)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several times that work was done: others may use the machine, too."""
    work()
    _wait_for(device)
    end, fastest = time.perf_counter() + _MEASURED_SECONDS, float("inf")
    while (begin := time.perf_counter()) < end or fastest == float("inf"):
        work()
        _wait_for(device)
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
