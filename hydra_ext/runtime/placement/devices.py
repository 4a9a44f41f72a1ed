"""Places: the device on which a forward's tensors live, as a run sees it.

A place makes the backend and the host arena of a run. It moves the root's inputs and the model's buffers
(:mod:`hydra_ext.runtime.placement.residents`). On the simulated device both faces of a weight are host memory.
Otherwise device parameters, inputs and buffers are on :attr:`Place.device`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hydra_ext import _C, _build_info, _guard
from hydra_ext.blocks import Layout
from hydra_ext.errors import BudgetTooSmall, InvalidBudget, InvalidDevice, StateError
from hydra_ext.policy import SimulatedDevice
from hydra_ext.runtime import scaling
from hydra_ext.runtime.placement.residents import Residents, resident_bytes
from hydra_ext.tracing import not_traced

logger = logging.getLogger(__name__)

# Gradients on their way to the host take at most one part in so many of a GPU's budget. Plans leave that room free.
_GRADIENTS_PER_BUDGET = 8

# Of a GPU's free memory. The rest is for what does not come from torch's allocator: kernels, and libraries' workspaces.
_AUTO_SHARE = 0.94

_FORWARD, _INFERENCE = _C.PassKind.FORWARD, _C.PassKind.INFERENCE

# Types of the arguments that a place moves, each as a whole; the lengths of a packed sequence stay on the host. Other
# arguments are not changed.
MOVED = (torch.Tensor, PackedSequence)


class PinnedInputs:
    """Copies of pinned inputs to a GPU, which go on while the host does."""

    def __init__(self) -> None:
        self._own = threading.local()

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begins to copy a pinned tensor on the current stream. Do not write to it before :meth:`wait` has returned."""
        copied = tensor.to(device, non_blocking=True)
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(device))
        self._own.__dict__.setdefault("ends", []).append(end)
        return copied

    def wait(self) -> None:
        """Waits for the copies that the calling thread has begun."""
        for end in self._own.__dict__.pop("ends", []):
            end.synchronize()


class Tenant(Protocol):
    """One of several runs' stay on a device that they share.

    Attributes:
        claims: Budgets of the contexts that are open, by the identity of their places.
    """

    claims: dict[int, int]

    def make_backend(self) -> _C.DeviceBackend: ...
    def share(self) -> int: ...
    def expect_budget(self, budget: int) -> None: ...
    def step_ended(self, core: _C.PagedModel) -> None: ...


class PlaceMaker(ABC):
    """A device that gives each run a place on it."""

    @abstractmethod
    def place(self) -> Place:
        """The place of a run that begins now."""


