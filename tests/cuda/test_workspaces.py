"""The matrix library's workspaces: torch keeps one for each thread, and each microbatch of a round has a thread."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hydra_ext
from support.gpu import Trace, assert_same, mean_of_squares

MIB = 2**20
WORKSPACE = 16 * MIB
BUDGET = 256 * MIB
MICROBATCHES = 16
STEPS = 3


@pytest.fixture(autouse=True)
def _large_workspaces() -> Iterator[None]:
    """Large beside the activations, as on a card that has 32 MiB for each."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.backends.cuda.cublas_workspace_size()
    torch.backends.cuda.cublas_workspace_size(WORKSPACE)
    yield
    torch.backends.cuda.cublas_workspace_size(before)
    torch._C._cuda_clearCublasWorkspaces()


def model_of_blocks(*, blocks: int = 6) -> nn.Sequential:
    """Each block has four layers, whose activations take 1 MiB each."""
    return nn.Sequential(
        *[nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(256, 256), nn.Tanh())]) for _ in range(blocks)]
    )


def steps_of_data() -> list[list[torch.Tensor]]:
    return [list(step) for step in torch.randn(STEPS, MICROBATCHES, 1024, 256)]


def plain_steps(model: nn.Module, data: list[list[torch.Tensor]]) -> Trace:
    """A loop over microbatches on the GPU, with the update on the host."""
    plain, on_gpu = copy.deepcopy(model), copy.deepcopy(model).cuda()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    trace = Trace()
    for step in data:
        losses = []
        for batch in step:
            loss = mean_of_squares(on_gpu, batch.cuda())
            (loss / len(step)).backward()
            losses.append(loss.detach())
        for host, device in zip(plain.parameters(), on_gpu.parameters(), strict=True):
            assert device.grad is not None
            host.grad, device.grad = device.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for host, device in zip(plain.parameters(), on_gpu.parameters(), strict=True):
                device.copy_(host)
        trace.losses.append(torch.stack(losses).mean().cpu())
    trace.state = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    return trace


@pytest.mark.parametrize("activations", [None, "auto"])
def test_rounds_are_as_large_as_the_workspaces_of_their_threads_allow(activations: str | None) -> None:
    """Sixteen workspaces would fill the budget. One microbatch shows none of that unless its thread's counts."""
    model, data = model_of_blocks(), steps_of_data()
    expected = plain_steps(model, data)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = Trace()
    with hydra_ext.offload(
        model, optimizer, budget=BUDGET, device="cuda", blocks=list(model), activations=activations
    ) as run:
        for step in data:
            out = run.step(step, lambda batch: mean_of_squares(model, batch))
            found.losses.append(out.loss.cpu())
            beside = torch.cuda.memory_allocated() - run.core.pager.resident_bytes
            assert beside < 3 * WORKSPACE, "others than the caller's thread and backward's have left one"
        report = run.report()
    found.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    assert_same(found, expected)
    assert (report.retries, report.spills) == (0, 0), report
    assert report.peak_bytes <= BUDGET


def test_a_round_that_fails_leaves_no_workspace() -> None:
    model, data = model_of_blocks(blocks=2), steps_of_data()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fails_last(batch: torch.Tensor) -> torch.Tensor:
        loss = mean_of_squares(model, batch)
        if batch is data[-1]:
            raise ArithmeticError("on purpose")
        return loss

    with hydra_ext.offload(model, optimizer, budget=2 * BUDGET, device="cuda", activations=None) as run:
        with pytest.raises(ArithmeticError):
            run.step(data, fails_last, round_size=MICROBATCHES, recompute=False)
        assert torch.cuda.memory_allocated() - run.core.pager.resident_bytes < WORKSPACE


def test_workspaces_stay_while_another_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads may be about to use theirs."""
    inner, outer = model_of_blocks(blocks=1), model_of_blocks(blocks=1)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    data = steps_of_data()[0][:2]
    cleared: list[bool] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(True))
    with (
        hydra_ext.offload(inner, optimizer, budget=BUDGET, device="cuda", activations=None) as run,
        hydra_ext.offload(outer, None, budget=BUDGET, device="cuda", activations=None),
    ):

        def step() -> None:
            run.step(data, lambda batch: mean_of_squares(inner, batch), round_size=2, recompute=False)

        step()
        assert cleared
        cleared.clear()
        handle = outer[0].register_forward_pre_hook(lambda _module, _inputs: step())
        outer(data[0])
        handle.remove()
        assert not cleared
