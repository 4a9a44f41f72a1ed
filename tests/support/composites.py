"""Frozen weights that consist of several tensors, in the ways of torchao and of bitsandbytes, and models with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS = 64, 16


class Packed(torch.Tensor):
    """Numbers of 8 bits, with a scale for each row."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32, device=numbers.device)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> Packed:
        return cls(inner["numbers"], inner["scale"])

    def unpacked(self) -> Tensor:
        scale = self.scale.unpacked() if isinstance(self.scale, Packed) else self.scale
        return self.numbers.float() * scale.reshape(-1, 1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return Product.apply(args[0], args[1])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(*(func(inner) for inner in (args[0].numbers, args[0].scale)))
        raise NotImplementedError(f"{func} of packed weights")


class Product(torch.autograd.Function):
    """Unpacks the weight in forward and again in backward, as libraries do."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Packed) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(given, weight.unpacked())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0].unpacked(), None


def packed(weight: Tensor, *, nested: bool = False) -> nn.Parameter:
    """Rounded to 8 bits. ``nested``: the scales are rounded, too."""
    scale: Tensor = weight.abs().amax(dim=1) / 127
    numbers = (weight / scale[:, None]).round().to(torch.int8)
    if nested:
        step = scale.amax() / 127
        scale = Packed((scale / step).round().clamp(min=1).to(torch.int8).reshape(1, -1), step.reshape(1))
    return nn.Parameter(Packed(numbers, scale), requires_grad=False)


class Coding:
    """What the numbers of a :class:`Coded` stand for."""

    def __init__(self, code: Tensor, largest: Tensor) -> None:
        self.code, self.largest = code, largest


class Coded(nn.Parameter):
    """Indices of a table that all weights share, with the largest number of each row in an attribute."""

    coding: Coding | None
    same: Tensor | None

    @staticmethod
    def __new__(cls, data: Tensor, coding: Coding | None = None) -> Coded:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.coding = coding
        made.same = made.data  # as bitsandbytes' CB
        return made

    def unpacked(self) -> Tensor:
        assert self.coding is not None
        assert self.same is not None
        code = self.coding.code
        places = self.float().add_(self.same).mul_((code[1] - code[0]) / 2)
        return places.add_(code[0]).mul_(self.coding.largest[:, None])


CODE = torch.linspace(-1, 1, 16)


def coded(weight: Tensor) -> Coded:
    largest = weight.abs().amax(dim=1)
    indices = (weight[..., None] / largest[:, None, None] - CODE).abs().argmin(dim=-1)
    return Coded(indices.to(torch.uint8), Coding(CODE, largest))


class CodedProduct(torch.autograd.Function):
    """Keeps the weight as an attribute, which no hook on saved tensors sees."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Coded) -> Tensor:
        ctx.weight = weight
        return functional.linear(given, weight.unpacked())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.unpacked(), None


class CodedLinear(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight = coded(inner.weight.detach())

    def forward(self, given: Tensor) -> Tensor:
        return CodedProduct.apply(given, self.weight)


class Buffered(nn.Module):
    """Packed weights in buffers, as many libraries have them."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        weight = packed(inner.weight.detach())
        self.register_buffer("numbers", weight.numbers)
        self.register_buffer("scale", weight.scale)

    def forward(self, given: Tensor) -> Tensor:
        return functional.linear(given, self.numbers.float() * self.scale[:, None])


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, as LoRA's."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(self.base(given) + self.up(self.down(given)))


KINDS = ("subclass", "nested subclass", "attributes", "buffers")


def quantised(kind: str, *, width: int = WIDTH, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    found = []
    for _ in range(layers):
        inner: nn.Module = nn.Linear(width, width, bias=False)
        if kind == "attributes":
            inner = CodedLinear(inner)
        elif kind == "buffers":
            inner = Buffered(inner)
        else:
            inner.weight = packed(inner.weight.detach(), nested=kind == "nested subclass")
        found.append(Adapted(inner, width))
    return nn.Sequential(*found)


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
