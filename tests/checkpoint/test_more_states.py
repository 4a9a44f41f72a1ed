"""State of unusual shapes, disks of unusual sizes, and what is said of what cannot be resumed."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.errors import SaveFailed
from support.checkpoint.checkpoints import Job, copied, differences, offloaded


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may become longer than 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_may_not_grow_fails_the_save_and_nothing_is_left(tmp_path: Path, request) -> None:
    made = Job("gpt2").make(0)
    with offloaded(made) as run:
        first = run.save(tmp_path, schedule=made.schedule)
        made.steps(1)
        request.getfixturevalue("small_files")
        with pytest.raises(SaveFailed, match="File too large"):
            run.save(tmp_path, schedule=made.schedule)
        assert list(tmp_path.iterdir()) == [first]
        assert run.load(tmp_path, schedule=made.schedule).path == first


def minimise(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[torch.Tensor]:
    inputs = torch.linspace(-1, 1, 12).reshape(4, 3)
    seen = []
    for _ in range(count):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.flip(1)).pow(2).sum()
            loss.backward()
            return loss

        seen.append(optimizer.step(closure).detach().clone())
    optimizer.zero_grad()
    return seen


def lbfgs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)


def test_state_in_lists_under_one_parameter_is_resumed(tmp_path: Path) -> None:
    """LBFGS keeps the directions of all parameters so."""
    model, optimizer = lbfgs(0)
    expected = minimise(model, optimizer, 5)
    first, optimizer_first = lbfgs(0)
    seen = minimise(first, optimizer_first, 3)
    with hydra_ext.offload(first, optimizer_first, budget="1MiB") as run:
        run.save(tmp_path)
    second, optimizer_second = lbfgs(1)
    with hydra_ext.offload(second, optimizer_second, budget="1MiB") as run:
        run.load(tmp_path)
    seen += minimise(second, optimizer_second, 2)
    ours, plain = ([copied(s) for s in o.state.values()] for o in (optimizer_second, optimizer))
    assert not differences([seen, ours, dict(second.state_dict())], [expected, plain, dict(model.state_dict())])


@pytest.mark.parametrize(("policy", "warned"), [(hydra_ext.Compress(), True), (hydra_ext.Compress(error=0.1), False)])
def test_bounds_that_were_learnt_are_said_to_be_lost(
    policy: hydra_ext.Compress, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Job("images", "adamw", "none").make(0)
    with offloaded(made, activations=policy) as run:
        made.steps(1)
        run.save(tmp_path)
        run.load(tmp_path)
    assert ("adaptive bounds" in caplog.text) == warned
