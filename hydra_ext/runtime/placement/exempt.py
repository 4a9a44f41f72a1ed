"""What a simulated device's budget does not cover, with the bounds that a malloc hook has measured.

The budget counts, to the byte, every tensor allocation of forward and backward and every slot. What follows is memory
of the same process that is no device memory, or that no allocator of torch is asked for. ``tests/parity/test_hook.py``
asserts, term by term, that nothing else is used. Bounds are those of the tests' models on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 2**10
_MIB = 2**20


@dataclass(frozen=True)
class Exemption:
    """Bytes outside the budget.

    Attributes:
        name: what tests and messages call it.
        why: what it is, and why it is not counted.
        once_bytes: at most so much is allocated at first use, and stays; None when it is as large as it has to be.
        passing_bytes: at most so much comes and goes within one step.
    """

    name: str
    why: str
    once_bytes: int | None
    passing_bytes: int | None


HOST_ARENA = Exemption(
    "host arena",
    "Host memory, not the device's: home of parameters and of gradients that have left. Measured exactly.",
    once_bytes=None,
    passing_bytes=None,
)
OPTIMIZER = Exemption(
    "optimizer and everything between steps",
    "Host memory: outside windows nothing is charged, so neither optimizer states nor the data loader's tensors are.",
    once_bytes=None,
    passing_bytes=None,
)
KERNELS = Exemption(
    "compiled kernels",
    "oneDNN compiles a kernel for every new shape and keeps it, with its constants, in a cache of the process. It does "
    "not grow with the weights, and not from the second step on.",
    once_bytes=64 * _MIB,
    passing_bytes=0,
)
SCRATCH = Exemption(
    "kernel scratch",
    "Buffers that a kernel of oneDNN or MKL takes and gives back while it runs.",
    once_bytes=0,
    passing_bytes=64 * _KIB,
)
HALF_PRECISION = Exemption(
    "half precision without instructions",
    "A processor that cannot multiply bfloat16 has one tensor at a time of a matrix product copied to float: on the "
    "heap, or where kernels have their scratch. Twice the bytes of the largest tensor, so as large as that has to be.",
    once_bytes=0,
    passing_bytes=None,
)
BOOKKEEPING = Exemption(
    "bookkeeping",
    "Python objects, autograd's nodes, tables of dispatcher and pager, OpenMP's pool: heap blocks that hold no tensor.",
    once_bytes=4 * _MIB,
    passing_bytes=64 * _KIB,
)
FOREIGN_STORAGE = Exemption(
    "storages made without the allocator",
    "torch.UntypedStorage(n), from_numpy, frombuffer and shared memory ask other allocators, or none.",
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
    FOREIGN_STORAGE,
)
