"""``model.to(...)`` and its like inside a context: allowed where it changes nothing, refused by name where it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C
from hydra_ext.errors import ModelChanged
from support.benches import ROOMY
from support.runtime.footprint import footprint

pytestmark = pytest.mark.every_case


def mixed(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of one dtype in several shapes, and buffers of others."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(4, 4)).to(dtype)
    model[0].to(memory_format=torch.channels_last)
    model.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
    model.register_buffer("one", torch.tensor(1.0))
    return model


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_changes_nothing_is_allowed_whatever_the_dtype(dtype: torch.dtype, mode: Callable[[], Any]) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    before = footprint(model)
    with hydra_ext.offload(model, budget=ROOMY) as run, mode():
        assert model.to(dtype) is model
        assert model.cpu() is model
        assert model.to(run.device, dtype) is model
        assert model._apply(lambda tensor: tensor) is model
    assert footprint(model) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_other_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    model = mixed(dtype).requires_grad_(False)
    for other in DTYPES:
        with hydra_ext.offload(model, budget=ROOMY):
            if all(tensor.dtype in (other, torch.bool, torch.int64) for tensor in model.state_dict().values()):
                assert model.to(other) is model
                continue
            before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
            with pytest.raises(ModelChanged, match=f"to make '.*' and its like {other}"):
                model.to(other)
            assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before


def test_the_dtype_of_one_buffer_is_enough_to_refuse() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.register_buffer("scale", torch.ones(3))
    with hydra_ext.offload(model, budget=ROOMY), pytest.raises(ModelChanged, match=r"'scale' and its like torch\.bfl"):
        model.bfloat16()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.to(memory_format=torch.contiguous_format), "'0.weight' .* memory format"),
        (lambda model: model.share_memory(), "shared memory"),
        (lambda model: model.to_empty(device="cpu"), "new tensors"),
        (lambda model: model.to("meta"), "live on meta"),
        (lambda model: model._apply(lambda tensor: tensor.clone()), "new tensors"),
        (lambda model: model._apply(lambda tensor: tensor.zero_()), "other values"),
        (lambda model: model._apply(lambda tensor: None), "a NoneType"),
        (lambda model: model._apply(lambda tensor: tensor if tensor.dim() != 2 else tensor.half()), "'2.weight'"),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_would_be_lost_is_refused_and_changes_nothing(
    change: Callable[[nn.Module], Any], says: str, mode: Callable[[], Any]
) -> None:
    model = mixed()
    before = footprint(model)
    with hydra_ext.offload(model, budget=ROOMY):
        with mode(), pytest.raises(ModelChanged, match=says):
            change(model)
        assert model.to(memory_format=torch.preserve_format) is model
    assert footprint(model) == before


def test_a_memory_format_that_a_parameter_does_not_have_is_refused() -> None:
    model = nn.Conv2d(3, 8, 3)
    with hydra_ext.offload(model, budget=ROOMY), pytest.raises(ModelChanged, match=r"'weight' .* memory format"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_a_memory_format_that_every_parameter_has_is_allowed() -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with hydra_ext.offload(model, budget=ROOMY):
        assert model.to(memory_format=torch.channels_last) is model


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.zeros(0, 3),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_buffers_of_any_kind_are_tried_out_and_paid_for(make: Callable[[], torch.Tensor]) -> None:
    model = nn.Linear(4, 4, dtype=torch.float64)
    model.register_buffer("any", make())
    with hydra_ext.offload(model, budget=ROOMY) as run:
        assert (run.core.memory.ledger.in_use_by(_C.MemoryClass.BUFFERS) > 0) == (model.any.numel() > 0)
        assert model.cpu() is model
        with pytest.raises(ModelChanged, match="'any'"):
            model._apply(lambda tensor: tensor if tensor.dtype == torch.float64 else None)
