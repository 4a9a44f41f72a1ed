"""``hydra_ext.SharedDevice``: runs that take turns have the bits that each has alone."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Offload, SharedDevice, SimulatedDevice, optim
from support import traces
from support.benches import Outcome
from support.models.zoo import FAMILIES
from support.runtime.tenants import (
    OPTIMIZERS,
    STEPS,
    WIDTH,
    Context,
    Offloaded,
    Work,
    alone,
    assert_as_alone,
    draws,
    loop,
    slow_device,
    stack,
    state,
    together,
)

GPT2 = FAMILIES["gpt2"]
LANGUAGE_BUDGET = 1_000_000


def rounds(context: Context, *, microbatches: int = 3) -> Outcome:
    """``run.step``, and the loop that it stands for."""
    model = stack()
    chosen = OPTIMIZERS["native"](model.parameters())
    seen: Outcome = []
    with context(model, chosen) as run:
        for step in range(STEPS):
            seeds = [10 * step + index for index in range(microbatches)]
            batches = [draws() for _ in seeds]
            if run is not None:
                seen += run.step(batches, lambda batch: model(batch).square().mean(), seeds=seeds).losses
            else:
                with torch.random.fork_rng():
                    for seed, batch in zip(seeds, batches, strict=True):
                        torch.manual_seed(seed)
                        loss = model(batch).square().mean()
                        (loss / microbatches).backward()
                        seen.append(loss.detach())
                chosen.step()
                chosen.zero_grad()
    return [*seen, *state(model)]


def language(context: Context, *, autocast: bool = False, steps: int = 3) -> Outcome:
    """A model with dropout and tied weights, which are used twice in a forward."""
    model = GPT2.build().train()
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: Outcome = []
    with context(model, chosen):
        for _ in range(steps):
            tokens = torch.randint(3, 96, (2, 12))
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = GPT2.loss(model, {"input_ids": tokens, "labels": tokens})
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            seen.append(loss.detach().clone())
    return [*seen, *state(model)]


class Twice(nn.Module):
    """Uses each weight twice in a forward, with other layers between: under autocast a cast is cached meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for layer in self.layers:
                batch = self.dropout(torch.tanh(layer(batch)))
        return batch


def twice(context: Context, *, cache_enabled: bool | None = None) -> Outcome:
    model = Twice()
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: Outcome = []
    with context(model, chosen):
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
                loss = model(draws()).float().square().mean()
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            seen.append(loss.detach().clone())
    return [*seen, *state(model)]


# ---- the bits of each run alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["torch", "native"])
def test_runs_that_draw_random_numbers_have_the_bits_of_each_alone(optimizer: str) -> None:
    assert_as_alone([partial(loop, layers=layers, optimizer=optimizer) for layers in (6, 4, 8)])


def test_native_and_torch_optimizers_go_together() -> None:
    report = assert_as_alone([partial(loop, optimizer=name) for name in OPTIMIZERS])
    assert [each.steps for each in report.tenants] == [STEPS] * 3
    assert report.tenants[1].update_seconds > 0
    assert report.tenants[0].update_seconds == 0


def test_one_run_on_a_shared_device_is_a_run() -> None:
    works: list[Work] = [loop]
    outcomes, report, _ = together(works)
    assert all(torch.equal(a, b) for a, b in zip(alone(works)[0], outcomes[0], strict=True))  # type: ignore[arg-type]
    assert report.switches == 0


def test_rounds_of_microbatches_beside_loops() -> None:
    assert_as_alone([rounds, partial(rounds, microbatches=2), loop])


@pytest.mark.parametrize(
    ("activations", "work"),
    [("auto", loop), (Offload(), rounds), pytest.param("auto", rounds, marks=pytest.mark.full), (Offload(), loop)],
    ids=["auto", "offload-rounds", "auto-rounds", "offload"],
)
def test_activations_that_leave_or_are_planned(activations: Any, work: Work) -> None:
    assert_as_alone([work, partial(loop, layers=4)], budget=90_000, options={"activations": activations})


def test_state_and_weights_on_the_disk(tmp_path: Path) -> None:
    works = [partial(loop, optimizer="native", layers=layers) for layers in (6, 8)]
    options = {"activations": None, "host_budget": 330_000, "spill_dir": tmp_path}
    assert_as_alone(works, budget=100_000, options=options)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 13))])
def test_late_compute_changes_no_bit(seed: int) -> None:
    device = SharedDevice(SimulatedDevice(asynchronous=True, seed=seed), budget="1MiB")
    assert_as_alone([loop, partial(loop, layers=4, optimizer="native"), rounds], device)


def test_language_models_with_dropout_and_tied_weights() -> None:
    assert_as_alone([language, language], budget=LANGUAGE_BUDGET)


@pytest.mark.every_case
@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_autocast_keeps_no_casts_which_other_runs_would_drop(cache_enabled: bool | None) -> None:
    """It has one cache for the process, which every thread empties that leaves an autocast."""
    works = [partial(twice, cache_enabled=cache_enabled)] * 3
    reference = alone([partial(twice, cache_enabled=False)])
    assert not torch.equal(alone([partial(twice, cache_enabled=True)])[0][-1], reference[0][-1])  # type: ignore[arg-type]
    assert_as_alone(works, reference=reference * 3, budget=126_000)
    assert torch.is_autocast_cache_enabled()


