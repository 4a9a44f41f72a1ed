"""Poolings and upsampling in strips, forward and backward: the kernel of the whole map, on rows with their halo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_ext.errors import UnsupportedOperation
from hydra_ext.tiled.formats import empty_map
from hydra_ext.tiled.geometry import BackwardStrip, Rows, Window, strips
from hydra_ext.tiled.run import TiledRun, made_of, row_bytes


def _pooling(height: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Window:
    reach = dilation * (kernel - 1)

    def outputs(rows: int) -> int:
        span = rows + 2 * padding - reach - 1
        count = (-(-span // stride) if ceil_mode else span // stride) + 1
        # A window of ceil mode may begin in the map or in the padding above it, not below.
        return count - 1 if ceil_mode and (count - 1) * stride >= rows + padding else count

    return Window(height, reach, stride, padding, outputs)


def _first(sizes: Sequence[int], default: int) -> int:
    """The number for rows of (rows, columns). torch leaves out lists of defaults."""
    return sizes[0] if sizes else default


def _window_of(source: torch.Tensor, settings: Sequence[Any], *, dilated: bool) -> Window:
    """The window of the arguments after the map: kernel, stride, padding, dilation if there is one, and ceil mode."""
    given = [*settings, *([[], [], [1], False] if dilated else [[], [], False])[len(settings) - 1 :]]
    kernel = given[0][0]
    dilation = _first(given[3], 1) if dilated else 1
    ceil_mode = given[4] if dilated else given[3]
    return _pooling(source.shape[2], kernel, _first(given[1], kernel), _first(given[2], 0), dilation, ceil_mode)


def _parts(run: TiledRun, source: torch.Tensor, result: torch.Tensor, window: Window, *, of_source: bool) -> list[Rows]:
    """Strips of the source's rows or the result's, by the device bytes of both."""
    per_source, per_result = row_bytes(source), row_bytes(result)

    def strip_bytes(rows: int) -> int:
        of_it, of_result = window.backward_most(rows) if of_source else window.forward_most(rows)
        # Backward has the tensor and its gradient on both sides.
        return (2 if of_source else 1) * (of_it * per_source + of_result * per_result)

    height = (source if of_source else result).shape[2]
    parts = list(strips(height, run.rows(height, strip_bytes)))
    run.count(len(parts))
    return parts


def average(run: TiledRun, func: Any, source: torch.Tensor, *settings: Any) -> torch.Tensor:
    """``aten.avg_pool2d``."""
    window = _window_of(source, settings[:4], dilated=False)
    result = empty_map(made_of(func, source, *settings).shape, source.dtype, source)
    for wanted in _parts(run, source, result, window, of_source=False):
        with run.device:
            strip = window.forward(wanted)
            keep = strip.keep.within(strip.result)
            made = func(run.device.load(source, strip.load), *settings).narrow(-2, keep.begin, keep.count)
            run.device.store(made, result, wanted)
            del made
    run.device.settle()
    return result


def average_backward(
    run: TiledRun, func: Any, gradient: torch.Tensor, source: torch.Tensor, *settings: Any
) -> torch.Tensor:
    """``aten.avg_pool2d_backward``, which needs only the shape of the source."""
    window = _window_of(source, settings[:4], dilated=False)
    result = empty_map(source.shape, gradient.dtype, source)
    for own in _parts(run, source, gradient, window, of_source=True):
        strip = window.backward(own)
        with run.device:
            shape = [*source.shape[:2], strip.input.count, source.shape[3]]
            like = empty_map(shape, source.dtype, source, device=run.device.device)
            made = func(run.device.load(gradient, strip.output), like, *settings)
            _store_own(run, made, result, strip)
            del made, like
    run.device.settle()
    return result


def maximum(run: TiledRun, func: Any, source: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.max_pool2d_with_indices``. Indices refer to the whole map, in 64 bits."""
    window = _window_of(source, settings, dilated=True)
    shape = made_of(func, source, *settings)[0].shape
    result, indices = empty_map(shape, source.dtype, source), empty_map(shape, torch.int64, source)
    for wanted in _parts(run, source, indices, window, of_source=False):
        strip = window.forward(wanted)
        keep = strip.keep.within(strip.result)
        with run.device:
            values, places = func(run.device.load(source, strip.load), *settings)
            places += strip.load.begin * source.shape[3]
            run.device.store(values.narrow(-2, keep.begin, keep.count), result, wanted)
            run.device.store(places.narrow(-2, keep.begin, keep.count), indices, wanted)
            del values, places
    run.device.settle()
    return result, indices


