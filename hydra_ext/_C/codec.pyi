"""
Compresses numbers to a stream of bytes within an error bound, and restores them.
"""

from __future__ import annotations
import hydra_ext._C
import torch
import typing

__all__: list[str] = ["StreamHeader", "compress", "decompress", "header", "most_bytes", "supported_instruction_sets"]

class StreamHeader:
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def error_bound(self) -> float: ...
    @property
    def keep_signs(self) -> bool: ...
    @property
    def step(self) -> float: ...

def compress(
    numbers: torch.Tensor,
    stream: torch.Tensor,
    *,
    error_bound: typing.SupportsFloat | typing.SupportsIndex,
    keep_signs: bool,
    fast: bool,
    pool: hydra_ext._C.ThreadPool,
    instructions: hydra_ext._C.InstructionSet | None = None,
) -> int:
    """
    Returns the number of bytes used.
    """

def decompress(
    stream: torch.Tensor,
    numbers: torch.Tensor,
    *,
    pool: hydra_ext._C.ThreadPool,
    instructions: hydra_ext._C.InstructionSet | None = None,
) -> None: ...
def header(stream: torch.Tensor) -> StreamHeader: ...
def most_bytes(numbers: torch.Tensor) -> int:
    """
    The bytes that a stream must have room for, to compress the numbers to it.
    """

def supported_instruction_sets() -> list[hydra_ext._C.InstructionSet]:
    """
    The instruction sets that this machine can run, from slow to fast.
    """
