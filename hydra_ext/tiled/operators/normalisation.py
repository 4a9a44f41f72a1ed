"""Batch normalisation over maps, with the statistics of the whole map.

On the simulated device torch's own reduction on the host computes the statistics. They have its bits, and so has every
element of the result. A ReLU behind it then passes the same elements: otherwise gradients would differ by whole pixels.
On a GPU, and for an image of bytes, the statistics are merged over strips in fp64 and rounded once. They are nearer to
the exact ones and differ in the last bits, as the GPU's convolutions do anyway.

The sums of the backward are added over strips in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_ext.tiled.formats import empty_map
from hydra_ext.tiled.geometry import Rows, strips
from hydra_ext.tiled.operators.rowwise import over_rows
from hydra_ext.tiled.pixels import Pixels
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
    result = empty_map(source.shape, source.dtype, source)
    if training:
        mean, variance = _statistics(run, source, (running_mean, running_var), momentum)
        dtype = _parameter_dtype(source, weight)
        saved = mean.to(dtype), (1 / torch.sqrt(variance.double() + eps)).to(dtype)
        # As in torch, the map is scaled by the saved numbers themselves: hence a variance of 1 and no eps.
        weight = saved[1] if weight is None else saved[1] * weight
        statistics, eps = (saved[0], torch.ones_like(saved[0])), 0.0
    else:
        if running_mean is None or running_var is None:
            raise ValueError(
                "batch normalisation without running statistics needs training=True: give it, or statistics"
            )
        statistics = running_mean, running_var
        saved = source.new_empty(0), source.new_empty(0)
    with run.device:
        small = [None if tensor is None else run.device.load(tensor) for tensor in (weight, bias, *statistics)]
    over_rows(run, [source], [result], lambda strip: [func(strip, *small, False, momentum, eps)[0]])
    return result, *saved


def _parameter_dtype(source: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    """The dtype of statistics. A low-precision map may have parameters of higher precision."""
    return source.dtype if weight is None else weight.dtype


def _statistics(
    run: TiledRun, source: torch.Tensor, running: tuple[torch.Tensor | None, torch.Tensor | None], momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel, on the host. Updates the running statistics."""
    if run.device.device.type == "cpu" and not isinstance(source, Pixels):
        mean, variance = torch.ops.aten.batch_norm_update_stats(source, *running, momentum)
        return mean, variance
    mean, variance = _over_strips(run, source)
    count = source.numel() // source.shape[1]
    _update(running[0], mean, momentum)
    _update(running[1], variance * (count / (count - 1)), momentum)
    return mean, variance


def _update(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(momentum * value + (1 - momentum) * running.double())


def _over_strips(run: TiledRun, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel, in fp64.

    Each strip's mean and squared deviations are merged into those so far (Chan, Golub, LeVeque 1979). So no precision
    is lost if the mean is far from zero.
    """
    channels = source.shape[1]
    mean, squares = (torch.zeros(channels, dtype=torch.float64, device="cpu") for _ in range(2))
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
    height = maps[0].shape[2]
    parts = list(strips(height, run.rows(height, lambda rows: rows * per_row)))
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
    result = empty_map(source.shape, source.dtype, source) if wanted[0] else None
    if result is not None:
        count = source.numel() // source.shape[1]
        scales = [inverse] if weight is None else [inverse, weight]
        # In training the statistics pass gradients on, too: the mean gradient and its part along the map.
        numbers = [mean, of_weight * inverse / count, of_bias / count, *scales] if training else scales
        maps = [gradient, source] if training else [gradient]
        compute = _through_statistics if training else _scaled
        small = [number.to(dtype).view(-1, 1, 1) for number in numbers]
        over_rows(run, [*maps, *small], [result], compute, temporary_bytes=2 * dtype.itemsize)
    return result, of_weight.to(dtype) if wanted[1] else None, of_bias.to(dtype) if wanted[2] else None


def _through_statistics(
    gradient: torch.Tensor,
    source: torch.Tensor,
    mean: torch.Tensor,
    slope: torch.Tensor,
    shift: torch.Tensor,
    *scales: torch.Tensor,
) -> Sequence[torch.Tensor]:
    along = (source - mean).mul_(slope)
    rest = torch.sub(gradient, along, out=along).sub_(shift)
    for scale in scales:
        rest.mul_(scale)
    return [rest.to(gradient.dtype)]


def _scaled(gradient: torch.Tensor, *scales: torch.Tensor) -> Sequence[torch.Tensor]:
    scaled = gradient
    for scale in scales:  # one after the other, as torch does
        scaled = scaled * scale
    return [scaled.to(gradient.dtype)]


def _sums(
    run: TiledRun, gradient: torch.Tensor, source: torch.Tensor, statistics: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the gradient, and of its product with the normalised map, for each channel; fp64 on the host."""
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
        raise ValueError("the backward of batch normalisation got no statistics: give those of the forward")
    return tensor
