"""Memory that a simulated device's budget does not cover, with bounds measured by a malloc hook.

The budget counts, to the byte, every tensor allocation of forward and backward and every slot. The exemptions below are
memory of the same process that is not device memory, or that is not allocated through torch's allocators.
``tests/parity/test_hook.py`` asserts, term by term, that nothing else is used. The bounds hold for the tests' models on
one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 2**10
_MIB = 2**20


@dataclass(frozen=True)
class Exemption:
    """Bytes outside the budget.

    Attributes:
        name: Name in tests and messages.
        why: Description, and the reason why it is not counted.
        once_bytes: Most bytes that are allocated at first use and stay; None for no bound.
        passing_bytes: Most bytes that are allocated and freed within one step; None for no bound.
    """

    name: str
    why: str
    once_bytes: int | None
    passing_bytes: int | None


HOST_ARENA = Exemption(
    "host arena",
    "Host memory, not the device's: home of parameters and of gradients that have left the device. Measured exactly.",
    once_bytes=None,
    passing_bytes=None,
)
OPTIMIZER = Exemption(
    "optimizer and everything between steps",
    "Host memory: outside windows nothing is charged, such as optimizer states and the data loader's tensors.",
    once_bytes=None,
    passing_bytes=None,
)
KERNELS = Exemption(
    "compiled kernels",
    "oneDNN compiles a kernel for every new shape and keeps it, with its constants, in a cache of the process. That "
    "cache does not grow with the weights, nor after the first step.",
    once_bytes=64 * _MIB,
    passing_bytes=0,
)
SCRATCH = Exemption(
    "kernel scratch",
    "Buffers that a kernel of oneDNN or MKL allocates and frees while it runs.",
    once_bytes=0,
    passing_bytes=64 * _KIB,
)
HALF_PRECISION = Exemption(
    "half precision without instructions",
    "For a processor that cannot multiply bfloat16, one operand of a matrix product at a time is copied to float: on "
    "the heap, or in the kernel scratch. The copy takes twice the bytes of the largest tensor.",
    once_bytes=0,
    passing_bytes=None,
)
BOOKKEEPING = Exemption(
    "bookkeeping",
    "Python objects, autograd's nodes, tables of dispatcher and pager, OpenMP's pool: heap blocks that hold no tensor.",
    once_bytes=4 * _MIB,
    passing_bytes=64 * _KIB,
)
MATRIX_BUFFERS = Exemption(
    "matrix buffers",
    "On some processors MKL packs the matrices of a product into buffers on the heap, and keeps these for each thread. "
    "Their size follows from the processor's caches, and not from the matrices.",
    once_bytes=16 * _MIB,
    passing_bytes=0,
)
FOREIGN_STORAGE = Exemption(
    "storages made without the allocator",
    "torch.UntypedStorage(n), from_numpy, frombuffer and shared memory use other allocators, or none.",
    once_bytes=None,
    passing_bytes=None,
)

EXEMPTIONS: tuple[Exemption, ...] = (
    HOST_ARENA,
    OPTIMIZER,
    KERNELS,
    SCRATCH,
    HALF_PRECISION,
    BOOKKEEPING,
    MATRIX_BUFFERS,
    FOREIGN_STORAGE,
)
