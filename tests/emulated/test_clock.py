"""The virtual clock under torch: operators give shapes and take their time, and nothing is computed or touched."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator

import emulated_cuda
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import _C

pytestmark = pytest.mark.emulated

TERA, GIB = 1e12, 2**30


def take_host_work(function: int) -> None:
    take = ctypes.CDLL(_C.__file__).hydra_take_host_work
    take.argtypes = [ctypes.c_void_p]
    take(function)


@pytest.fixture(autouse=True)
def _clock() -> Iterator[None]:
    torch.cuda.empty_cache()
    emulated_cuda.start_clock(
        half_flops=100 * TERA,
        full_flops=10 * TERA,
        device_memory=1e12,
        to_device=2 * GIB,
        to_host=2 * GIB,
        host_memory=8 * GIB,
        operation_seconds=0.0,
        launch_seconds=0.0,
        call_seconds=0.0,
    )
    take_host_work(emulated_cuda.host_work_address())
    yield
    take_host_work(0)
    torch.cuda.synchronize()
    emulated_cuda.stop_clock()
    torch.cuda.empty_cache()
    torch.cuda.reset_accumulated_memory_stats()


def seconds() -> float:
    return float(emulated_cuda.clock_report()["seconds"])


def busy(unit: str) -> float:
    return float(emulated_cuda.clock_report()["busy"][unit])


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


# ---- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "flops"), [(torch.bfloat16, 100 * TERA), (torch.float32, 10 * TERA)])
def test_a_product_takes_its_operations(dtype: torch.dtype, flops: float) -> None:
    side = 16384
    first, second = on_device(side, side, dtype=dtype), on_device(side, side, dtype=dtype)
    begin, busy_before = seconds(), busy("processors")
    result = first @ second
    assert result.shape == (side, side)
    torch.cuda.synchronize()
    assert busy("processors") - busy_before == pytest.approx(2 * side**3 / flops, rel=1e-5)
    assert seconds() - begin >= 0.999 * 2 * side**3 / flops


def test_other_operators_take_their_bytes() -> None:
    tensor = on_device(GIB // 4)
    begin = busy("processors")
    doubled = tensor + tensor  # reads it once
    assert busy("processors") - begin == pytest.approx(2 * tensor.nbytes / 1e12, rel=1e-5)
    doubled.add_(tensor)
    assert busy("processors") - begin == pytest.approx(5 * tensor.nbytes / 1e12, rel=1e-5)


def test_views_take_no_time() -> None:
    tensor = on_device(64, 64)
    begin = busy("processors")
    assert tensor.view(-1, 32)[3:].data_ptr() == tensor.data_ptr() + 3 * 32 * 2
    assert tensor.transpose(0, 1).expand(2, 64, 64).shape == (2, 64, 64)
    assert busy("processors") == begin


@pytest.mark.parametrize(("causal", "products"), [(False, 1.0), (True, 0.5)])
def test_attention_is_one_kernel(causal: bool, products: float) -> None:
    query = on_device(1, 8, 4096, 128).requires_grad_()
    begin = busy("processors")
    result = functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
    forward = products * 4 * query.numel() * 4096 / (100 * TERA)
    assert busy("processors") - begin == pytest.approx(forward, rel=1e-5)
    result.backward(torch.empty_like(result))
    assert query.grad is not None
    assert busy("processors") - begin >= 3.5 * forward


def test_a_digest_reads_its_tensor_once() -> None:
    tensor = on_device(2**14, 2**14)
    begin, launched = busy("processors"), emulated_cuda.calls("cudaLaunchKernel")
    _C.reduced_by_place(tensor)
    assert emulated_cuda.calls("cudaLaunchKernel") - launched <= 2  # and one makes the sum zero
    assert busy("processors") - begin <= 2 * tensor.nbytes / 1e12


def test_numbers_that_come_to_the_host_are_zeros() -> None:
    assert on_device(7).sum().item() == 0.0
    assert on_device(3, dtype=torch.float32).cpu().tolist() == [0.0, 0.0, 0.0]


def test_memory_has_no_pages() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensor = on_device(GIB)
    (tensor.zero_() + 1).relu_()
    torch.cuda.synchronize()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # kilobytes: 256 MiB of 4 GiB


def test_shapes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(NotImplementedError):
        on_device(4).nonzero()


# ---- training -------------------------------------------------------------------------------------------------------


def make_model(layers: int, width: int) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    return model.to_empty(device="cpu")


def test_a_step_takes_what_its_slowest_unit_takes() -> None:
    """16 layers of 128 MiB, of which 1 GiB has room for a few: the link binds, and compute is a tenth of it."""
    layers, width, tokens = 16, 8192, 1024
    model = make_model(layers, width)
    optimizer = hydra_ext.optim.SGD(model.parameters(), lr=0.1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    batches = [torch.zeros(tokens, width, dtype=torch.bfloat16) for _ in range(2)]
    with hydra_ext.offload(model, optimizer, budget="1GiB", device="cuda") as run:

        def loss(batch: Tensor) -> Tensor:
            value: Tensor = model(batch.to(run.device)).float().square().mean()
            return value

        for _ in range(4):
            run.step(batches, loss, max_norm=1.0)
        before, begin, busy_before = run.report(), seconds(), busy("to_device")
        run.step(batches, loss, max_norm=1.0)
        torch.cuda.synchronize()
        took, copied = seconds() - begin, busy("to_device") - busy_before
        after = run.report()
    moved = after.weights_moved_bytes - before.weights_moved_bytes
    assert moved > weights  # how much more depends on what the threads do when
    assert copied >= moved / (2 * GIB)
    assert copied <= took <= 1.7 * copied


def test_a_plan_tells_compute_from_waits_for_the_link() -> None:
    """Of the first microbatch, which waits for each layer: a copy takes 62 ms, and its products 4."""
    layers, width, tokens = 16, 8192, 1024
    model = make_model(layers, width)
    optimizer = hydra_ext.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget="1GiB", device="cuda") as run:
        for _ in range(2):
            run.step([torch.zeros(tokens, width, dtype=torch.bfloat16)] * 2, lambda x: model(x.to(run.device)).sum())
        plan = run.plan()
    assert plan is not None
    products = 2 * 3 * layers * 2 * tokens * width**2 / (100 * TERA)  # of two microbatches, forward and backward
    assert products <= plan.lanes["compute"] < 3 * products
