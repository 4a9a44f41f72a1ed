"""Operations that compute each row of their result from the same row of their operands: strips without a halo."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hydra_ext.errors import UnsupportedOperation
from hydra_ext.tiled.geometry import Rows, strips
from hydra_ext.tiled.operators.overlaps import refuse_overlaps
from hydra_ext.tiled.pixels import Pixels
from hydra_ext.tiled.run import TiledRun, made_of

_VECTOR_ELEMENTS = 64  # a multiple of the elements in one unrolled step of any instruction set


def over_rows(
    run: TiledRun,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    compute: Callable[..., Sequence[torch.Tensor]],
    *,
    temporary_bytes: int = 0,
    of_rows: bool = True,
) -> None:
    """Computes maps of maps, strip by strip.

    Args:
        run: The run of strips.
        operands: Host tensors. One with a single row, or with fewer dimensions, is given whole to every strip.
        results: Host tensors of the shape that the operands are broadcast to. They may be among the operands.
        compute: Function of one device tensor for each operand that returns one for each result.
        temporary_bytes: Bytes that ``compute`` allocates for each element, besides the results.
        of_rows: Whether ``compute`` needs whole rows. If not, a map whose rows are too large for a strip, such as a
            flattened one, is cut along its longest dimension.
    """
    shape = _together((*operands, *results))
    each = sum(tensor.element_size() for tensor in (*operands, *results)) + temporary_bytes
    dim = max(-2, -len(shape))  # the rows, or the only dimension
    whole_rows = of_rows or run.fits(shape.numel() // max(1, shape[dim]) * each)
    if not whole_rows:
        dim = max(range(-len(shape), 0), key=lambda dimension: shape[dimension])
    height = shape[dim]
    cut = [operand.dim() >= -dim and operand.shape[dim] == height and height > 1 for operand in operands]
    elements = shape.numel() // max(1, height)
    most = (run.rows if whole_rows else run.part)(height, lambda rows: rows * elements * each)
    parts = list(strips(height, most if most == height else _in_whole_vectors(most, elements)))
    with run.device:
        whole = [None if is_cut else run.device.load(t) for t, is_cut in zip(operands, cut, strict=True)]

        def make(rows: Rows) -> None:
            given = [
                run.device.load(operand, rows, dim=dim) if loaded is None else loaded
                for operand, loaded in zip(operands, whole, strict=True)
            ]
            for made, result in zip(compute(*given), results, strict=True):
                run.device.store(made, result, rows, dim=dim)

        for rows in parts:
            make(rows)
        run.device.settle()
    run.count(len(parts))


def _in_whole_vectors(rows: int, elements: int) -> int:
    """At most ``rows`` rows of this many elements, if possible a whole number of vectors.

    The last bits of torch's functions on the CPU, such as exp, differ for the elements left over at the end.
    """
    together = _VECTOR_ELEMENTS // math.gcd(_VECTOR_ELEMENTS, elements)
    return rows if rows < together else rows - rows % together


def _together(tensors: Sequence[torch.Tensor]) -> torch.Size:
    """The shape that tensors are broadcast to."""
    return torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call,no-any-return]


def pointwise(run: TiledRun, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation that computes each element from one of each operand, in place or not."""
    return _elementwise(run, func, args, kwargs, of_rows=False)


def along_a_dimension(run: TiledRun, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation that computes each element from several of the same row."""
    return _elementwise(run, func, args, kwargs, of_rows=True)


def _elementwise(run: TiledRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_rows: bool) -> Any:
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    operands = [leaves[place] for place in places]
    written = _written(func, args, kwargs)
    if written is not None:
        refuse_overlaps(func, written, operands)
    made = [written] if written is not None else made_of(func, *args, **kwargs)
    made = list(made) if isinstance(made, (tuple, list)) else [made]
    shape = _together(operands)
    if any(tensor.shape != shape for tensor in made):
        raise UnsupportedOperation(
            f"{func} makes a result of shape {[tuple(tensor.shape) for tensor in made]} from maps of shape "
            f"{tuple(shape)}: in strips, each row of a result has to come from one row; compute it outside the context",
            operation=str(func),
        )
    results = [written] if written is not None else [torch.empty_like(tensor, device="cpu") for tensor in made]

    def compute(*strips_of_operands: torch.Tensor) -> Sequence[torch.Tensor]:
        for place, strip in zip(places, strips_of_operands, strict=True):
            leaves[place] = strip
        strip_args, strip_kwargs = torch.utils._pytree.tree_unflatten(leaves, spec)
        value = func(*strip_args, **strip_kwargs)
        return value if isinstance(value, (tuple, list)) else (value,)

    # An image of bytes is normalised by channel, in whole rows.
    of_rows = of_rows or any(isinstance(operand, Pixels) for operand in operands)
    over_rows(run, operands, results, compute, of_rows=of_rows)
    return results[0] if len(results) == 1 else tuple(results)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that an operation writes to: its first argument, or none."""
    named = [
        argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    if not named:
        return None
    if named != [func._schema.arguments[0].name] or not args:
        raise UnsupportedOperation(
            f"{func} writes to {', '.join(named)}: in strips an operation makes new maps or changes its first "
            "argument; call it without out=",
            operation=str(func),
        )
    first: torch.Tensor = args[0]
    return first
