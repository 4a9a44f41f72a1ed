"""Convolutions and transposed convolutions in strips, forward and backward.

Forward: a strip's operand is loaded with its halo. One call of the whole map's kernel, with the whole map's padding,
makes every element of the result.

Backward: one call for each strip makes the gradient of the strip's own input rows. It is complete, since every output
that these rows reach is loaded. The call also makes these rows' part of the weight's gradient, with zeros in the other
rows of the strip. Parts of weights' and biases' gradients are added in fp64, strip after strip from the top, and
rounded once at the end.

In fp32 on a CPU torch takes another kernel for small maps. So a strip of a map that is not small is never small either.

What a kernel takes besides its operands is reckoned. Kernels of some processors take more, such as those with units for
matrices of bf16. Where strips of the reckoned height do not fit, the operation starts again in strips of half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hydra_ext.tiled.formats import empty_map
from hydra_ext.tiled.geometry import BackwardStrip, Rows, TransposedWindow, Window, strips
from hydra_ext.tiled.operators.kernels import ConvolutionBytes, least_rows
from hydra_ext.tiled.run import TiledRun, made_of


@dataclass(frozen=True)
class _Arguments:
    """The arguments of ``aten.convolution`` after its tensors, as they were given."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def window(self, source: torch.Tensor, weight: torch.Tensor) -> Window | TransposedWindow:
        """The window along the rows. A list of one number counts for rows and columns."""
        height, reach = source.shape[2], self.dilation[0] * (weight.shape[2] - 1)
        if self.transposed:
            extra = self.output_padding[0]
            return TransposedWindow(height, reach, self.stride[0], self.padding[0], extra, least_rows(source))
        return Window.of_convolution(
            height=height, reach=reach, stride=self.stride[0], padding=self.padding[0], least=least_rows(source)
        )

    def takes(
        self, run: TiledRun, source: torch.Tensor, result: torch.Tensor, weight: torch.Tensor
    ) -> ConvolutionBytes:
        """The device bytes of strips."""
        plain = self.groups == 1 and all(step == 1 for step in self.dilation)
        on_cpu = run.device.device.type == "cpu"
        return ConvolutionBytes(source, result, weight, self.transposed, plain, in_columns=on_cpu)


def _in_strips(
    run: TiledRun, height: int, strip_bytes: Callable[[int], int], compute: Callable[[Sequence[Rows]], None]
) -> None:
    """Computes all rows of a map in strips that fit, and counts these."""
    rows = run.rows(height, strip_bytes)
    while True:
        parts = list(strips(height, rows))
        with run.device:
            try:
                compute(parts)
                run.device.settle()
                break
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
            run.device.settle()
        rows //= 2
    run.count(len(parts))


def forward(
    run: TiledRun, func: Any, source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *arguments: Any
) -> torch.Tensor:
    """``aten.convolution`` of a map (N, C, H, W)."""
    shape = made_of(func, source, weight, bias, *arguments).shape
    result = empty_map(shape, source.dtype, source, weight)
    given = _Arguments(*arguments)
    window, takes = given.window(source, weight), given.takes(run, source, result, weight)

    def compute(parts: Sequence[Rows]) -> None:
        whole = run.device.load(weight), None if bias is None else run.device.load(bias)
        for wanted in parts:
            _forward_strip(run, func, (source, result), (*whole, *arguments), (window.forward(wanted), wanted))

    _in_strips(run, shape[2], lambda rows: takes.forward(*window.forward_most(rows)), compute)
    return result


def _forward_strip(
    run: TiledRun, func: Any, maps: tuple[torch.Tensor, torch.Tensor], rest: tuple[Any, ...], rows: tuple[Any, Rows]
) -> None:
    source, result = maps
    strip, wanted = rows
    made = func(run.device.load(source, strip.load), *rest)
    keep = strip.keep.within(strip.result)
    run.device.store(made.narrow(-2, keep.begin, keep.count), result, wanted)


@dataclass
class _Sums:
    """Gradients of a weight (or None) and of a bias (or None), on the device, in fp64."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def zeros(cls, weight: torch.Tensor, channels: int, wanted: Sequence[bool]) -> _Sums:
        of_weight, of_bias = (
            torch.zeros(shape, dtype=torch.float64, device=weight.device) for shape in (weight.shape, (channels,))
        )
        return cls(of_weight if wanted[1] else None, of_bias if wanted[2] else None)


def backward(
    run: TiledRun,
    func: Any,
    gradient: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    *arguments: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``aten.convolution_backward``. The last argument says which of (input, weight, bias) need a gradient."""
    *given, wanted = arguments
    window, takes = _Arguments(*given).window(source, weight), _Arguments(*given).takes(run, source, gradient, weight)
    channels = gradient.shape[1]
    results = (
        empty_map(source.shape, source.dtype, source, weight) if wanted[0] else None,
        torch.empty(weight.shape, dtype=weight.dtype, device="cpu") if wanted[1] else None,
        torch.empty(channels, dtype=weight.dtype, device="cpu") if wanted[2] else None,
    )

    def compute(parts: Sequence[Rows]) -> None:
        on_device = run.device.load(weight)
        sums = _Sums.zeros(on_device, channels, wanted)
        for own in parts:
            call = _BackwardCall(func, window.backward(own), on_device, (*given, [*wanted[:2], False]), sums)
            call.run(run, gradient, source, results[0])
        for total, result in ((sums.weight, results[1]), (sums.bias, results[2])):
            if total is not None and result is not None:
                run.device.store(total.to(result.dtype), result, Rows(0, result.shape[0]), dim=0)

    _in_strips(run, source.shape[2], lambda rows: takes.backward(*window.backward_most(rows)), compute)
    return results


@dataclass(frozen=True)
class _BackwardCall:
    """The backward of one strip."""

    func: Any
    rows: BackwardStrip
    weight: torch.Tensor
    arguments: tuple[Any, ...]
    sums: _Sums

    def run(self, run: TiledRun, gradient: torch.Tensor, source: torch.Tensor, result: torch.Tensor | None) -> None:
        """Stores the gradient of the strip's own rows in ``result``, and adds its part of the others to the sums."""
        outgoing = run.device.load(gradient, self.rows.output)
        if self.sums.bias is not None:
            own = self.rows.own_output.within(self.rows.output)
            self.sums.bias += outgoing.narrow(-2, own.begin, own.count).sum((0, 2, 3), dtype=torch.float64)
        if result is None and self.sums.weight is None:
            return
        own = self.rows.own.within(self.rows.input)
        given = self._own_rows_among_zeros(run, source, own)
        incoming, part, _ = self.func(outgoing, given, self.weight, None, *self.arguments)
        if result is not None:
            run.device.store(incoming.narrow(-2, own.begin, own.count), result, self.rows.own)
        if self.sums.weight is not None:
            self.sums.weight += part

    def _own_rows_among_zeros(self, run: TiledRun, source: torch.Tensor, own: Rows) -> torch.Tensor:
        shape = [*source.shape[:2], self.rows.input.count, source.shape[3]]
        if self.sums.weight is not None and own.count == shape[2]:
            return run.device.load(source, self.rows.own)
        strip = empty_map(shape, source.dtype, source, device=run.device.device).zero_()
        if self.sums.weight is not None:  # the gradient of the input does not depend on the input
            strip.narrow(-2, own.begin, own.count).copy_(run.device.load(source, self.rows.own))
        return strip
