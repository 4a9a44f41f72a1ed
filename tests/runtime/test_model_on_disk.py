"""Weights and gradients whose home is the disk: the bits of the plain loop, and counted bytes."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice, optim
from hydra_ext._C.testing import FaultyFiles, FileFault, FileOperation, drain
from hydra_ext.runtime.placement.spilling import choose
from support.benches import assert_same
from support.ranks import run_ranks
from support.runtime.native import BATCHES, BETWEEN, OPTIMIZERS, STEPS, WIDTH, state, train
from support.runtime.on_disk import (
    DEPTH,
    DEVICE_BUDGET,
    FILLS,
    GRADIENT,
    ON_DISK,
    budget_for,
    offloaded,
    pair,
    sizes,
    stack,
)
from support.runtime.on_disk_ranks import train_together


@pytest.mark.parametrize("weights", [1, 11, DEPTH])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_gives_the_bits_of_the_plain_one(name: str, weights: int, tmp_path: Path) -> None:
    plain, theirs, model, ours = pair(name)
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path, weights=weights) as run:
        seen = train(model, ours)
        assert run.report().disk_weight_bytes > 0
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.cases(1)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_so_does_one_in_bf16_with_masters(master: str, tmp_path: Path) -> None:
    plain, model = stack(torch.bfloat16), stack(torch.bfloat16)
    theirs, ours = (optim.AdamW(each.parameters(), lr=1e-2, master=master) for each in (plain, model))
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path) as run:
        assert_same(expected, train(model, ours))
        assert run.report().disk_weight_bytes > 0
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.full
def test_weights_that_are_cast_on_their_way_are_those_of_a_run_without_disk(tmp_path: Path) -> None:
    other, theirs, model, ours = pair()
    with hydra_ext.offload(
        other, theirs, budget=DEVICE_BUDGET, device=SimulatedDevice(), param_dtype=torch.bfloat16
    ) as run:
        expected = half_steps(run, other)
    with offloaded(model, ours, tmp_path, staging=2 * WIDTH * WIDTH + 512, param_dtype=torch.bfloat16) as run:
        assert_same(expected, half_steps(run, model))
        assert run.report().disk_weight_bytes > 0
    assert_same(state(other, theirs), state(model, ours))


def half_steps(run: Run, model: nn.Module) -> list[torch.Tensor]:
    return [
        run.step(batch.to(torch.bfloat16).split(2), lambda part: model(part).float().pow(2).mean(), max_norm=0.1).loss
        for batch in BATCHES
    ]


def test_a_step_moves_what_the_formula_says(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    with offloaded(model, ours, tmp_path) as run:
        for batch in BATCHES:
            for microbatch in batch.split(2):
                (plain(microbatch).pow(2).mean() / 4).backward()
            optim.clip_grad_norm_(plain.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
            run.step(batch.split(2), lambda part: model(part).pow(2).mean(), max_norm=0.1)
        report = run.report()
        assert report.disk_weight_bytes == DEPTH * ON_DISK
        assert report.disk_working_bytes <= run_plan(model, ours).working
        assert report.loads == STEPS * DEPTH  # the device holds them all from forward to backward
        assert report.fallbacks == report.refusals == 0
    moved = run.core.homes.disk.statistics
    again = (report.rounds - STEPS) * GRADIENT  # a second round of a step adds to what the first one brought
    entered, update = ON_DISK, ON_DISK + 2 * GRADIENT
    first, left = 2 * GRADIENT, update  # there is no state before the first step; in the end all comes home
    assert moved.written_bytes == DEPTH * (entered + STEPS * (GRADIENT + update) + again)
    read = DEPTH * (STEPS * (ON_DISK + GRADIENT + update) + again - first + left)
    assert 0 <= moved.spared_bytes < STEPS * DEPTH * ON_DISK, "the first forward has no update before it"
    assert moved.read_bytes + moved.spared_bytes == read
    assert_same(state(plain, theirs), state(model, ours))


def run_plan(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return choose(sizes(model, optimizer), budget_for(model, optimizer, weights=DEPTH), fills=FILLS)


def test_blocks_too_small_for_a_transfer_keep_their_weights_on_the_host(tmp_path: Path) -> None:
    def make() -> tuple[nn.Sequential, optim.AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))])
        return model, optim.AdamW(model.parameters(), lr=1e-2)

    (plain, theirs), (model, ours) = make(), make()

    def within(budget: int) -> hydra_ext.offload:
        return hydra_ext.offload(
            model,
            ours,
            budget=DEVICE_BUDGET,
            host_budget=budget,
            spill_dir=tmp_path,
            blocks=list(model.children()),
            device=SimulatedDevice(),
            checks=Checks(poison_hosts=True),
        )

    with pytest.raises(hydra_ext.errors.HostBudgetTooSmall) as caught, within(1):
        pass
    expected = train(plain, theirs)
    with within(caught.value.smallest_budget) as run:
        assert_same(expected, train(model, ours))
        assert run.report().disk_weight_bytes == 8 * ON_DISK
    assert_same(state(plain, theirs), state(model, ours))


def test_a_device_too_small_for_the_model_fetches_each_block_from_the_disk_in_each_pass(tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path, budget=2**17) as run:
        assert_same(expected, train(model, ours))
        report = run.report()
        assert report.loads > 1.5 * STEPS * DEPTH
        assert report.prefetched > 0
        assert report.faults == 0
    assert_same(state(plain, theirs), state(model, ours))


@pytest.mark.cases(4)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_user_code_does_between_steps_it_does_to_a_plain_model(between: str, tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    expected = train(plain, theirs, between=lambda: BETWEEN[between](plain, theirs))
    with offloaded(model, ours, tmp_path) as run:
        seen = train(model, ours, between=lambda: BETWEEN[between](model, ours))
        assert run.report().disk_written_bytes > 0
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))


def keeps_gradients(model: nn.Module, found: list[torch.Tensor]) -> None:
    found.extend(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def doubles_gradients(model: nn.Module, _: list[torch.Tensor]) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)


# What user code may do after a backward.
AFTER: dict[str, Callable[[nn.Module, list[torch.Tensor]], object]] = {
    "nothing": lambda model, found: None,
    "reads them": lambda model, found: found.extend(p.grad.sum() for p in model.parameters() if p.grad is not None),
    "keeps them": keeps_gradients,
    "doubles them": doubles_gradients,
    "keeps views of them": lambda model, found: found.extend(
        p.grad[:1] for p in model.parameters() if p.grad is not None
    ),
    "keeps arrays of them": lambda model, found: found.extend(
        torch.from_numpy(p.grad.mul_(1).numpy()) for p in model.parameters() if p.grad is not None
    ),
    "clips as torch does": lambda model, found: found.append(
        nn.utils.clip_grad_norm_(model.parameters(), 0.01).detach()
    ),
    "clips": lambda model, found: found.append(optim.clip_grad_norm_(model.parameters(), 0.01)),
    "drops one": lambda model, found: setattr(model[3].weight, "grad", None),
    "gives one": lambda model, found: setattr(model[3].weight, "grad", torch.ones(WIDTH, WIDTH)),
    "fills with zeros": lambda model, found: model.zero_grad(set_to_none=False),
}


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object]) -> None:
    for batch in BATCHES:
        for microbatch in batch.split(3):
            (model(microbatch).pow(2).mean() / 3).backward()
            after()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("after", AFTER)
def test_gradients_accumulate_and_belong_to_the_user(after: str, tmp_path: Path) -> None:
    plain, theirs, model, ours = pair()
    wanted: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    accumulate(plain, theirs, lambda: AFTER[after](plain, wanted))
    with offloaded(model, ours, tmp_path) as run:
        accumulate(model, ours, lambda: AFTER[after](model, found))
        assert run.report().disk_written_bytes > 0
        assert_same(wanted, [each.clone() for each in found])
    assert_same(state(plain, theirs), state(model, ours))


def test_frozen_layers_are_read_and_never_written(tmp_path: Path) -> None:
    plain, _, model, _ = pair()
    for each in (plain, model):
        each[: DEPTH // 2].requires_grad_(False)
    theirs, ours = (optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2) for each in (plain, model))
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path) as run:
        assert_same(expected, train(model, ours))
    # When entering all weights; a step writes gradients, and then weights and state.
    trained = DEPTH - DEPTH // 2
    written = DEPTH * ON_DISK + STEPS * trained * (GRADIENT + ON_DISK + 2 * GRADIENT)
    assert run.core.homes.disk.statistics.written_bytes == written
    assert_same(state(plain, theirs), state(model, ours))


def test_a_model_without_an_optimizer_is_evaluated_from_the_disk(tmp_path: Path) -> None:
    plain, model = stack(), stack()
    with offloaded(model, None, tmp_path, budget=2**17) as run, torch.no_grad():
        for batch in BATCHES:
            assert torch.equal(model(batch), plain(batch))
        report = run.report()
        assert report.disk_weight_bytes == DEPTH * ON_DISK == report.disk_written_bytes
        assert report.disk_read_bytes == report.loads * ON_DISK


def test_weights_that_somebody_else_knows_stay_on_the_host_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, theirs, model, ours = pair()
    seen_by_numpy = model[5].weight.detach().numpy()
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path) as run:
        assert "weights of '5' stay on the host" in caplog.text
        assert_same(expected, train(model, ours))
        run.sync()
        assert torch.equal(torch.from_numpy(seen_by_numpy), plain[5].weight)
    assert_same(state(plain, theirs), state(model, ours))


def test_a_language_model_with_tied_weights(tmp_path: Path) -> None:
    def tiny() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0)
        )

    plain, model = tiny(), tiny()
    theirs, ours = (optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, model))
    text = torch.randint(0, 128, (STEPS, 4, 32), generator=torch.Generator().manual_seed(2))
    expected = [steps_of(plain, theirs, ids) for ids in text]

    def context(host_budget: int) -> hydra_ext.offload:
        return hydra_ext.offload(
            model,
            ours,
            budget="32MiB",
            host_budget=host_budget,
            spill_dir=tmp_path,
            device=SimulatedDevice(),
            checks=Checks(poison_hosts=True),
        )

    with pytest.raises(hydra_ext.errors.HostBudgetTooSmall) as caught, context(1):
        pass
    with context(caught.value.smallest_budget) as run:
        assert_same(expected, [steps_of(model, ours, ids) for ids in text])
        assert run.report().disk_weight_bytes > 0
        run.core.update.finish()
        assert run.report().disk_gradient_bytes == 0  # used, and dropped
    assert_same([*plain.parameters()], [*model.parameters()])


def steps_of(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.full
def test_ranks_that_average_gradients_keep_those_on_the_host(tmp_path: Path) -> None:
    without = run_ranks(train_together, None, folder=tmp_path)
    for expected, seen in zip(without, run_ranks(train_together, str(tmp_path), folder=tmp_path), strict=True):
        assert_same(expected, seen)


# ---- a disk that fails ----------------------------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize("operation", [FileOperation.READ, FileOperation.WRITE])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8, 13, 24, 25, 40, 60, 90, 120, 200])
def test_a_transfer_that_fails_is_an_error_and_never_a_wrong_number(
    operation: FileOperation, nth: int, tmp_path: Path
) -> None:
    _, _, model, ours = pair()
    files = FaultyFiles()
    told = ""
    with contextlib.suppress(hydra_ext.errors.SpillError), offloaded(model, ours, tmp_path, files=files) as run:
        drain(run.core)
        files.fail(operation, FileFault.ERROR, nth, error=errno.EIO)
        try:
            for batch in BATCHES:
                run.step(batch.split(2), lambda part: model(part).pow(2).mean(), max_norm=0.1)
                run.core.update.finish()
        except (hydra_ext.errors.SpillError, RuntimeError) as error:  # the latter through torch's dispatcher
            told = str(error)
        failed = files.met() > 0
    assert ("Input/output error" in told or "are lost" in told) == failed
    assert not list(tmp_path.iterdir())
    if not failed:
        plain, theirs, _, _ = pair()
        for batch in BATCHES:
            for microbatch in batch.split(2):
                (plain(microbatch).pow(2).mean() / 4).backward()
            optim.clip_grad_norm_(plain.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
        assert_same(state(plain, theirs), state(model, ours))


def test_a_gradient_that_did_not_reach_the_disk_ends_a_step_before_anything_is_changed(tmp_path: Path) -> None:
    _, _, model, ours = pair()
    files = FaultyFiles()
    ended = False
    with contextlib.suppress(hydra_ext.errors.SpillError), offloaded(model, ours, tmp_path, files=files) as run:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        drain(run.core)
        files.fail(FileOperation.WRITE, FileFault.ERROR, DEPTH, error=errno.EIO)  # that of the last gradient
        model(BATCHES[0]).pow(2).mean().backward()
        with pytest.raises(hydra_ext.errors.SpillError, match="Input/output error"):
            ours.step()
        assert files.met() == 1
        assert_same(before, [parameter.detach().clone() for parameter in model.parameters()])
        ended = True
    assert ended
