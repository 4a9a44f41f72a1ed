"""What the optimizers do not work with is refused by a typed error that names it, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext.errors import HydraError, InvalidOptimizer
from hydra_ext.optim import SGD, Adam, AdamW
from support.benches import assert_same
from support.updates import parameter, update

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD])
@pytest.mark.parametrize("option", ["amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused"])
def test_options_of_torch_that_are_not_there_are_refused_by_name(kind: Any, option: str) -> None:
    with pytest.raises(InvalidOptimizer, match=f"{kind.__name__}\\({option}=True\\)"):
        kind([parameter((3,))], **{option: True})
    kind([parameter((3,))], **{option: False})


def test_unknown_options_are_python_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        AdamW([parameter((3,))], beta=0.9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AdamW, {"lr": -1.0}),
        (AdamW, {"weight_decay": -1.0}),
        (AdamW, {"eps": -1.0}),
        (AdamW, {"betas": (0.9, 1.0)}),
        (AdamW, {"betas": (-0.1, 0.9)}),
        (AdamW, {"master": "half"}),
        (AdamW, {"moments": torch.float16}),
        (AdamW, {"threads": 0}),
        (SGD, {"momentum": -0.9}),
        (SGD, {"nesterov": True}),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_values_out_of_range_are_refused(kind: Any, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(InvalidOptimizer, match=f"{name}="):
        kind([parameter((3,))], **options)
    assert issubclass(InvalidOptimizer, (HydraError, ValueError))


def inference_parameter() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.float64)), "float64"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "complex64"),
        (lambda: nn.Parameter(torch.ones(3, 3).to_sparse()), "sparse"),
        (lambda: nn.Parameter(torch.ones(3, 4)[:, ::2]), "gaps or overlaps"),
        (lambda: nn.Parameter(torch.ones(3, 1).expand(3, 4)), "gaps or overlaps"),
        (inference_parameter, "inference mode"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused_by_number(make: Any, message: str) -> None:
    with pytest.raises(InvalidOptimizer, match=f"parameter 1 .*{message}"):
        AdamW([parameter((3,)), make()])


def test_a_refused_group_is_not_added() -> None:
    optimizer = AdamW([parameter((3,))])
    with pytest.raises(InvalidOptimizer, match="parameter 1 "):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_is_changed() -> None:
    first, table = parameter((3,)), nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW([first, table.weight])
    first.grad = torch.ones(3)
    table(torch.tensor([1, 2])).sum().backward()
    before = first.detach().clone()
    with pytest.raises(InvalidOptimizer, match="gradient of parameter 1 is sparse"):
        optimizer.step()
    assert torch.equal(first, before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("gradient", "message"),
    [(torch.ones(3, device="meta"), "is on meta"), (torch.ones(3, dtype=torch.float64), "float64")],
)
def test_a_gradient_of_another_kind_is_refused(gradient: torch.Tensor, message: str) -> None:
    weights = parameter((3,))
    with pytest.raises(InvalidOptimizer, match=f"gradient of parameter 0 .*{message}"):
        update(AdamW([weights]), [(weights, gradient)])


def test_state_of_another_shape_is_refused_and_nothing_is_changed() -> None:
    optimizer, other = AdamW([parameter((2,)), parameter((3,))]), AdamW([parameter((2,)), parameter((4,))], lr=0.5)
    for each in (optimizer, other, other):
        for weights in each.param_groups[0]["params"]:
            weights.grad = torch.ones_like(weights)
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(InvalidOptimizer, match=r"of shape \(4,\) for a parameter of \(3,\)"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entries in before["state"].items():
        assert_same(list(entries.values()), list(after["state"][number].values()))
