"""Operators on fake tensors: their results, their seconds, and the bytes that their kernels take meanwhile.

Seconds come from what an operator computes, reads and writes. Of the kernels on a CPU only convolutions take much.
oneDNN copies weights into blocks of channels, and maps that are not in channels last. Other kernels unroll images into
columns: for each element of the result all the numbers that it multiplies. These bytes are those of oneDNN with vectors
of 256 bits and one thread, without its notes of some KiB. For maps that are not in channels last they may be too few
where a convolution has strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from hydra_ext.profile.cards import Speed

_GROUPED = torch.ops.aten._grouped_mm
_DRAWN = torch.ops.aten.rand
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CONVOLUTION = torch.ops.aten.convolution
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CHANNELS_PER_BLOCK = 8
_CHANNELS_OF_AN_IMAGE = 3  # read as they are


def run_on_fakes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator inside a FakeTensorMode, also where torch has no fake of it.

    A single number that is drawn is 1/2. Models draw one to decide whether a layer is left out, which is then rare.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is _GROUPED:
        return _grouped_product(*args, **kwargs)
    if packet is _DRAWN and not args[0]:
        return torch.tensor(0.5, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
    return func(*args, **kwargs)


def _grouped_product(
    left: Tensor, right: Tensor, ends: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The shape of a product of groups of rows, for any dtype; torch's own fake knows bfloat16 only."""
    shape: tuple[int, ...] = (left.size(-2), right.size(-1))
    if ends is not None and left.dim() == right.dim() == 2:
        shape = (ends.numel(), *shape)
    elif left.dim() == right.dim() == 3:
        shape = (left.size(0), *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def seconds_of(operator: tuple[Any, tuple[Any, ...], dict[str, Any], Any], speed: Speed) -> float:
    """Seconds of an operator: of computing, or of moving its bytes if that takes longer.

    Args:
        operator: The function, its arguments, its named arguments, and its result.
    """
    func, args, kwargs, out = operator
    moved = _moved_bytes(func, args, kwargs, out)
    if not moved:
        return 0.0
    return max(_flops(func, args, kwargs, out) / speed.flops_per_second, moved / speed.bytes_per_second)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    counted = flop_counter.flop_registry.get(packet)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=out))
    if packet is _GROUPED:  # each row meets one matrix
        left, right = args[0], args[1]
        return int(2 * left.numel() * right.size(-1))
    if packet is _ATTENTION_ON_CPU:
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(flop_counter.sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
    if packet is _ATTENTION_BACKWARD_ON_CPU:
        gradient, query, key, value = (tensor.shape for tensor in args[:4])
        return int(flop_counter.sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]
    return 0


def _moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that are read and written; none for a view."""
    read = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    written = {id(leaf): leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
    if not func._schema.is_mutable and _storages(written.values()) <= _storages(read.values()):
        return 0
    return sum(tensor.numel() * tensor.itemsize for tensor in {**read, **written}.values())


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}


def workspace_of(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that an operator takes on a CPU while it runs, and gives back when it ends.

    Args:
        func: The operator, as torch dispatches it below autograd.
        args: Its arguments, which may be fake.
        out: Its result.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is _CONVOLUTION:
        source, weight, bias, *how = args
        return _Convolution(source, weight, out, how, bias=bias).forward()
    if packet is _CONVOLUTION_BACKWARD:
        gradient, source, weight, bias_sizes, *how, wanted = args
        return _Convolution(source, weight, gradient, how, bias_sizes=bias_sizes).backward(wanted)
    return 0


class _Convolution:
    """One convolution.

    Args:
        source: The map that is its input.
        weight: Its weight.
        result: The map that it makes; in backward that map's gradient.
        how: Its strides, padding, dilation, whether it is transposed, its output's padding, and its groups.
        bias: The bias, or its sizes.
    """

    def __init__(self, source: Tensor, weight: Tensor, result: Tensor, how: Sequence[Any], **bias: Any) -> None:
        stride, padding, dilation, self._is_transposed, output_padding, self._groups = how
        kernel = torch._C._select_conv_backend(
            source,
            weight,
            **{"bias": None, **bias},
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=self._is_transposed,
            output_padding=output_padding,
            groups=self._groups,
        )
        # Where none of these is right on a CPU, it is oneDNN; the name of its transposed one is not known to Python.
        self._columns = kernel.name if kernel.name.startswith("Slow") else ""
        layout = torch._C._conv_determine_backend_memory_format(source, weight, kernel)
        self._is_channels_last = layout in _CHANNELS_LAST.values()
        self._source, self._weight, self._result = source, weight, result
        outside, inside = weight.shape[:2]
        padded = 1.0
        if self._groups == 1:
            padded = _in_blocks(outside) / outside * (_in_blocks(inside) / inside)
        self._weight_in_blocks = int(weight.nbytes * padded)
        self._weight_to_read = self._weight_in_blocks * 9 // 8  # up to an eighth more, depending on the kernel

    def forward(self) -> int:
        if self._columns:
            return self._bytes_of_columns()
        if self._is_transposed:
            return max(self._source.nbytes + self._weight_to_read, 2 * self._copied(self._result))
        return max(self._copied(self._source) + self._weight_to_read, self._copied(self._result))

    def backward(self, wanted: Sequence[bool]) -> int:
        """Bytes where these of the gradients of source, weight and bias are wanted."""
        if self._columns:
            return self._bytes_of_columns() * (2 if self._is_transposed else 1)
        of_source, of_result = self._copied(self._source), self._copied(self._result)
        if not wanted[1]:
            return max(of_result + self._weight_to_read, of_source)
        # The weight's gradient is made in blocks. In channels last one more copy is made of it.
        if self._is_channels_last:
            return of_source + of_result + self._weight_in_blocks + self._weight.nbytes
        return max(of_source + of_result + self._weight_in_blocks - self._weight.nbytes, self._weight_in_blocks)

    def _copied(self, tensor: Tensor) -> int:
        """Bytes of a map's copy in oneDNN's layout."""
        layout, channels = _CHANNELS_LAST.get(tensor.dim()), tensor.shape[1]
        if layout is not None and tensor.is_contiguous(memory_format=layout):
            return 0
        if channels == _CHANNELS_OF_AN_IMAGE:
            return 0
        return tensor.nbytes // channels * _in_blocks(channels)

    def _bytes_of_columns(self) -> int:
        """Bytes of the columns that are there at once: of all images, or of one."""
        if self._weight.shape[2:].numel() == 1 and self._source.shape[2:] == self._result.shape[2:]:
            return 0
        beside = self._source if self._is_transposed else self._result
        images = len(beside) if self._columns in ("Slow2d", "Slow3d") else 1
        return images * beside.shape[2:].numel() * self._weight.shape[1:].numel() * self._weight.itemsize


def _in_blocks(channels: int) -> int:
    if channels == _CHANNELS_OF_AN_IMAGE:
        return channels
    return -(-channels // _CHANNELS_PER_BLOCK) * _CHANNELS_PER_BLOCK