def test_language_models_under_autocast() -> None:
    works = [partial(language, autocast=True), partial(language, autocast=True), twice]
    torch.set_autocast_cache_enabled(False)
    try:
        reference = alone(works, lambda: Offloaded(slow_device(), budget=LANGUAGE_BUDGET))
    finally:
        torch.set_autocast_cache_enabled(True)
    assert_as_alone(works[:2], reference=reference[:2], budget=LANGUAGE_BUDGET)


def test_runs_follow_one_another_in_a_function() -> None:
    def both(context: Context) -> Outcome:
        return [*loop(context), *rounds(context)]

    report = assert_as_alone([both, loop])
    assert report.tenants[0].steps == 2 * STEPS


def test_switches_of_the_process_belong_to_a_run() -> None:
    def in_double(context: Context) -> Outcome:
        torch.set_default_dtype(torch.float64)
        model = stack()
        chosen = torch.optim.SGD(model.parameters(), lr=1e-2)
        seen: Outcome = []
        with context(model, chosen):
            for _ in range(STEPS):
                loss = model(torch.randn(4, WIDTH)).square().mean()
                loss.backward()
                chosen.step()
                chosen.zero_grad()
                seen.append(loss.detach().clone())
        torch.set_default_dtype(torch.float32)
        return [*seen, *state(model)]

    assert_as_alone([in_double, loop])
    assert torch.get_default_dtype() == torch.float32


# ---- turns ----------------------------------------------------------------------------------------------------------


class Busy(nn.Linear):
    """Computes for longer than a run may be ahead of the others."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        until = time.monotonic() + 0.005
        while time.monotonic() < until:
            batch = super().forward(batch)
        return batch


def test_a_run_that_waits_for_nothing_lets_another_go_on_at_a_block() -> None:
    device = SharedDevice(slow_device(), budget="1MiB")
    passes = 6
    seen: list[tuple[int, int]] = []  # run and pass, at each block

    def evaluate(number: int) -> None:
        model = nn.Sequential(*[Busy(8, 8) for _ in range(4)])
        done: list[torch.Tensor] = []
        for block in model:
            block.register_forward_hook(lambda *_: seen.append((number, len(done))))
        with hydra_ext.offload(model, budget="auto", device=device) as run, torch.no_grad():
            for _ in range(passes):
                done.append(model(torch.ones(1, 8)))
            assert run.report().evictions == 0

    device.run(partial(evaluate, 0), partial(evaluate, 1))
    assert sorted(seen) == sorted((number, index) for number in (0, 1) for index in range(passes) for _ in range(4))
    inside = 0
    for number, index in {(number, index) for number, index in seen if 0 < index < passes - 1}:
        first = seen.index((number, index))
        last = len(seen) - 1 - seen[::-1].index((number, index))
        inside += any(other != number for other, _ in seen[first:last])
    assert inside > 0


# ---- figures --------------------------------------------------------------------------------------------------------


def test_the_report_adds_up() -> None:
    device = SharedDevice(slow_device(), budget="1MiB")
    _, report, _ = together([partial(loop, optimizer="native"), rounds], device)
    for figures in report.tenants:
        assert figures.to_device_seconds > 0
        assert figures.to_host_seconds > 0
        assert figures.compute_seconds > 0
        assert figures.steps == STEPS
    assert 0 < report.bound <= report.seconds
    assert 0 < report.share <= 1
    assert str(report).startswith("2 runs in ")
    assert f"{report.switches} switches" in str(report)
    assert device.report() == report


def test_the_bytes_of_the_runs_are_those_of_the_lanes() -> None:
    device = SharedDevice(slow_device(), budget="1MiB")
    _, _, contexts = together([loop, rounds], device)
    assert device._sharing is not None
    whole = device._sharing.backend
    for side in ("to_device_statistics", "to_host_statistics"):
        of_runs = [getattr(context.backends[0], side) for context in contexts]
        assert min(each.bytes for each in of_runs) > 0
        assert sum(each.bytes for each in of_runs) == getattr(whole, side).bytes
        assert sum(each.jobs for each in of_runs) == getattr(whole, side).jobs


def test_a_trace_holds_the_rows_of_its_own_run(tmp_path: Path) -> None:
    device = SharedDevice(slow_device(), budget="1MiB")

    def traced(name: str, layers: int, context: Context) -> Outcome:
        model = nn.Sequential()
        model.add_module(name, stack(layers))
        chosen = optim.AdamW(model.parameters(), lr=1e-3)
        with context(model, chosen) as run:
            assert run is not None
            with run.trace(tmp_path / f"{name}.json"):
                for _ in range(STEPS):
                    model(draws()).square().mean().backward()
                    chosen.step()
                    chosen.zero_grad()
                run.sync()
        return []

    together([partial(traced, "one", 6), partial(traced, "other", 4)], device)
    for name, other in (("one", "other"), ("other", "one")):
        file = traces.read(tmp_path / f"{name}.json")
        for row in ("host to device", "device to host", "optimizer"):
            names = [event["name"] for event in file.row(row)]
            assert names
            assert any(name in each for each in names)
            assert not any(f"{other}." in each for each in names)
