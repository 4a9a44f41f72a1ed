"""The numbers of tensors: whether they have changed, copies of them, and writing them back in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SMALL = 2**20  # bytes
# Types that no kernel accepts.
_NO_VALUES = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}


def has_plain_numbers(tensor: Tensor) -> bool:
    """Whether its numbers lie in strided memory, so that their bytes can be copied and compared.

    For other tensors only the version tells whether they were written to.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype not in _NO_VALUES
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor._is_zerotensor())
    )


def version_of(tensor: Tensor) -> int:
    """The tensor's version counter; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def is_small(tensor: Tensor) -> bool:
    """Whether it is cheap enough to be copied and compared each time, in place of trusting its version."""
    return has_plain_numbers(tensor) and tensor.nbytes <= _SMALL


def may_have_changed(tensor: Tensor, version: int) -> bool:
    """Whether it may have changed since it had this version.

    Always true for small tensors, as batch statistics are written without a new version.
    """
    return version_of(tensor) != version or is_small(tensor)


def on_host(tensor: Tensor) -> Tensor:
    """A copy of its numbers on the host; on its own device if the numbers are not plain."""
    return tensor.detach().to("cpu", copy=True) if has_plain_numbers(tensor) else clone(tensor)


def clone(tensor: Tensor) -> Tensor:
    """A copy without a graph; the tensor itself, detached, if torch can neither copy nor write to its kind."""
    try:
        return tensor.detach().clone()
    except RuntimeError:
        return tensor.detach()


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type differ in any bit. A NaN equals the same NaN.

    Tensors without plain numbers differ unless they are the same object.
    """
    if not (has_plain_numbers(one) and has_plain_numbers(other)):
        return one is not other
    now, then = (_bytes_of(tensor) for tensor in (one, other))
    return not torch.equal(now, then)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, on the host."""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg()  # a view may have these operations pending
    return plain.contiguous().flatten().view(torch.uint8)


def put(tensor: Tensor, numbers: Tensor) -> None:
    """Writes the numbers to the tensor, unless it has them: each write invalidates graphs that saved the tensor."""
    if differ(tensor, numbers):
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            _once(tensor, tensor).copy_(_once(numbers, tensor))


def _once(tensor: Tensor, expanded: Tensor) -> Tensor:
    """The tensor without the repetitions that ``expanded`` has by strides of 0, to which torch refuses to write."""
    if has_plain_numbers(expanded):
        for dimension, stride in enumerate(expanded.stride()):
            if stride == 0 and expanded.size(dimension) > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor
