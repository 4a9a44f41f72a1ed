"""Operators of the emulated device give what the CPU's give: first called, with known shapes, and late."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import emulated_cuda
import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

pytestmark = pytest.mark.emulated

SAMPLES = 3

# By name, with what the emulated device lacks or does in another way.
_NO_LIBRARY = "is a kernel of a library for GPUs"
_NO_COMPILER = "is compiled for a GPU when it is called"
_HOST_ARGUMENT = "takes an argument that stays on the host"
EXCEPTIONS: dict[str, str] = {
    "as_strided.partial_views": "reads a storage behind its input, which a copy lacks",
    "jiterator_2inputs_2outputs": _NO_COMPILER,
    "jiterator_4inputs_with_extra_args": _NO_COMPILER,
    "jiterator_binary": _NO_COMPILER,
    "jiterator_binary_return_by_ref": _NO_COMPILER,
    "jiterator_unary": _NO_COMPILER,
    "nn.functional.batch_norm.without_cudnn": _NO_LIBRARY,
    "tensor_split": _HOST_ARGUMENT,
    "to_sparse": "gives a sparse tensor",
    "torch.ops.aten._efficient_attention_forward": _NO_LIBRARY,
    "torch.ops.aten._flash_attention_forward": _NO_LIBRARY,
}
# Results have the shapes and types of the CPU's; their numbers are drawn, or not set.
ANY_NUMBERS = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal.in_place"),
    *("normal.number_mean", "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform"),
    *("nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d"),
    *("nn.functional.feature_alpha_dropout.with_train", "nn.functional.fractional_max_pool2d"),
    *("nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward", "nn.functional.rrelu"),
    *("nn.functional.scaled_dot_product_attention", "empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
}


def name_of(info: OpInfo) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def is_dense(sample: SampleInput) -> bool:
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return all(leaf.layout == torch.strided and not leaf.is_quantized for leaf in leaves if isinstance(leaf, Tensor))


def on_device(value: Any) -> Any:
    """The value with its tensors, devices and generators on the emulated device."""
    if isinstance(value, Tensor):
        return value.detach().to("cuda").requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("cuda", 0)
    return value


def on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def samples_of(info: OpInfo, *, requires_grad: bool = False) -> Iterator[SampleInput]:
    dtypes = info.supported_dtypes("cpu")
    dtype = torch.float32 if torch.float32 in dtypes else sorted(dtypes, key=str)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from islice(filter(is_dense, info.sample_inputs("cpu", dtype, requires_grad=requires_grad)), SAMPLES)


def copied(value: Any) -> Any:
    """Each call has inputs of its own: some operators write to them."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def call(info: OpInfo, sample: SampleInput, where: Callable[[Any], Any]) -> Any:
    first, arguments, keywords = tree_map(lambda x: where(copied(x)), (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    return tree_map(on_host, info.op(first, *arguments, **keywords))


def gradients(info: OpInfo, sample: SampleInput, where: Callable[[Any], Any]) -> list[Tensor]:
    given = tree_map(lambda x: where(copied(x)), (sample.input, sample.args, sample.kwargs))
    leaves = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    # An operator that writes to its input may not write to a leaf.
    first, arguments, keywords = tree_map(lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, given)
    made = tree_flatten(info.op(first, *arguments, **keywords))[0]
    made = [one for one in made if isinstance(one, Tensor) and one.requires_grad]
    if not made or not leaves:
        return []
    loss = torch.stack([one.abs().sum().float().to(made[0].device) for one in made]).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [gradient.cpu() for gradient in found if gradient is not None]


def assert_agree(found: Any, expected: Any, *, numbers: bool) -> None:
    a, b = tree_flatten(found)[0], tree_flatten(expected)[0]
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        if not isinstance(one, Tensor):
            assert one == other or not numbers
        elif numbers and one.dtype.itemsize > 1:
            torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-4)
        elif numbers:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        else:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


def here(value: Any) -> Any:
    return value


OPERATORS = [info for info in op_db if name_of(info) not in EXCEPTIONS]
DIFFERENTIABLE = [
    info
    for info in OPERATORS
    if info.supports_autograd and torch.float32 in info.dtypes and name_of(info) not in ANY_NUMBERS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", OPERATORS, ids=name_of)
def test_an_operator_gives_what_the_cpu_gives(info: OpInfo) -> None:
    for sample in samples_of(info):
        expected = call(info, sample, here)
        for delay in (0.0, 0.0, 2e-4):
            emulated_cuda.set_delays(delay, 1)
            assert_agree(call(info, sample, on_device), expected, numbers=name_of(info) not in ANY_NUMBERS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", DIFFERENTIABLE, ids=name_of)
def test_gradients_are_those_of_the_cpu(info: OpInfo) -> None:
    for sample in samples_of(info, requires_grad=True):
        expected = gradients(info, sample, here)
        for delay in (0.0, 2e-4):
            emulated_cuda.set_delays(delay, 1)
            assert_agree(gradients(info, sample, on_device), expected, numbers=True)
