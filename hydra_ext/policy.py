"""What can be chosen: frozen dataclasses and the text form of sizes. Knows neither torch nor the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from hydra_ext.errors import InvalidArgument, InvalidBudget

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MOST = 2**63 - 1  # what the engine counts in
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str, *, named: str = "budget") -> int:
    """Bytes of a size: a whole number of bytes, or a text such as ``"8GiB"``, ``"512 MiB"``, ``"1.5GB"``.

    Args:
        named: the option that it was given as.

    Raises:
        InvalidBudget: not a positive size.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InvalidBudget(
            f"{named}={size!r} is a {type(size).__name__}: give bytes as an int or a text such as '8GiB'"
        )
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise InvalidBudget(f"{named}={size!r} is no size: write a number and a unit, such as '8GiB' or '512MB'")
        size = int(Fraction(match.group(1)) * unit)
    if size <= 0:
        raise InvalidBudget(f"{named}={size!r} leaves no memory: give a positive number of bytes")
    if size > _MOST:
        raise InvalidBudget(f"{named}={size!r} is more than can be counted: give at most {_MOST} bytes")
    return size


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SimulatedDevice:
    """A device made of host memory: the budget is enforced to the byte, the link can be given a speed.

    Attributes:
        to_device_bytes_per_second: speed of the host-to-device lane; None for as fast as memory copies.
        to_host_bytes_per_second: speed of the device-to-host lane; None likewise.
        latency_seconds: what every transfer takes at least.
        host_memory_bytes_per_second: what optimizer steps that run behind the next forward (:mod:`hydra_ext.optim`) may
            read and write in a second; None for as much as this machine can. A block's update takes at least its bytes
            by this speed.
        poison: fill evicted slots with NaN, so that a stale read shows.
        asynchronous: finish compute late on a lane of its own and check slots then: finds missing waits.
        seed: of the delays in the asynchronous mode.
        faults: scripted faults, for tests (``_C.testing.FaultScript``).
    """

    to_device_bytes_per_second: float | None = None
    to_host_bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    host_memory_bytes_per_second: float | None = None
    poison: bool = True
    asynchronous: bool = False
    seed: int = 0
    faults: Any = None

    def __post_init__(self) -> None:
        for name in ("to_device_bytes_per_second", "to_host_bytes_per_second", "host_memory_bytes_per_second"):
            speed = getattr(self, name)
            if speed is not None and not (_is_number(speed) and speed > 0):
                raise InvalidArgument(f"{name}={speed!r}: give a positive number, or None for no limit")
        if not (_is_number(self.latency_seconds) and 0 <= self.latency_seconds < float("inf")):
            raise InvalidArgument(f"latency_seconds={self.latency_seconds!r}: give a number of seconds, 0 or more")


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Switches for tests and for hunting a fault; all of them cost time.

    Attributes:
        poison_hosts: host parameters read as NaN while forward and backward run, so that a weight taken from the
            wrong face shows in the loss. A penalty on host parameters reads them then and is wrong by this switch
            alone; an optimizer that steps inside backward writes to them, which raises.
        fault_path: serve reads of absent parameters; off, they raise :class:`~hydra_ext.errors.PageFaultError`.
        spill_files: does what ``spill_dir``'s file is asked for, or fails to; the system unless given.
    """

    poison_hosts: bool = False
    fault_path: bool = True
    spill_files: Any = None


@dataclass(frozen=True)
class Keep:
    """Saved tensors stay where they are, as without a stash."""


@dataclass(frozen=True)
class Offload:
    """Saved tensors leave for host memory, and come back ahead of their use. Lossless.

    Attributes:
        which: of vDNN's policies (Rhu et al., MICRO 2016, section 3.3): ``"all"`` tensors; ``"conv"``: the inputs of
            convolutions, while all others stay; or ``"dynamic"``, for a whole model and with a budget: nothing leaves
            if everything fits, else both are timed in the first passes, and the faster one that fits is taken. A pass
            is a forward and its backward.
    """

    which: Literal["all", "conv", "dynamic"] = "all"

    def __post_init__(self) -> None:
        if self.which not in ("all", "conv", "dynamic"):
            raise InvalidArgument(f"which={self.which!r}: give 'all', 'conv' or 'dynamic'")


@dataclass(frozen=True, kw_only=True)
class Compress:
    """What backward need not have exactly is stored within an error bound, the rest as :class:`Offload` does.

    Not exactly: the inputs of convolutions and linear layers, whose errors reach the gradient of the layer's own weight
    and nothing else; what a ReLU saves, of which signs and zeros are exact; what pools only look at the shape of.
    Attention, norms, products of activations and everything else have what they saved bit for bit, also where a layer
    above saved the same tensor.

    The adaptive bound b keeps the error of a weight's gradient dW at ``fraction`` of the momentum::

        b = min(fraction * m * |dW| / |G| * sqrt(3 / (r * n)), sqrt(2 * fraction) * s)

    G is the gradient of the layer's output, r the share of its input that is not 0, s the root of the mean square of
    that, and n the number of elements of dW that one of G adds to: input channels times kernel elements (of a
    transposed convolution divided by its strides), or input features. For errors that are independent and uniform
    within the bound ``E|error of dW|^2 = b^2/3 * r * n * |G|^2``; errors of numbers that are not larger than b are not,
    hence the second term, by which their mean stays below ``fraction``. All are measured in the backward of a layer's
    1st, 2nd, 4th, 8th, ... forward up to the ``every``-th, and of one in ``every`` from then on, in changing places,
    and averaged with half the weight for each older one; the first term lets a bound change by no more than a factor
    of 2 at a time. m is the norm of the optimizer's momentum (Adam's first moment, SGD's buffer times 1 - momentum,
    nothing else) over that of the gradient, in every ``every``-th step, and at most 1; without an optimizer it is 1.
    Until a layer's first backward its input is stored exactly. Source: COMET (Jin et al., VLDB 2022,
    arXiv:2011.09017), section 4, whose fitted constants the variance above replaces.

    Attributes:
        error: the bound for all layers, in units of the tensors themselves, from the first forward on; or
            ``"adaptive"``.
        fraction: of the momentum's norm.
        every: how often statistics are taken.
    """

    error: float | Literal["adaptive"] = "adaptive"
    fraction: float = 0.01
    every: int = 20

    def __post_init__(self) -> None:
        if self.error != "adaptive" and not (_is_number(self.error) and 0 < float(self.error) < float("inf")):
            raise InvalidArgument(f"error={self.error!r}: give a positive number, or 'adaptive'")
        if not (_is_number(self.fraction) and 0 < self.fraction < 1):
            raise InvalidArgument(f"fraction={self.fraction!r}: give a number between 0 and 1")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise InvalidArgument(f"every={self.every!r}: give a number of forwards, 1 or more")


@dataclass(frozen=True)
class Recompute:
    """Saved tensors of a module are not kept: its forward is called again in backward. For modules, chosen by name or
    by a function. Lossless.

    The second call has the same inputs, random numbers, autocast state, buffers and attributes. Random numbers are
    those of torch, of Python's ``random`` and of numpy's global generator; generators of the user's own go on. What
    the second call saves is compared with what the first saved. Where it differs UnsupportedModel is raised, before a
    gradient is computed from it, and the module is not called again from then on. The inputs are kept by the policy
    that holds around the module. Of several such modules inside each other the outermost is called again, whatever is
    chosen for those inside it.

    Saved memory is compared as it is: a forward that saves what was never written, such as the rest of a
    ``torch.empty``, differs even where no gradient depends on it. Fill it, or choose another policy.
    """
