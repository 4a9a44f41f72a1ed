"""The numbers of tensors, put back where they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SMALL = 2**20  # bytes
_NO_VALUES = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}  # no kernel takes them


def has_plain_numbers(tensor: Tensor) -> bool:
    """Whether its numbers lie in memory of its own kind, by strides, so that their bytes can be copied and compared.

    The numbers of other tensors are not looked at: whether they were written to is seen by their versions.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype not in _NO_VALUES
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor())
    )


def version_of(tensor: Tensor) -> int:
    """How often it was written to; of inference tensors that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def is_small(tensor: Tensor) -> bool:
    """Whether a copy may be made each time, in place of trusting a version."""
    return has_plain_numbers(tensor) and tensor.nbytes <= _SMALL


def may_have_changed(tensor: Tensor, version: int) -> bool:
    """Since it had this version. Batch statistics are written without a new one, and so small tensors are taken to
    have changed always."""
    return version_of(tensor) != version or is_small(tensor)


def on_host(tensor: Tensor) -> Tensor:
    """A copy of its numbers; where they are not plain, on its own device."""
    return tensor.detach().to("cpu", copy=True) if has_plain_numbers(tensor) else clone(tensor)


def clone(tensor: Tensor) -> Tensor:
    """A copy without a graph; the tensor's own numbers where torch copies none of its kind, nor writes to them."""
    try:
        return tensor.detach().clone()
    except RuntimeError:
        return tensor.detach()


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether a bit does; of tensors of one shape and type. NaN are equal to themselves.

    Tensors without plain numbers differ unless they are the same object.
    """
    if not (has_plain_numbers(one) and has_plain_numbers(other)):
        return one is not other
    now, then = (_bytes_of(tensor) for tensor in (one, other))
    return not torch.equal(now, then)


def _bytes_of(tensor: Tensor) -> Tensor:
    """On the host."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg()  # which may be pending, for a view
    return plain.contiguous().flatten().view(torch.uint8)


def put(tensor: Tensor, numbers: Tensor) -> None:
    """Writes them to it, unless they are there: a graph that has saved the tensor is told of each write."""
    if differ(tensor, numbers):
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            _once(tensor, tensor).copy_(_once(numbers, tensor))


def _once(tensor: Tensor, expanded: Tensor) -> Tensor:
    """Without the repetitions that the other one has by a stride of 0: they are no memory that could be written to."""
    if has_plain_numbers(expanded):
        for dimension, stride in enumerate(expanded.stride()):
            if stride == 0 and expanded.size(dimension) > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor
