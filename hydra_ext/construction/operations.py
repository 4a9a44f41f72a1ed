"""Reads from a torch operation's schema what it reads, writes and makes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hydra_ext.state.arguments import tensors_in

# Operations that read only the shapes of their tensor arguments.
SHAPE_ONLY = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
# Operations that usually allocate a parameter. Other parameters' memory is freed first, to make room.
NEW = frozenset(("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn"))
ROOM_ELEMENTS = 2**18
# Operations that overwrite their first argument completely.
_OVERWRITING = frozenset(
    (
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
        *("zero_", "fill_", "copy_"),
    )
)
# Tags of operations whose result, or its shape, depends on values.
DECIDING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_WORTH_GIVING_BACK = 2**18  # bytes
_c_library = ctypes.CDLL(None)


def may_be_given_back(storage: torch.UntypedStorage) -> bool:
    """Whether the storage may be freed: numpy does not share it, and no device may be copying to it."""
    return storage.resizable() and not (torch.cuda.is_available() and storage.is_pinned())


def give_back(storage: torch.UntypedStorage) -> None:
    """Frees a storage's memory and returns its pages to the system.

    The C library keeps freed memory that lies between other blocks of its heap. A small block behind each parameter
    would make it keep nearly the whole model.
    """
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= _WORTH_GIVING_BACK:
        # If madvise fails, the pages stay; an error needs no handling.
        _c_library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))
    storage.resize_(0)


def give_back_freed() -> None:
    """Returns memory to the system that was freed and that the C library keeps, which may be all that was freed."""
    _c_library.malloc_trim(ctypes.c_size_t(0))


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # a subclass without memory of its own
        return None


def operands_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor argument, and whether it is written to."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    by_name = {argument.name: argument for argument in arguments}
    pairs = [(argument, value) for argument, value in zip(arguments, args, strict=False)]
    pairs += [(by_name.get(name), value) for name, value in kwargs.items()]
    pairs += [(None, value) for value in args[len(arguments) :]]
    for argument, value in pairs:
        written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        yield from ((tensor, written) for tensor in tensors_in(value))


def overwrites(func: Any, name: str, tensor: Tensor, whole_bytes: int) -> bool:
    """Whether writing to ``tensor`` overwrites its whole storage."""
    every = tensor.numel() * tensor.element_size() == whole_bytes
    return every and (name in _OVERWRITING or func._schema.overload_name.endswith("out"))


def only_result(func: Any, operands: list[tuple[Tensor, bool]]) -> Tensor | None:
    """The tensor that the operation writes and returns, if it writes and returns no other; otherwise None."""
    written = [tensor for tensor, is_written in operands if is_written]
    returns: Any = getattr(getattr(func, "_schema", None), "returns", ())
    alone = len(written) == 1 and len(returns) == 1 and returns[0].alias_info is not None
    metadata = torch.Tag.inplace_view in getattr(func, "tags", ())
    return written[0] if alone and returns[0].alias_info.is_write and not metadata else None
