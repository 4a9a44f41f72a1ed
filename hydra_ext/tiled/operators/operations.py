"""Tables of torch's operations, and how each of them runs in strips."""

from __future__ import annotations

from typing import Any

import torch

from hydra_ext import _C
from hydra_ext.errors import UnsupportedOperation
from hydra_ext.tiled.operators import convolutions, losses, normalisation, rowwise, windows
from hydra_ext.tiled.run import Handler, TiledRun

aten = torch.ops.aten

# Operations on maps of four dimensions, which the device computes whatever their size.
_ON_MAPS: dict[Any, Handler] = {
    aten.convolution.default: convolutions.forward,
    aten.convolution_backward.default: convolutions.backward,
    aten.native_batch_norm.default: normalisation.forward,
    aten.native_batch_norm_backward.default: normalisation.backward,
    aten.max_pool2d_with_indices.default: windows.maximum,
    aten.max_pool2d_with_indices_backward.default: windows.maximum_backward,
    aten.avg_pool2d.default: windows.average,
    aten.avg_pool2d_backward.default: windows.average_backward,
    aten.upsample_nearest2d.default: windows.upsample,
    aten.upsample_nearest2d_backward.default: windows.upsample_backward,
    aten.upsample_bilinear2d.default: windows.upsample,
    aten.upsample_bilinear2d_backward.default: windows.upsample_backward,
}

_LOSSES: dict[Any, Handler] = {
    aten.log_sigmoid_forward.default: losses.log_sigmoid,
    aten.log_sigmoid_backward.default: losses.log_sigmoid_backward,
    aten.binary_cross_entropy_with_logits.default: losses.forward,
    aten.binary_cross_entropy.default: losses.forward,
    aten.binary_cross_entropy_backward.default: losses.backward,
    aten.mse_loss.default: losses.forward,
    aten.mse_loss_backward.default: losses.backward,
    aten.smooth_l1_loss.default: losses.forward,
    aten.smooth_l1_loss_backward.default: losses.backward,
    aten.huber_loss.default: losses.forward,
    aten.huber_loss_backward.default: losses.backward,
}

# Operations along a dimension, with that argument's index. Along any dimension but rows, elements depend on one row.
_ALONG_A_DIMENSION = {
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}

# Pointwise operations without torch's tag.
_POINTWISE = {
    *(aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish.default),
    *(aten.hardswish_.default, aten.hardswish_backward.default, aten.hardtanh_backward.default),
    *(aten.leaky_relu_backward.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten.masked_fill.Tensor),
    *(aten.mish_backward.default, aten.softplus_backward.default, aten.threshold_backward.default),
    *(aten._prelu_kernel.default, aten._prelu_kernel_backward.default),
}

# Operations on the host: they move or make numbers, or read each of them once, and the link would take longer. Random
# numbers are the host's, in the order of the whole map.
_ON_THE_HOST = {
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided),
    *(aten.fill_, aten.zero_, aten.bernoulli, aten.bernoulli_, aten.uniform_, aten.normal_),
    *(aten.clone, aten.copy_, aten._to_copy, aten.cat, aten.stack, aten.repeat, aten.flip, aten.roll),
    *(aten.slice_backward, aten.select_backward, aten.constant_pad_nd, aten.pixel_shuffle, aten.pixel_unshuffle),
    *(aten.reflection_pad2d, aten.reflection_pad2d_backward, aten.replication_pad2d),
    *(aten.replication_pad2d_backward, aten._unsafe_view, aten.reshape, aten.index_select),
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.all, aten.any, aten.equal),
    *(aten.nll_loss2d_forward, aten.nll_loss2d_backward, aten._local_scalar_dense, aten.linalg_vector_norm),
    aten.count_nonzero,
}

_FUSED_STEPS = {aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_}


def make(run: TiledRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one operation, as autograd calls it. Operations on maps run in strips.

    Raises:
        UnsupportedOperation: An operation on a map cannot run in strips.
    """
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    handler = _ON_MAPS[func] if func in _ON_MAPS and _is_image(args) else None
    maps = [tensor for tensor in tensors if not _is_elsewhere(tensor) and (handler is not None or run.is_map(tensor))]
    # Checked before the pointwise tag, which clone and equal have as well.
    if not maps or func.is_view or func.overloadpacket in _ON_THE_HOST or _is_of_lists(func):
        return func(*args, **kwargs)
    _refuse_elsewhere(func, tensors)
    handler = handler or _LOSSES.get(func) or _of_elements(func, args)
    if handler is not None:
        return handler(run, func, *args, **kwargs)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in maps)
    raise UnsupportedOperation(
        f"{func} on a map of shape {shapes} cannot run in strips, and did not run. Use operations that are listed in "
        "hydra_ext/tiled/operators/operations.py, or compute it on the whole map outside 'with "
        "hydra_ext.tiled.strips(...)'",
        operation=str(func),
    )


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor cannot be a map: it is not on the host, or is a parameter of hydra_ext.offload."""
    return tensor.device.type != "cpu" or _C.is_face(tensor)


def _refuse_elsewhere(func: Any, tensors: list[torch.Tensor]) -> None:
    for tensor in filter(_is_elsewhere, tensors):
        what = f"a tensor on {tensor.device}" if tensor.device.type != "cpu" else "a parameter of hydra_ext.offload"
        raise UnsupportedOperation(
            f"{func} on a map on the host and {what}, of shape {tuple(tensor.shape)}: strips move tensors to the "
            "device and back. Leave the model and all tensors on the CPU, and out of hydra_ext.offload",
            operation=str(func),
        )


def _is_image(args: tuple[Any, ...]) -> bool:
    """Whether the first argument has four dimensions and elements. Others are left to torch and its errors."""
    first: torch.Tensor = args[0]
    return first.dim() == 4 and first.numel() > 0


def _is_of_lists(func: Any) -> bool:
    """Whether it is an optimizer's operation on lists of parameters. It runs on the host, even if some are large."""
    return func._schema.name.startswith("aten::_foreach_") or func.overloadpacket in _FUSED_STEPS


def _of_elements(func: Any, args: tuple[Any, ...]) -> Handler | None:
    if func in _ALONG_A_DIMENSION:
        along: int = args[_ALONG_A_DIMENSION[func]]
        dimensions: int = args[0].dim()
        return rowwise.along_a_dimension if along % dimensions != max(0, dimensions - 2) else None
    return rowwise.pointwise if func in _POINTWISE or torch.Tag.pointwise in func.tags else None
