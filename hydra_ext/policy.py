"""Options that a user can choose, as frozen dataclasses, and the text form of sizes. Imports neither torch nor `_C`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra_ext.errors import InvalidArgument, InvalidBudget

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MOST = 2**63 - 1  # the engine counts in signed 64-bit integers
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str, *, named: str = "budget") -> int:
    """Bytes of a size: a whole number of bytes, or a text such as ``"8GiB"``, ``"512 MiB"``, ``"1.5GB"``.

    Args:
        named: Name of the option, for the message.

    Raises:
        InvalidBudget: The size is not positive, or cannot be read.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InvalidBudget(
            f"{named}={size!r} is a {type(size).__name__}: give bytes as an int or a text such as '8GiB'"
        )
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise InvalidBudget(f"{named}={size!r} is not a size: write a number and a unit, such as '8GiB' or '512MB'")
        from fractions import Fraction  # three modules, of which importing hydra_ext has no need

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
    """A device made of host memory. Its budget is enforced to the byte, and its link can be given a speed.

    Attributes:
        to_device_bytes_per_second: Speed of the host-to-device lane; None for as fast as memory copies.
        to_host_bytes_per_second: Speed of the device-to-host lane; None likewise.
        latency_seconds: Shortest time of a transfer.
        host_memory_bytes_per_second: Speed at which optimizer steps that run behind the next forward
            (:mod:`hydra_ext.optim`) read and write host memory; None for this machine's own. A block's update takes at
            least its bytes divided by this speed.
        poison: Whether evicted slots are filled with NaN, so that a stale read shows.
        asynchronous: Whether compute finishes late, on a lane of its own, and slots are checked then. Finds missing
            waits.
        seed: Seed of the delays in the asynchronous mode.
        faults: Scripted faults, for tests (``_C.testing.FaultScript``).
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
    """Switches for tests and for hunting a fault. All of them cost time.

    Attributes:
        poison_hosts: Whether host parameters read as NaN while forward and backward run, so that a weight taken from
            the wrong face shows in the loss. A penalty on host parameters reads these NaNs, too. An optimizer that
            steps inside backward writes to them, which raises.
        fault_path: Whether reads of absent parameters are served. If not, they raise
            :class:`~hydra_ext.errors.PageFaultError`.
        spill_files: Files for ``spill_dir``, which may fail as a test asks; by default the system's.
    """

    poison_hosts: bool = False
    fault_path: bool = True
    spill_files: Any = None


@dataclass(frozen=True, kw_only=True)
class Auto:
    """What ``offload(activations="auto")`` does, with an option. Lossless by default.

    Attributes:
        inexact_heads: Whether a head whose logits do not fit runs in rows even where that has not the bits of the plain
            one. By default both are tried on this machine, and the plain one stays if they differ. The loss and the
            gradients then differ by the order of sums in a matrix product.
    """

    inexact_heads: bool = False


@dataclass(frozen=True)
class Keep:
    """Saved tensors stay where they are, as without a stash."""


@dataclass(frozen=True)
class Offload:
    """Saved tensors leave for host memory, and return ahead of their use. Lossless.

    Attributes:
        which: Policy of vDNN (Rhu et al., MICRO 2016, section 3.3). ``"all"`` tensors leave. With ``"conv"`` only the
            inputs of convolutions do. ``"dynamic"`` needs a budget, and holds for a whole model: if everything fits,
            nothing leaves. Otherwise the first passes time ``"all"`` and ``"conv"``, and the faster one that fits is
            taken. A pass here is a forward and its backward.
    """

    which: Literal["all", "conv", "dynamic"] = "all"

    def __post_init__(self) -> None:
        if self.which not in ("all", "conv", "dynamic"):
            raise InvalidArgument(f"which={self.which!r}: give 'all', 'conv' or 'dynamic'")


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Tensors that backward does not need exactly are stored within an error bound; others as by :class:`Offload`.

    Backward does not need these exactly:

    - the inputs of convolutions and linear layers, whose errors reach the gradient of the layer's own weight and
      nothing else;
    - the tensors that a ReLU saves, whose signs and zeros stay exact;
    - the tensors of which a pool needs only the shape.

    Attention, norms, products of activations and all other operations get their saved tensors back bit for bit, even
    if one of the layers above saved the same tensor.

    The adaptive bound b keeps the error of a weight's gradient dW at ``fraction`` of the momentum::

        b = min(fraction * m * |dW| / |G| * sqrt(3 / (r * n)), sqrt(2 * fraction) * s)

    G is the gradient of the layer's output. r is the share of numbers in the layer's input that are not 0, and s is
    their root mean square. n is the number of elements of dW that one element of G adds to: input channels times kernel
    elements (divided by the strides for a transposed convolution), or input features.

    For errors that are independent and uniform within the bound, ``E|error of dW|^2 = b^2/3 * r * n * |G|^2``. Errors
    of numbers that are not larger than b are not independent. The second term keeps their mean below ``fraction``.

    Statistics are taken in the backward of a layer's 1st, 2nd, 4th, 8th, ... forward up to the ``every``-th. From then
    on they are taken in one of ``every`` backwards, in changing places. In the average each older one has half the
    weight. The first term changes by at most a factor of 2 at a time. Until a layer's first backward its input is
    stored exactly.

    m is the norm of the optimizer's momentum over that of the gradient, taken in every ``every``-th step, and at most
    1. The momentum is Adam's first moment, or SGD's buffer times 1 - momentum. Without such an optimizer m is 1.

    Source: COMET (Jin et al., VLDB 2022, arXiv:2011.09017), section 4. The variance above replaces its fitted
    constants.

    Attributes:
        error: Bound for all layers from the first forward on, in units of the tensors; or ``"adaptive"``.
        fraction: Error of a weight's gradient as a fraction of the momentum's norm.
        every: Number of forwards, or steps, from one measurement to the next.
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
    """A module's saved tensors are not kept: backward calls its forward again. Lossless.

    It has to be chosen for modules, by name or by a function.

    The second call has the same inputs, random numbers, autocast state, buffers and attributes. Random numbers are
    those of torch, of Python's ``random`` and of numpy's global generator; generators of the user's own go on. The
    module's inputs are kept by the policy around the module. If such modules are nested, the outermost is called
    again, whatever is chosen inside it.

    The tensors that the second call saves are compared with those of the first. A difference raises UnsupportedModel
    before a gradient is computed from it, and the module is not called again from then on. Memory that was never
    written, such as the rest of a ``torch.empty``, is compared too, and may differ even if no gradient depends on it.
    Fill it, or choose another policy.
    """


@dataclass(frozen=True)
class GivenPolicies:
    """Policies by the names of modules. Each holds for the modules inside, too, as far as these have none.

    What is inside of a module with :class:`hydra_ext.Recompute` is computed again with it, whatever is given there.
    """

    by_name: Mapping[str, Keep | Offload | Compress | Recompute] = field(default_factory=dict)

    def recomputes(self, name: str) -> bool:
        """Whether a module is to be computed again, and none around it."""
        return self._is_recomputed(name) and not any(map(self._is_recomputed, _around(name)))

    def has_inside(self, name: str) -> bool:
        """Whether modules inside of a module have policies."""
        return any(not name or other.startswith(f"{name}.") for other in self.by_name)

    def has_any(self, name: str) -> bool:
        """Whether a module has a policy, or modules inside of it have."""
        return name in self.by_name or self.has_inside(name)

    def policy_of(self, name: str) -> Keep | Offload | Compress | None:
        """The policy that what a module saves follows while it is not computed again; None if it is planned."""
        for each in (name, *_around(name)):
            policy = self.by_name.get(each)
            if policy is not None and not isinstance(policy, Recompute):
                return policy
        return None

    def _is_recomputed(self, name: str) -> bool:
        return isinstance(self.by_name.get(name), Recompute)


def _around(name: str) -> Iterator[str]:
    """The names of the modules around one, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name
