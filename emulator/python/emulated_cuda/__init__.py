"""An emulated CUDA machine for tests: `load()` before torch is imported, then torch finds CUDA devices.

What the devices do, and what they cannot show, is told in docs/design/emulated-cuda.md. The functions here change the
machine, or look at it. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emulated_cuda._machine import (
        allocations,
        calls,
        clock_report,
        clock_runs,
        configure,
        device_of,
        events,
        fail,
        fault_message,
        host_work_address,
        memory_is_guarded,
        operator_calls,
        registrations,
        reset,
        set_delays,
        set_fault,
        start_clock,
        stop_clock,
        streams,
        wrong_device,
    )

__all__ = [
    "load",
    "is_loaded",
    "configure",
    "reset",
    "set_delays",
    "fail",
    "set_fault",
    "fault_message",
    "memory_is_guarded",
    "device_of",
    "streams",
    "events",
    "registrations",
    "allocations",
    "wrong_device",
    "calls",
    "operator_calls",
    "start_clock",
    "stop_clock",
    "clock_runs",
    "clock_report",
    "host_work_address",
]

_LIBRARY = "libemulated_cuda.so"
_CUDA_VERSION = "13.0"
_MACHINE = frozenset(__all__) - {"load", "is_loaded"}


class _NamesLoader(importlib.abc.Loader):
    """Loads `torch._C`, and then gives it the names that a build of torch with CUDA has."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        from emulated_cuda.names import add_names

        add_names(module)


class _NamesFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch._C":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _NamesLoader(spec.loader)
        return spec


def load() -> None:
    """Imports torch with the emulated machine under it.

    Raises:
        RuntimeError: torch was imported before.
    """
    if is_loaded():
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, without the emulated machine: call emulated_cuda.load() first")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    libraries = Path(spec.origin).parent / "lib"
    ctypes.CDLL(str(libraries / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(Path(__file__).with_name(_LIBRARY)), ctypes.RTLD_GLOBAL)
    finder = _NamesFinder()
    sys.meta_path.insert(0, finder)
    try:
        import torch
    finally:
        sys.meta_path.remove(finder)
    torch.version.cuda = _CUDA_VERSION
    torch.backends.cudnn.enabled = False  # there is no cuDNN: layers take their plain kernels
    from emulated_cuda.names import add_to_storages

    add_to_storages(torch.UntypedStorage)


def is_loaded() -> bool:
    return "emulated_cuda._machine" in sys.modules


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The functions of the machine, which needs torch."""
        if name not in _MACHINE:
            raise AttributeError(f"module 'emulated_cuda' has no attribute {name!r}")
        load()
        return getattr(importlib.import_module("emulated_cuda._machine"), name)
