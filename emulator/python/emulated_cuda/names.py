"""The names of `torch._C` that torch's Python code uses for CUDA, and that a build without CUDA lacks.

They are added when `torch._C` has been loaded, before the rest of torch is: torch decides then what it has.
"""

from __future__ import annotations

import enum
import itertools
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

from emulated_cuda import _machine

_ARCHITECTURES = "sm_80 sm_90"
_NCCL_VERSION = (2 << 32) + (28 << 16)
_NCCL_TIMEOUT = timedelta(minutes=10)


class _DeviceProperties:
    """What `torch.cuda.get_device_properties` gives."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.gcnArchName = values["name"]
        self.uuid = f"GPU-{values['pci_bus_id']:08x}-0000-0000-0000-000000000000"

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.__dict__['name']!r}, major={self.__dict__['major']}, "
            f"minor={self.__dict__['minor']}, total_memory={self.__dict__['total_memory'] >> 20}MB)"
        )


class _Error(enum.IntEnum):
    success = 0


def _stream_base(base: Any) -> type:
    class _CudaStreamBase(base):  # type: ignore[misc]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                data = _machine.external_stream(stream_ptr, _machine.current_device())
            elif stream_id or device_index or device_type:
                data = (stream_id, device_index, device_type)
            else:
                data = _machine.pool_stream(priority)
            return super().__new__(cls, stream_id=data[0], device_index=data[1], device_type=data[2])

        @property
        def cuda_stream(self) -> int:
            return _machine.stream_handle(self.stream_id, self.device_index, self.device_type)

        @property
        def priority(self) -> int:
            return _machine.stream_priority(self.stream_id, self.device_index, self.device_type)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return _machine.priority_range()

    return _CudaStreamBase


def _event_base(base: Any) -> type:
    class _CudaEventBase(base):  # type: ignore[misc]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            return super().__new__(
                cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def elapsed_time(self, end_event: Any) -> float:
            if not (self.cuda_event and end_event.cuda_event):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return _machine.elapsed_milliseconds(self.cuda_event, end_event.cuda_event)

    return _CudaEventBase


class _Graph:
    """A capture is a flag of its stream: nothing is recorded, and nothing can be replayed."""

    def __new__(cls, keep_graph: bool = False) -> Any:
        return super().__new__(cls)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        _machine.set_capturing(True)

    def capture_end(self) -> None:
        _machine.set_capturing(False)

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def instantiate(self) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def replay(self) -> None:
        raise NotImplementedError("the emulated machine records no graphs")


def _cudart() -> SimpleNamespace:
    return SimpleNamespace(
        cudaError=_Error,
        cudaGetErrorString=_machine.error_text,
        cudaMemGetInfo=_machine.memory_info,
        cudaProfilerStart=lambda: _Error.success,
        cudaProfilerStop=lambda: _Error.success,
    )


def _initialize() -> None:
    import torch

    _machine.initialize()
    module: Any = torch.cuda
    module.default_generators = tuple(_machine.default_generator(index) for index in range(_machine.device_count()))
    module._get_device_properties = lambda index: _DeviceProperties(_machine.properties(index))


def _memory_snapshot(_pool: object = None) -> dict[str, Any]:
    return {"segments": _machine.segments(), "device_traces": [], "allocator_settings": {}, "external_annotations": []}


def _device_names() -> dict[str, Any]:
    return {
        "_cuda_init": _initialize,
        "_cuda_isInBadFork": _machine.is_in_bad_fork,
        "_cuda_getDeviceCount": _machine.device_count,
        "_cuda_getDevice": _machine.current_device,
        "_cuda_setDevice": _machine.set_device,
        "_cuda_exchangeDevice": _machine.exchange_device,
        "_cuda_maybeExchangeDevice": _machine.maybe_exchange_device,
        "_cuda_canDeviceAccessPeer": _machine.can_access_peer,
        "_cuda_synchronize": _machine.synchronize,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": _machine.sleep,
        "_cuda_getArchFlags": lambda: _ARCHITECTURES,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_set_sync_debug_mode": _machine.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": _machine.sync_debug_mode,
        "_cuda_getCurrentStream": _machine.current_stream,
        "_cuda_getCurrentRawStream": lambda index: _machine.stream_handle(*_machine.current_stream(index)),
        "_cuda_getDefaultStream": _machine.default_stream,
        "_cuda_getStreamFromExternal": _machine.external_stream,
        "_cuda_setStream": lambda *, stream_id, device_index, device_type: _machine.set_stream(
            stream_id, device_index, device_type
        ),
        "_cuda_isCurrentStreamCapturing": _machine.is_capturing,
    }


def _memory_names() -> dict[str, Any]:
    return {
        "_cuda_emptyCache": _machine.empty_cache,
        "_cuda_memoryStats": _machine.memory_stats,
        "_cuda_resetPeakMemoryStats": _machine.reset_peak_memory_stats,
        "_cuda_resetAccumulatedMemoryStats": _machine.reset_accumulated_memory_stats,
        "_cuda_memorySnapshot": _memory_snapshot,
        "_cuda_hostMemoryStats": _machine.host_memory_stats,
        "_cuda_resetPeakHostMemoryStats": _machine.reset_peak_host_memory_stats,
        "_cuda_resetAccumulatedHostMemoryStats": _machine.reset_accumulated_host_memory_stats,
        "_host_emptyCache": _machine.empty_host_cache,
        "_cuda_getMemoryFraction": _machine.memory_fraction,
        "_cuda_setMemoryFraction": _machine.set_memory_fraction,
        "_cuda_cudaCachingAllocator_raw_alloc": _machine.allocate,
        "_cuda_cudaCachingAllocator_raw_delete": _machine.free,
        "_cuda_cudaCachingAllocator_enable": _machine.enable_cache,
        "_cuda_cudaCachingAllocator_is_enabled": _machine.cache_is_enabled,
        "_cuda_getAllocatorBackend": _machine.allocator_name,
        "_cuda_clearCublasWorkspaces": _machine.clear_workspaces,
        "_cuda_getCublasWorkspaceSize": _machine.workspace_bytes,
        "_cuda_setCublasWorkspaceSize": _machine.set_workspace_bytes,
        "_cuda_resetCublasWorkspaceSize": _machine.reset_workspace_bytes,
    }


def _with_collectives(initialize: Any, core: ModuleType) -> Any:
    """`torch._C._c10d_init`, which makes the base classes of process groups, and then NCCL's class."""

    def initialize_with_nccl() -> bool:
        initialize()
        distributed: Any = core._distributed_c10d  # type: ignore[attr-defined]
        if not hasattr(distributed, "ProcessGroupNCCL"):
            _machine.add_collectives()
            distributed.ProcessGroupNCCL = _machine.ProcessGroupNCCL
            distributed._DEFAULT_PG_NCCL_TIMEOUT = _NCCL_TIMEOUT
        return True

    return initialize_with_nccl


