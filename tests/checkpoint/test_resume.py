"""A run that goes on from a checkpoint is, to the bit, plain PyTorch's that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hydra_ext
from support.checkpoint.checkpoints import OPTIMIZERS, SCHEDULES, STEPS, Job, differences, offloaded

SAVED_AFTER = 3
BF16 = torch.bfloat16

JOBS = [
    *(Job(family, optimizer) for family in ("gpt2", "images") for optimizer in OPTIMIZERS if optimizer != "tensor lr"),
    *(Job("images", "sgd", schedule) for schedule in SCHEDULES),
    Job("images", "adamw", "cycle"),
    Job("gpt2", "tensor lr", "none"),
    *(Job("gpt2", optimizer, "cosine", BF16) for optimizer in ("split", "fp32 master", "rounded", "adamw")),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "job", JOBS, ids=lambda job: "-".join([job.family, job.optimizer, job.schedule, str(job.dtype)])
)
def test_a_resumed_run_is_the_uninterrupted_one(job: Job, tmp_path: Path) -> None:
    plain = job.make(0)
    losses, expected = plain.steps(STEPS), plain.state()
    first = job.make(0)
    with offloaded(first) as run:
        seen = first.steps(SAVED_AFTER)
        assert run.save(tmp_path / "ckpt", schedule=first.schedule, extra={"batch": [3]}).name == "step-00000003"
        assert first.model(**_any_input(job)) is not None  # the run goes on
    second = job.make(1)
    second.steps(1)  # state of its own, which has to go
    with offloaded(second) as run:
        loaded = run.load(tmp_path / "ckpt", schedule=second.schedule)
        assert loaded is not None
        assert (loaded.step, loaded.extra, loaded.path) == (3, {"batch": [3]}, tmp_path / "ckpt" / "step-00000003")
        assert run.steps == SAVED_AFTER
        seen += second.steps(STEPS - SAVED_AFTER)
        assert run.steps == STEPS
        assert run.report().windows > 0
        found = second.state()
    assert not differences([*seen, found], [*losses, expected])


def _any_input(job: Job) -> dict[str, torch.Tensor]:
    if job.family == "images":
        return {"pixels": torch.ones(1, 3, 8, 8, dtype=job.dtype)}
    return {"input_ids": torch.ones(1, 4, dtype=torch.long)}


def test_a_save_changes_nothing_of_the_run(tmp_path: Path) -> None:
    job = Job("images", "split", dtype=BF16)
    plain = job.make(0)
    losses, expected = plain.steps(STEPS), plain.state()
    ours = job.make(0)
    with offloaded(ours) as run:
        seen = []
        for _ in range(STEPS):
            seen += ours.steps(1)
            run.save(tmp_path, schedule=ours.schedule)
        found = ours.state()
    assert not differences([*seen, found], [*losses, expected])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_an_optimizer_that_has_not_stepped_yet_is_resumed(tmp_path: Path) -> None:
    job = Job("gpt2", "split", dtype=BF16)
    plain = job.make(0)
    losses, expected = plain.steps(2), plain.state()
    first = job.make(0)
    with offloaded(first) as run:
        assert run.load(tmp_path / "none", schedule=first.schedule) is None
        run.save(tmp_path, schedule=first.schedule)
    second = job.make(1)
    second.steps(2)
    with offloaded(second) as run:
        run.load(tmp_path, schedule=second.schedule)
        assert run.steps == 0
        seen = second.steps(2)
        found = second.state()
    assert not differences([*seen, found], [*losses, expected])


@pytest.mark.full
def test_blocks_at_home_on_the_device_are_saved_and_loaded(tmp_path: Path) -> None:
    job = Job("gpt2", "split", "none", BF16)
    plain = job.make(0)
    losses, expected = plain.steps(12), plain.state()
    ours = job.make(0)
    with hydra_ext.offload(ours.model, ours.optimizer, budget=2**30) as run:
        seen = ours.steps(8)
        assert run.report().homes
        run.save(tmp_path)
        seen += ours.steps(4)
    assert not differences([*seen, ours.state()], [*losses, expected])
    again = job.make(1)
    with hydra_ext.offload(again.model, again.optimizer, budget=2**30) as run:
        again.steps(8)
        assert run.report().homes
        run.load(tmp_path)
        seen[8:] = again.steps(4)
        found = again.state()
    assert not differences([*seen, found], [*losses, expected])


@pytest.mark.full
def test_a_scaler_and_run_step_go_on_as_they_were(tmp_path: Path) -> None:
    def work(made, run, scaler, count):
        out = []
        for _ in range(count):
            step = run.step([0, 1], lambda _: made.loss(), scaler=scaler, max_norm=0.1)
            out += [step.loss.clone(), step.grad_norm.clone()]
        return out

    job = Job("images", "adamw", "none")
    straight = job.make(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    with offloaded(straight) as run:
        expected = work(straight, run, scaler, 5)
        expected_state = [straight.state(), scaler.state_dict()]
    first = job.make(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    with offloaded(first) as run:
        seen = work(first, run, scaler, 3)
        run.save(tmp_path, scaler=scaler)
    second = job.make(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    with offloaded(second) as run:
        run.load(tmp_path, scaler=scaler)
        seen += work(second, run, scaler, 2)
        found = [second.state(), scaler.state_dict()]
    assert not differences([*seen, *found], [*expected, *expected_state])


def test_evaluation_without_an_optimizer_is_resumed(tmp_path: Path) -> None:
    model = Job("images").make(0).model
    with hydra_ext.offload(model, budget="8MiB") as run:
        model(torch.ones(2, 3, 8, 8))
        run.save(tmp_path)
    other = Job("images").make(1).model
    with hydra_ext.offload(other, budget="8MiB") as run:
        assert run.load(tmp_path).step == 0
    assert not differences(dict(other.state_dict()), dict(model.state_dict()))
