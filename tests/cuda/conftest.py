"""Every test here needs a GPU: `make gpu-test`. Deterministic algorithms, so that equal means equal bit for bit."""

import os
from collections.abc import Iterator

import pytest
import torch

from support.gpu import require_gpu

# Read by the matrix library when it starts, so before the first test touches the device.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    require_gpu()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    fraction = torch.cuda.get_per_process_memory_fraction()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(fraction)