def add_names(core: ModuleType) -> None:
    """Gives `torch._C` the names of a build with CUDA."""
    pools = itertools.count(1)
    names = {
        **_device_names(),
        **_memory_names(),
        "_has_cuda": True,
        "_CudaDeviceProperties": _DeviceProperties,
        "_CudaStreamBase": _stream_base(core.Stream),
        "_CudaEventBase": _event_base(core.Event),
        "_CUDAGraph": _Graph,
        "_graph_pool_handle": lambda: (0, next(pools)),
        "_cudart": _cudart(),
        "_nccl_version": lambda: _NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"emulated",
        "_c10d_init": _with_collectives(core._c10d_init, core),  # type: ignore[attr-defined]
    }
    for name, value in names.items():
        setattr(core, name, value)


def add_to_storages(storages: Any) -> None:
    """Lets storages of a device be made and resized: a build without CUDA has no case for it."""
    import torch

    make, resize = storages.__new__, storages.resize_

    def make_on_device(cls: Any, *arguments: Any, device: Any = None, **keywords: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *arguments, device=device, **keywords)
        (size,) = arguments or (0,)
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        whole.set_(self)
        _machine.resize_storage(whole, size)
        return self

    storages.__new__ = staticmethod(make_on_device)
    storages.resize_ = resize_