class Place(ABC):
    """One device, as a run sees it. Subclasses make its backend.

    Attributes:
        inputs: Copies of pinned inputs to a GPU.
        tenant: The run's tenancy of a shared device; None for a device of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.tenant: Tenant | None = None
        self._claim = 0
        self.device = device
        self._type = device.type
        self.inputs = PinnedInputs()
        self._residents: Residents | None = None
        self._told_of_autocast = False

    def make_backend(self) -> _C.DeviceBackend:
        """Makes the core's backend for the device; one per run."""
        return self._make_backend() if self.tenant is None else self.tenant.make_backend()

    @abstractmethod
    def _make_backend(self) -> _C.DeviceBackend: ...

    @abstractmethod
    def _alike(self) -> Place:
        """Another place on this device."""

    def make_arena(self) -> _C.HostArena:
        return _C.HostArena()

    def expect_room(self, budget: int, block: str, block_bytes: int) -> None:
        """Checks that a run may begin on the device. It changes nothing.

        Args:
            budget: Budget of the run, in bytes.
            block: Name of its largest block.
            block_bytes: Bytes of that block.

        Raises:
            BudgetTooSmall: The budget cannot hold the block beside what the process holds there.
            InvalidBudget: With the budgets of other runs, this one passes the device's memory.
            InvalidDevice: torch allocates there in a way that takes no budget.
            StateError: A CUDA graph is being captured.
        """
        if self.tenant is not None:
            self.tenant.expect_budget(budget)
        self._claim = budget

    def free_bytes(self) -> int:
        """The budget that ``"auto"`` stands for.

        Raises:
            InvalidBudget: the device has no memory of its own.
        """
        return self._free_bytes() if self.tenant is None else self.tenant.share()

    def _free_bytes(self) -> int:
        raise InvalidBudget(
            "budget='auto' is the free memory of a GPU, and the simulated device has none of its own: give bytes as an "
            "int or a text such as '8GiB'"
        )

    def uncounted_bytes(self, _model: nn.Module, _layout: Layout) -> int:
        """Bytes of residents that the device's allocator does not count."""
        return 0

    def gradient_bound(self, budget: int) -> int:
        """Bytes of gradients that may be on their way at once; 0 if allocations wait for the budget instead."""
        return 0 if self.device.type == "cpu" else budget // _GRADIENTS_PER_BUDGET

    @not_traced
    def move_input(self, value: Any) -> Any:
        """The input of the root, moved to the place's device."""
        tensor = value.data if isinstance(value, PackedSequence) else value
        return value.to(self.device) if tensor.device.type == "cpu" else value

    def open(self, model: nn.Module, arena: _C.HostArena, layout: Layout) -> None:
        """Moves the residents to the device before the first forward. :meth:`close` undoes it."""
        self._residents = Residents(model, self.device, layout)
        self._residents.move_in()
        if self.tenant is not None:
            self.tenant.claims[id(self)] = self._claim

    def close(self) -> None:
        if self.tenant is not None:
            self.tenant.claims.pop(id(self), None)
        if self._residents is not None:
            self._residents.move_out()
            self._residents = None

    def suspend(self) -> None:
        """Moves the residents to the host until :meth:`resume`, so that the model can be copied."""
        if self._residents is not None:
            self._residents.move_out()

    def resume(self) -> None:
        if self._residents is not None:
            self._residents.move_in()

    @not_traced
    def forward_kind(self) -> _C.PassKind:
        """The kind of a forward that begins now. Warns once if autocast is on for the CPU only.

        Trainers with ``use_cpu=True``, an obvious choice for parameters on the host, enable such an autocast.
        """
        kind = self._type
        if kind != "cpu" and torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled(kind):
            self._tell_of_autocast(torch.get_autocast_dtype("cpu"))
        return _FORWARD if torch.is_grad_enabled() else _INFERENCE

    def _tell_of_autocast(self, dtype: torch.dtype) -> None:
        if not self._told_of_autocast:
            self._told_of_autocast = True
            logger.warning(
                "autocast to %s is on for the CPU, but this model computes on %s, without it. Put the training into "
                "`with torch.autocast(%r, dtype=%s):`",
                dtype,
                self.device,
                self.device.type,
                dtype,
            )

    def backward_ended(self) -> None:  # noqa: B027 - most places have nothing to do then
        """Called when a backward's window has closed."""

    def peak_bytes(self) -> int | None:
        """Peak of the device's bytes; None if the run's ledger has it."""
        return None

    def activation_bytes(self, core: _C.PagedModel) -> int:
        """Bytes on the device now that are neither weights nor buffers nor gradients."""
        return core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS)


