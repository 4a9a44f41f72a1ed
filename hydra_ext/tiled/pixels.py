"""An image that stays bytes on the host. Each strip is normalised on the device.

A photograph of 16000 x 64000 pixels takes 3 GB as bytes and 12 GB as numbers. Autograd keeps the input of the first
convolution: here the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_ext.errors import InvalidArgument, UnsupportedOperation

_HIGHEST = 255  # the byte that becomes 1 before the mean is subtracted


class Pixels(torch.Tensor):
    """A floating image (N, C, H, W) whose memory is bytes: ``(bytes / 255 - mean) / std``, computed strip by strip.

    It holds no numbers: only operations inside ``strips`` can read it.
    """

    pixels: torch.Tensor  # (N, C, H, W) uint8, on the host
    channel_mean: torch.Tensor  # (C, 1, 1), of the image's dtype
    channel_std: torch.Tensor
    version: int | None  # the bytes' version counter when the image was made

    @staticmethod
    def __new__(cls, pixels: torch.Tensor, mean: torch.Tensor, _std: torch.Tensor) -> Pixels:
        strides = torch.empty_like(pixels, device="meta").stride()  # as pixels.to(dtype) would have them
        return torch.Tensor._make_wrapper_subclass(
            cls, pixels.shape, strides=strides, dtype=mean.dtype, device=pixels.device, requires_grad=False
        )

    def __init__(self, pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.pixels = pixels
        self.channel_mean = mean
        self.channel_std = std
        # Tensors of inference mode have no version counter to compare.
        self.version = None if pixels.is_inference() else pixels._version

    def unchanged(self) -> torch.Tensor:
        """The bytes, if they are unchanged since the image was made: backward reads them again.

        Raises:
            RuntimeError: They were written to. Autograd raises the same error for saved tensors.
        """
        if self.version is not None and self.pixels._version != self.version:
            raise RuntimeError(
                "the bytes of an image needed for gradient computation have been modified by an inplace operation: "
                f"{self!r} is at version {self.pixels._version}; expected version {self.version} instead. Write to "
                "them after backward, and call hydra_ext.tiled.image again, which copies nothing"
            )
        return self.pixels

    def normalised(self, strip: torch.Tensor) -> torch.Tensor:
        """Numbers of a strip of bytes (N, C, rows, W), on the strip's device."""
        numbers = strip.to(self.dtype).div_(_HIGHEST)
        return numbers.sub_(self.channel_mean.to(strip.device)).div_(self.channel_std.to(strip.device))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pixels(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].pixels, args[0].channel_mean, args[0].channel_std)
            made.version = args[0].version
            return made
        raise UnsupportedOperation(
            f"{func} on an image of bytes: only convolutions, poolings and pointwise operations inside 'with "
            "hydra_ext.tiled.strips(...)' read an image of hydra_ext.tiled.image; for any other operation use the "
            "bytes themselves",
            operation=str(func),
        )


def image(
    pixels: torch.Tensor,
    *,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Makes a network's input from an image of bytes: ``(pixels / 255 - mean) / std``, normalised strip by strip.

    The numbers are those of ``pixels.to(dtype).div(255).sub(mean).div(std)``, to the bit.

    Args:
        pixels: uint8 tensor on the CPU, (N, C, H, W) or (C, H, W); it is not copied. Once torch has written to it,
            strips of the image raise RuntimeError: make another image. Writes through numpy are not noticed.
        mean: Mean of each channel, in units of 255; one number stands for all channels.
        std: Standard deviation of each channel, likewise; not 0.
        dtype: Floating dtype of the numbers.

    Returns:
        A tensor (N, C, H, W) of ``dtype``, without memory of its own.

    Raises:
        InvalidArgument: ``pixels`` is not such a tensor; or ``mean`` or ``std`` has another number of channels, or
            numbers that are not finite in ``dtype``; or ``std`` has a 0.
    """
    if not isinstance(pixels, torch.Tensor):
        raise InvalidArgument(f"pixels are a {type(pixels).__name__}: give a tensor, such as torch.from_numpy(pixels)")
    if pixels.dtype != torch.uint8 or pixels.device.type != "cpu" or pixels.dim() not in (3, 4):
        raise InvalidArgument(
            f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)} on {pixels.device}: give torch.uint8 on the "
            "CPU, (N, C, H, W) or (C, H, W)"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidArgument(f"dtype={dtype!r}: give a floating dtype, such as torch.float32")
    pixels = pixels if pixels.dim() == 4 else pixels.unsqueeze(0)
    means, stds = _by_channel("mean", mean, pixels.shape[1], dtype), _by_channel("std", std, pixels.shape[1], dtype)
    if not bool(stds.all()):
        raise InvalidArgument(
            f"std={std!r} has a 0 in {dtype}: give numbers that are not 0, since the image is divided by them"
        )
    return Pixels(pixels, means, stds)


def _by_channel(name: str, values: Sequence[float], channels: int, dtype: torch.dtype) -> torch.Tensor:
    """The values as a tensor (C, 1, 1) or (1, 1, 1)."""
    wanted = f"{name}={values!r}: give a sequence of finite numbers, such as (0.5,), one of them or {channels}"
    if isinstance(values, (str, bytes)):
        raise InvalidArgument(wanted)
    try:
        numbers = torch.tensor([float(value) for value in values], dtype=dtype, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise InvalidArgument(wanted) from error
    if len(numbers) not in (1, channels):
        raise InvalidArgument(
            f"{name} has {len(numbers)} numbers, and the image {channels} channels: give 1 or {channels} numbers"
        )
    if not bool(numbers.isfinite().all()):
        raise InvalidArgument(f"{wanted}; not all of these are finite in {dtype}")
    return numbers.view(-1, 1, 1)
