"""
Tools for tests: scripted faults, meters.
"""

from __future__ import annotations
import collections.abc
import hydra_ext._C
import torch
import typing

__all__: list[str] = [
    "FaultScript",
    "FaultyFiles",
    "FileFault",
    "FileOperation",
    "Meter",
    "Operation",
    "drain",
    "least_activation_seconds",
    "pretend_cuda",
    "run_traffic_twin",
]

class Operation:
    """
    Members:

      TO_DEVICE

      TO_HOST

      SLOT
    """

    SLOT: typing.ClassVar[Operation]
    TO_DEVICE: typing.ClassVar[Operation]
    TO_HOST: typing.ClassVar[Operation]
    __members__: typing.ClassVar[dict[str, Operation]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class FaultScript(hydra_ext._C.FaultInjector):
    def __init__(self) -> None: ...
    def count(self, operation: Operation) -> int: ...
    def fail(
        self, operation: Operation, nth: typing.SupportsInt | typing.SupportsIndex, persistent: bool = False
    ) -> None: ...
    def jitter(
        self,
        operation: Operation,
        seconds: typing.SupportsFloat | typing.SupportsIndex,
        seed: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def met(self) -> int: ...
    def reset(self) -> None: ...

class FileOperation:
    """
    Members:

      OPEN

      ALLOCATE

      READ

      WRITE
    """

    ALLOCATE: typing.ClassVar[FileOperation]
    OPEN: typing.ClassVar[FileOperation]
    READ: typing.ClassVar[FileOperation]
    WRITE: typing.ClassVar[FileOperation]
    __members__: typing.ClassVar[dict[str, FileOperation]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class FileFault:
    """
    Members:

      ERROR

      SHORT

      DROPPED

      FLIPPED
    """

    DROPPED: typing.ClassVar[FileFault]
    ERROR: typing.ClassVar[FileFault]
    FLIPPED: typing.ClassVar[FileFault]
    SHORT: typing.ClassVar[FileFault]
    __members__: typing.ClassVar[dict[str, FileFault]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class FaultyFiles(hydra_ext._C.FileOperations):
    def __init__(self) -> None: ...
    def count(self, operation: FileOperation) -> int: ...
    def fail(
        self,
        operation: FileOperation,
        fault: FileFault,
        nth: typing.SupportsInt | typing.SupportsIndex,
        persistent: bool = False,
        error: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def hints(self) -> int: ...
    def met(self) -> int: ...
    def reset(self) -> None: ...

class Meter:
    def __init__(self, limit: typing.SupportsInt | typing.SupportsIndex = 9223372036854775807) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    @property
    def ledger(self) -> hydra_ext._C.Ledger: ...

def drain(model: hydra_ext._C.PagedModel) -> None:
    """
    Waits for the model's update, whose error it raises, and for all transfers, failed ones included.
    """

def least_activation_seconds(
    segments: collections.abc.Sequence[hydra_ext._C.ActivationSegment],
    *,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
    budget: typing.SupportsInt | typing.SupportsIndex,
    to_device: typing.SupportsFloat | typing.SupportsIndex,
    to_host: typing.SupportsFloat | typing.SupportsIndex,
) -> float:
    """
    The least seconds of all treatments, one after another.
    """

def pretend_cuda() -> None:
    """
    Lets torch infer devices of fake CUDA tensors in a build without CUDA.
    """

def run_traffic_twin(
    *,
    update: collections.abc.Sequence[torch.Tensor],
    read: collections.abc.Sequence[torch.Tensor],
    write: collections.abc.Sequence[torch.Tensor],
    pool: hydra_ext._C.ThreadPool,
) -> None:
    """
    Makes the memory traffic of an update without its arithmetic. Overwrites the tensors.
    """