class SimulatedPlace(Place):
    """Host memory with a budget."""

    def __init__(self, options: SimulatedDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._options = options

    def _alike(self) -> Place:
        return SimulatedPlace(self._options)

    def _make_backend(self) -> _C.DeviceBackend:
        options = self._options
        return _C.SimulatedDevice(
            to_device_bytes_per_second=options.to_device_bytes_per_second or 0.0,
            to_host_bytes_per_second=options.to_host_bytes_per_second or 0.0,
            latency_seconds=options.latency_seconds,
            host_memory_bytes_per_second=options.host_memory_bytes_per_second or 0.0,
            poison=options.poison,
            asynchronous=options.asynchronous,
            seed=options.seed,
            faults=options.faults,
        )

    def uncounted_bytes(self, model: nn.Module, layout: Layout) -> int:
        return resident_bytes(model, layout)

    @not_traced
    def move_input(self, value: Any) -> Any:
        if isinstance(value, PackedSequence) or value.device.type != "cpu" or value.layout != torch.strided:
            return value
        return value if _C.on_simulated_device(value) else value.clone()


class CudaPlace(Place):
    """A GPU. The budget limits the memory that torch's allocator may reserve there."""

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index))
        self._backend: Any = None
        self._settled = False
        self._opened = False

    def _alike(self) -> Place:
        place = CudaPlace(self.device.index)
        place._backend = self._backend  # whose memory it tells
        return place

    def _make_backend(self) -> _C.DeviceBackend:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._backend = _cuda("make_cuda_backend")(self.device.index)
        return self._backend  # type: ignore[no-any-return]

    def expect_room(self, budget: int, block: str, block_bytes: int) -> None:
        super().expect_room(budget, block, block_bytes)
        if torch.cuda.is_current_stream_capturing():
            raise StateError("an offload context is entered while a CUDA graph is being captured: enter it before")
        allocator = torch.cuda.memory.get_allocator_backend()
        if allocator != "native":
            raise InvalidDevice(
                f"torch allocates by '{allocator}', which takes no budget: use torch's own allocator (no backend: in "
                "PYTORCH_ALLOC_CONF, and no change_current_allocator)"
            )
        others = _cuda("cuda_budgets")(self.device.index)
        _, total = torch.cuda.mem_get_info(self.device)
        if others + budget > total:
            raise InvalidBudget(
                f"budget={budget}, but {self.device} has {_C.human_bytes(total)}, of which other offload contexts were "
                f"given {_C.human_bytes(others)}: give at most {total - others} bytes"
            )
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(self.device)
        needed = held + block_bytes - others
        if needed > budget:
            raise BudgetTooSmall(
                f"budget={budget}, but torch has reserved {_C.human_bytes(held)} on {self.device} for tensors of this "
                f"process, which count: free them, or give at least {needed} bytes, and room for activations on top",
                block=block,
                block_bytes=block_bytes,
                needed=needed,
            )

    def _free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int((free + torch.cuda.memory_reserved(self.device)) * _AUTO_SHARE)

    def make_arena(self) -> _C.HostArena:
        return _cuda("make_cuda_arena")(self.device.index)  # type: ignore[no-any-return]

    @not_traced
    def move_input(self, value: Any) -> Any:
        # Not for parameters: the arena has pinned their memory, and nothing keeps its bytes until the copy has run.
        at_once = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.is_pinned()
        return self.inputs.copy(value, self.device) if at_once else super().move_input(value)

    def open(self, model: nn.Module, arena: _C.HostArena, layout: Layout) -> None:
        if arena.pageable_bytes > 0:
            logger.warning(
                "%s of host memory could not be pinned: copies are slower and block the host. Raise the limit on "
                "locked memory (ulimit -l); `python -m hydra_ext doctor` measures the link",
                _C.human_bytes(arena.pageable_bytes),
            )
        if torch.backends.cudnn.benchmark:
            logger.warning(
                "torch.backends.cudnn.benchmark tries algorithms with workspaces of any size, which count toward the "
                "budget; switch it off if memory runs out"
            )
        super().open(model, arena, layout)
        torch.cuda.empty_cache()
        scaling.read_blocking()
        self._opened = True

    def close(self) -> None:
        super().close()
        if self._opened:
            self._opened = False
            scaling.read_as_before()

    def backward_ended(self) -> None:
        # Step 1 moved blocks on demand, which fragments the allocator's memory. From step 2 on the order is known.
        if not self._settled:
            self._settled = True
            torch.cuda.empty_cache()

    def peak_bytes(self) -> int | None:
        return None if self._backend is None else int(self._backend.memory().reserved_peak)

    def activation_bytes(self, core: _C.PagedModel) -> int:
        return int(torch.cuda.memory_allocated(self.device)) - core.pager.resident_bytes


def _cuda(name: str) -> Any:
    """A function of the core that builds without CUDA, whose stubs these are, do not have."""
    return getattr(_C, name)


def shared(place: Place, tenant: Tenant) -> Place:
    """A place on the same device, for a run that shares it with others."""
    made = place._alike()
    made.tenant = tenant
    return made


def choose(device: Place | PlaceMaker | SimulatedDevice | torch.device | str | None) -> Place:
    """The place for the argument of ``offload(device=...)``.

    Raises:
        InvalidDevice: there is no such device, or this build cannot use it.
    """
    if isinstance(device, Place):
        return device
    if isinstance(device, PlaceMaker):
        return device.place()
    if isinstance(device, SimulatedDevice):
        return SimulatedPlace(device)
    if device is None:
        if not torch.cuda.is_available():
            return SimulatedPlace(SimulatedDevice())
        if _build_info.CUDA != "ON":
            logger.warning(
                "there is a GPU, but hydra_ext was built without CUDA kernels (%s): using the simulated device; %s",
                _build_info.WITHOUT_CUDA,
                _guard.how_to_get_cuda(),
            )
            return SimulatedPlace(SimulatedDevice())
        return CudaPlace(torch.cuda.current_device())
    if device == "simulated":
        return SimulatedPlace(SimulatedDevice())
    return _named(device)


def _named(device: torch.device | str) -> Place:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidDevice(f"device={device!r} is not a device: give 'cuda', 'cuda:1' or 'simulated'") from error
    if parsed.type != "cuda":
        raise InvalidDevice(f"device={device!r}: models are offloaded to 'cuda' or to the 'simulated' device")
    if _build_info.CUDA != "ON":
        raise InvalidDevice(
            f"device={device!r}, but hydra_ext was built without CUDA kernels ({_build_info.WITHOUT_CUDA}): "
            f"{_guard.how_to_get_cuda()}; or take device='simulated'"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given: int | None = parsed.index
    if count == 0 or (given is not None and given >= count):
        raise InvalidDevice(f"device={device!r}, but torch finds {count} CUDA devices; take device='simulated'")
    index = torch.cuda.current_device() if given is None else given
    return CudaPlace(index)