def maximum_backward(
    run: TiledRun, func: Any, gradient: torch.Tensor, source: torch.Tensor, *settings: Any
) -> torch.Tensor:
    """``aten.max_pool2d_with_indices_backward``. The last of ``settings`` is the indices."""
    *shape_settings, indices = settings
    window = _window_of(source, shape_settings, dilated=True)
    result = empty_map(source.shape, gradient.dtype, source)
    for own in _parts(run, source, indices, window, of_source=True):
        strip = window.backward(own)
        with run.device:
            outgoing, places = run.device.load(gradient, strip.output), run.device.load(indices, strip.output)
            places -= strip.input.begin * source.shape[3]
            # Windows at the strip's ends may have their maximum outside, where the kernel would write.
            outside = (places < 0) | (places >= strip.input.count * source.shape[3])
            outgoing.masked_fill_(outside, 0)
            places.masked_fill_(outside, 0)
            shape = [*source.shape[:2], strip.input.count, source.shape[3]]
            like = empty_map(shape, source.dtype, source, device=run.device.device)
            made = func(outgoing, like, *shape_settings, places)
            _store_own(run, made, result, strip)
            del made, like, outgoing, places, outside
    run.device.settle()
    return result


def _store_own(run: TiledRun, made: torch.Tensor, result: torch.Tensor, strip: BackwardStrip) -> None:
    own = strip.own.within(strip.input)
    run.device.store(made.narrow(-2, own.begin, own.count), result, strip.own)


def _times(func: Any, inside: int, outside: int, scale: float | None) -> int:
    """Number of rows that upsampling makes of one. Refuses factors for which strips cannot have the map's numbers.

    ``scale`` is the factor that was asked for, or None. torch places rows by it, not by the two heights: 2.01 makes 80
    rows of 40, whose positions drift down the map.
    """
    times, rest = divmod(outside, inside)
    exact = func.overloadpacket in (torch.ops.aten.upsample_nearest2d, torch.ops.aten.upsample_nearest2d_backward)
    # torch computes in fp32 between which rows it interpolates. Far down a map only halves, quarters... are exact.
    if rest or times < 1 or scale not in (None, times) or not (exact or times & (times - 1) == 0):
        by = "" if scale is None else f" by a factor of {scale}"
        raise UnsupportedOperation(
            f"{func} from {inside} to {outside} rows{by}: take a whole factor ('nearest') or a power of two "
            "('bilinear', align_corners=False), for which strips have the whole map's numbers",
            operation=str(func),
        )
    return times


def _scale(func: Any, settings: Sequence[Any]) -> float | None:
    """The factor of rows among the arguments after the sizes; None if it was left out."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("scales_h") - names.index("input_size" if "input_size" in names else "output_size") - 1
    return settings[place] if place < len(settings) else None


def _refuse_corners(func: Any, settings: Sequence[Any]) -> None:
    if settings and settings[0] is True:
        raise UnsupportedOperation(
            f"{func} with align_corners=True depends on the height of the map in every row: take align_corners=False",
            operation=str(func),
        )


def upsample(run: TiledRun, func: Any, source: torch.Tensor, size: Sequence[int], *settings: Any) -> torch.Tensor:
    """``aten.upsample_nearest2d`` and ``aten.upsample_bilinear2d``."""
    _refuse_corners(func, settings)
    times = _times(func, source.shape[2], size[0], _scale(func, settings))
    result = empty_map(made_of(func, source, size, *settings).shape, source.dtype, source)
    per_row = row_bytes(source) + times * row_bytes(result)
    parts = list(strips(source.shape[2], run.rows(source.shape[2], lambda rows: (rows + 2) * per_row)))
    for own in parts:
        # Bilinear rows lie between the map's: one more above and below.
        load = Rows(max(0, own.begin - 1), min(source.shape[2], own.end + 1))
        with run.device:
            made = func(run.device.load(source, load), [load.count * times, size[1]], *settings)
            wanted = Rows(own.begin * times, own.end * times)
            made = made.narrow(-2, wanted.begin - load.begin * times, wanted.count)
            run.device.store(made, result, wanted)
            del made
    run.device.settle()
    run.count(len(parts))
    return result


def upsample_backward(
    run: TiledRun, func: Any, gradient: torch.Tensor, size: Sequence[int], shape: Sequence[int], *settings: Any
) -> torch.Tensor:
    """``aten.upsample_nearest2d_backward`` and ``aten.upsample_bilinear2d_backward``."""
    _refuse_corners(func, settings)
    height = shape[2]
    times = _times(func, height, size[0], _scale(func, settings))
    result = empty_map(shape, gradient.dtype, gradient)
    per_row = row_bytes(result) + times * row_bytes(gradient)
    parts = list(strips(height, run.rows(height, lambda rows: (rows + 4) * per_row)))
    for own in parts:
        # Two more rows above and below: the nearer one also gets gradients from rows between it and the strip's own.
        given = Rows(max(0, own.begin - 2), min(height, own.end + 2))
        with run.device:
            outgoing = run.device.load(gradient, Rows(given.begin * times, given.end * times))
            its_shape = [*shape[:2], given.count, shape[3]]
            made = func(outgoing, [given.count * times, size[1]], its_shape, *settings)
            own_here = own.within(given)
            run.device.store(made.narrow(-2, own_here.begin, own_here.count), result, own)
            del made, outgoing
    run.device.settle()
    run.count(len(parts))
    return result
