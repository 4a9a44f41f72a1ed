"""Batch normalisation over maps: statistics of the whole map, added up over strips.

Training reads the map twice, for the statistics and for the result, and so does its backward. Sums are made in fp64:
means and variances are rounded to the map's dtype once, so that they are at least as near to the exact ones as those
that torch adds up in one pass; the order of strips shows in no digit of fp32 but by rare ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_ext.tiled.geometry import Rows, strips
from hydra_ext.tiled.rowwise import over_rows
from hydra_ext.tiled.run import TiledRun, row_bytes

_ALL_BUT_CHANNELS = (0, 2, 3)


def forward(
    run: TiledRun,
    func: Any,
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``aten.native_batch_norm`` of a map: the result, and in training mean and 1 / sqrt(variance + eps)."""
    result = torch.empty(source.shape, dtype=source.dtype)
    if training:
        mean, variance = _statistics(run, source)
        count = source.numel() // source.shape[1]
        _update(running_mean, mean, momentum)
        _update(running_var, variance * (count / (count - 1)), momentum)
        dtype = _parameter_dtype(source, weight)
        used = mean.to(dtype), variance.to(dtype)
        saved = used[0], (variance + eps).rsqrt().to(dtype)
    else:
        if running_mean is None or running_var is None:
            raise ValueError("batch normalisation without running statistics can only be evaluated with training=True")
        used = running_mean, running_var
        saved = source.new_empty(0), source.new_empty(0)
    with run.device:
        small = [None if tensor is None else run.device.load(tensor) for tensor in (weight, bias, *used)]
    over_rows(run, [source], [result], lambda strip: [func(strip, *small, False, momentum, eps)[0]])
    return result, *saved


def _parameter_dtype(source: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    """The dtype of statistics: a low-precision map may have parameters of higher precision."""
    return source.dtype if weight is None else weight.dtype


def _update(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(momentum * value + (1 - momentum) * running.double())


def _statistics(run: TiledRun, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel, fp64 on the host.

    Each strip's own mean and squared deviations are merged into those so far (Chan, Golub, LeVeque 1979): nothing is
    lost where the mean is far from zero.
    """
    channels = source.shape[1]
    mean, squares = (torch.zeros(channels, dtype=torch.float64) for _ in range(2))
    seen = 0
    for strip in _strips_of(run, [source]):
        with run.device:
            here, its_mean, its_squares = _strip_statistics(run, source, strip)
        difference = its_mean - mean
        total = seen + here
        mean += difference * (here / total)
        squares += its_squares + difference.square() * (seen * here / total)
        seen = total
    return mean, squares / seen


def _strip_statistics(run: TiledRun, source: torch.Tensor, rows: Rows) -> tuple[int, torch.Tensor, torch.Tensor]:
    strip = run.device.load(source, rows).double()
    variance, mean = torch.var_mean(strip, _ALL_BUT_CHANNELS, correction=0)
    count = strip.numel() // strip.shape[1]
    return count, mean.cpu(), variance.cpu() * count


def _strips_of(run: TiledRun, maps: Sequence[torch.Tensor]) -> list[Rows]:
    """Strips in which maps of one shape are read as fp64."""
    per_row = sum(row_bytes(tensor) * (1 + 8 // tensor.element_size()) for tensor in maps)
    parts = list(strips(maps[0].shape[2], run.rows(per_row)))
    run.count(len(parts))
    return parts


def backward(
    run: TiledRun,
    func: Any,
    gradient: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_inverse: torch.Tensor | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``aten.native_batch_norm_backward``, for the input, the weight and the bias."""
    if training:
        mean, inverse = _given(saved_mean).double(), _given(saved_inverse).double()
    else:
        mean, inverse = _given(running_mean).double(), (_given(running_var).double() + eps).rsqrt()
    of_bias, of_weight = _sums(run, gradient, source, (mean, inverse))
    dtype = _parameter_dtype(source, weight)
    result = torch.empty(source.shape, dtype=source.dtype) if wanted[0] else None
    if result is not None:
        count = source.numel() // source.shape[1]
        scale = inverse if weight is None else inverse * weight.double()
        # What the statistics themselves pass on, in training: the mean gradient and its part along the map.
        shift, slope = (of_bias / count, of_weight * inverse / count) if training else (0 * mean, 0 * mean)
        numbers = [number.to(dtype).view(-1, 1, 1) for number in (mean, slope, shift, scale)]
        over_rows(run, [gradient, source, *numbers], [result], _input_gradient, temporary_bytes=2 * dtype.itemsize)
    return result, of_weight.to(dtype) if wanted[1] else None, of_bias.to(dtype) if wanted[2] else None


def _input_gradient(
    gradient: torch.Tensor,
    source: torch.Tensor,
    mean: torch.Tensor,
    slope: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
) -> Sequence[torch.Tensor]:
    along = (source - mean).mul_(slope)
    return [torch.sub(gradient, along, out=along).sub_(shift).mul_(scale).to(gradient.dtype)]


def _sums(
    run: TiledRun, gradient: torch.Tensor, source: torch.Tensor, statistics: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each channel the sums of the gradient, and of its product with the normalised map; fp64 on the host."""
    mean, inverse = (number.view(-1, 1, 1) for number in statistics)
    of_bias, of_weight = torch.zeros_like(statistics[0]), torch.zeros_like(statistics[0])
    for rows in _strips_of(run, [gradient, source]):
        with run.device:
            its_bias, its_weight = _strip_sums(run, (gradient, source, mean), rows)
        of_bias += its_bias
        of_weight += its_weight
    return of_bias, of_weight * inverse.view(-1)


def _strip_sums(
    run: TiledRun, maps: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, source, mean = maps
    outgoing = run.device.load(gradient, rows).double()
    its_bias = outgoing.sum(_ALL_BUT_CHANNELS).cpu()
    centred = run.device.load(source, rows).double().sub_(run.device.load(mean))
    return its_bias, outgoing.mul_(centred).sum(_ALL_BUT_CHANNELS).cpu()


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError("batch normalisation goes backward with the statistics that it went forward with: none given")
    return tensor
