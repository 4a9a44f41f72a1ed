"""Memory of torch's convolution kernels besides their operands, and the size of a map from which each kernel is used.

In fp32 on a CPU oneDNN copies maps into blocks of channels. In other dtypes, for small maps, and for some gradients of
weights, each image is unrolled into columns: for each element of the kernel all the numbers that it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydra_ext.tiled.run import row_bytes

# ATen's use_mkldnn() (aten/src/ATen/native/Convolution.cpp) takes oneDNN for maps with more elements than this.
_SMALL_ELEMENTS = 20480
_CHANNELS_PER_BLOCK = 16


def least_rows(source: torch.Tensor) -> int:
    """Least number of rows of a strip so that it is not a small map. If the map is small, all its rows."""
    if source.dtype != torch.float32:
        return 1
    if source.numel() <= _SMALL_ELEMENTS:
        return source.shape[2]
    return _SMALL_ELEMENTS // (source.numel() // source.shape[2]) + 1


@dataclass(frozen=True)
class ConvolutionBytes:
    """Device bytes of a convolution's strip: both maps, the weight, and the kernels' copies of them.

    Attributes:
        source: The whole map (N, C, H, W), or one without memory.
        result: The whole result, likewise; in backward its gradient.
        weight: The weight.
        transposed: Whether it is a transposed convolution.
        plain: Whether there are neither groups nor dilation.
        in_columns: Whether the device's kernels may unroll into columns.
    """

    source: torch.Tensor
    result: torch.Tensor
    weight: torch.Tensor
    transposed: bool
    plain: bool
    in_columns: bool

    def forward(self, loaded: int, made: int) -> int:
        """Bytes for these numbers of rows of both maps."""
        columns = 0 if self._has_blocks else self._columns(loaded, made)
        blocks = loaded * _blocks(self.source) + made * _blocks(self.result)
        return self._both(loaded, made) + max(blocks, columns) + self.weight.nbytes + self._weight_blocks

    def backward(self, given: int, outgoing: int) -> int:
        """Bytes for these numbers of rows of the source and its gradient, and of the result's gradient."""
        columns = 0 if self._has_blocks and self.plain else self._columns(given, outgoing)
        blocks = 2 * given * _blocks(self.source) + outgoing * _blocks(self.result)
        # The weight, a strip's gradient of it, both as they are and in fp64, and the sum of all strips.
        of_weight = 2 * self.weight.nbytes + 2 * 8 * self.weight.numel() + self._weight_blocks
        return self._both(2 * given, outgoing) + max(blocks, columns) + of_weight

    @property
    def _has_blocks(self) -> bool:
        return self.source.dtype == torch.float32 and self.source.numel() > _SMALL_ELEMENTS

    def _both(self, of_source: int, of_result: int) -> int:
        return of_source * row_bytes(self.source) + of_result * row_bytes(self.result)

    def _columns(self, of_source: int, of_result: int) -> int:
        """Bytes of columns, for one group at a time. They have the channels of the weight's second dimension."""
        if not self.in_columns:
            return 0
        rows, beside = (of_source, self.source) if self.transposed else (of_result, self.result)
        return rows * row_bytes(beside) // max(1, beside.shape[1]) * self.weight.shape[1:].numel()

    @property
    def _weight_blocks(self) -> int:
        outside, inside = map(_in_blocks, self.weight.shape[:2])
        return self.weight.shape[2:].numel() * outside * inside * self.weight.element_size()


def _in_blocks(channels: int) -> int:
    return -(-channels // _CHANNELS_PER_BLOCK) * _CHANNELS_PER_BLOCK


def _blocks(tensor: torch.Tensor) -> int:
    """Bytes of the copy of a map's row in blocks of channels."""
    channels = max(1, tensor.shape[1])
    return row_bytes(tensor) // channels * _in_blocks(channels)
