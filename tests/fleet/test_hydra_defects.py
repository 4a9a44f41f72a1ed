"""The nine defects that Hydra's released code has: none of them is here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.fleet import Fleet, Job, Results
from support.fleet import examined, trainings
from support.fleet.comparison import assert_as_alone

BUDGET = "16KiB"  # a fraction of the models' weights


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All jobs of :mod:`support.fleet.examined`, offloaded with a budget that holds a part of them."""
    folder = tmp_path_factory.mktemp("fleet")
    return Fleet(folder, devices=2, budget=BUDGET).run(list(examined.jobs().values()), techniques=["offload"])


def test_1_constructors_read_no_undefined_names(tmp_path: Path) -> None:
    job = trainings.job("a", max_norm=1.0, exact=False, delayed=True, seed=5)
    assert Job.of(job.describe()).describe() == job.describe()
    assert Fleet(tmp_path, devices=[hydra_ext.SimulatedDevice(latency_seconds=1e-3)], budget="1MiB").folder == tmp_path


def test_2_a_forward_is_not_under_autocast_unless_the_job_says_so(results: Results) -> None:
    """Their ``with torch.no_grad() and autocast():`` ran every forward in fp16, and with a graph."""
    assert_as_alone(results, [examined.jobs()[name] for name in ("no-autocast", "autocast")])


def test_3_recomputed_forwards_draw_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    model = examined.Tied()
    plain = examined.Tied()
    plain.load_state_dict(model.state_dict())
    batch, target = torch.randn(6, examined.WIDTH), torch.randint(0, 5, (6,))
    torch.manual_seed(3)
    nn.functional.cross_entropy(plain(batch), target).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.blocks[0].register_forward_hook(count)
    blocks = [*model.blocks, model.first]
    with hydra_ext.offload(model, optimizer, budget="64KiB", activations=None, blocks=blocks) as run:
        run.step([batch], lambda x: nn.functional.cross_entropy(model(x), target), recompute=True, seeds=[3])
    assert calls >= 2
    expected = [parameter.grad for parameter in plain.parameters()]
    assert len(gradients) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True) if b is not None)


def test_4_a_scaled_loss_is_scaled_and_unscaled_once() -> None:
    """Their scaler scaled again for each shard, and unscaled once."""
    torch.manual_seed(0)
    model = examined.Tied()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain = examined.Tied()
    plain.load_state_dict(model.state_dict())
    batch, target = torch.randn(6, examined.WIDTH), torch.randint(0, 5, (6,))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=BUDGET) as run:
        run.step([batch], lambda x: nn.functional.cross_entropy(model(x), target), scaler=scaler, seeds=[3])
    torch.manual_seed(3)
    nn.functional.cross_entropy(plain(batch), target).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_5_blocks_are_fetched_ahead_of_their_use() -> None:
    """Their copies were from pageable memory, and waited for: the result of ``pin_memory()`` was thrown away."""
    torch.manual_seed(0)
    model = trainings.layered(blocks=8, normed=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, target = torch.randn(6, examined.WIDTH), torch.randint(0, 5, (6,))
    with hydra_ext.offload(model, optimizer, budget=BUDGET) as run:
        for _ in range(4):
            run.step([batch], lambda x: nn.functional.cross_entropy(model(x), target))
        report = run.report()
    assert report.prefetched > 0
    assert report.faults == 0


def test_6_any_optimizer_trains_and_its_state_moves_with_the_weights(results: Results) -> None:
    assert_as_alone(results, [examined.jobs()[name] for name in ("momentum", "two-groups", "ours")])


def test_8_all_that_a_training_needs_is_there(results: Results) -> None:
    """Seeds, evaluation, checkpoints, a schedule, accumulation, clipping, and a weight that is used twice."""
    job = examined.jobs()["ours"]
    assert job.schedule is not None
    assert job.evaluate is not None
    assert job.max_norm is not None
    assert len(job.data()[0]) == 2  # type: ignore[index]
    assert_as_alone(results, [job, examined.jobs()["stream"]])
    assert hydra_ext.load_model(results["ours"].folder, job.model()).step == job.steps
