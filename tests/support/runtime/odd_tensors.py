"""Tensors with unusual memory layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class Subclass(Tensor):
    pass


def _nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


_ODD: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),  # type: ignore[no-untyped-call]
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "nested": lambda: _nested(torch.strided),
    "jagged": lambda: _nested(torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "quantized in 4 bits": lambda: torch.quantize_per_channel(
        torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
    ),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "zeros": lambda: torch._efficientzerotensor(3),
    "bits": lambda: torch.ones(3, dtype=torch.uint8).view(torch.uint1),
}
_PLAIN: dict[str, Callable[[], Tensor]] = {
    "complex": lambda: torch.polar(torch.ones(4), torch.arange(4.0)),
    "conjugate": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).conj(),
    "negative": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).conj().imag,
    "expanded": lambda: torch.ones(4, 1).expand(4, 5).t(),
    "no elements": lambda: torch.empty(0, 3),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "float4": lambda: torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "inference": _inference,
}


def _quietly(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def made() -> Tensor:
        with warnings.catch_warnings():  # torch warns of deprecated and of experimental kinds
            warnings.simplefilter("ignore")
            return make()

    return made


ODD = {name: _quietly(make) for name, make in _ODD.items()}
PLAIN = {name: _quietly(make) for name, make in _PLAIN.items()}
