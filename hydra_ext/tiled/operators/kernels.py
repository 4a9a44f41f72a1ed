"""What torch's kernels for convolutions take besides their operands, and from which size of a map on which one is used.

In fp32 on a CPU oneDNN copies maps into blocks of channels. In other dtypes, for small maps, and for some gradients of
weights, each image is written out as columns: for each place of the kernel all the numbers that it is multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydra_ext.tiled.run import row_bytes

# ATen's use_mkldnn() (aten/src/ATen/native/Convolution.cpp) takes oneDNN for maps with more elements than this.
_SMALL_ELEMENTS = 20480
_CHANNELS_PER_BLOCK = 16


def least_rows(source: torch.Tensor) -> int:
    """How many rows a strip needs to be no small map, if the map is none; else all that there are."""
    if source.dtype != torch.float32:
        return 1
    if source.numel() <= _SMALL_ELEMENTS:
        return source.shape[2]
    return _SMALL_ELEMENTS // (source.numel() // source.shape[2]) + 1


@dataclass(frozen=True)
class ConvolutionBytes:
    """What a strip of a convolution takes on the device: both maps, the weight, and what kernels make of them.

    Attributes:
        source: the whole map (N, C, H, W), or one without memory.
        result: likewise; in backward its gradient.
        plain: neither groups nor dilation.
        in_columns: the device's kernels may write columns.
    """

    source: torch.Tensor
    result: torch.Tensor
    weight: torch.Tensor
    transposed: bool
    plain: bool
    in_columns: bool

    def forward(self, loaded: int, made: int) -> int:
        """Of so many rows of both maps."""
        columns = 0 if self._has_blocks else self._columns(loaded, made)
        blocks = loaded * _blocks(self.source) + made * _blocks(self.result)
        return self._both(loaded, made) + max(blocks, columns) + self.weight.nbytes + self._weight_blocks

    def backward(self, given: int, outgoing: int) -> int:
        """Of so many rows of the source, which has a gradient there, and of the result's gradient."""
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
        """One group after the other: a weight's first dimension is that of the side that the columns are not of."""
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
