"""A segment that runs again in pieces: with the bits of a loop, in less memory than in one piece."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import SimulatedDevice
from hydra_ext.plan.steps.memory import memory_of
from hydra_ext.plan.steps.problem import StepProblem, StepSetting
from hydra_ext.profile.dry_run import dry_run
from support.models.picture_models import PICTURES
from support.models.zoo import FAMILIES
from support.runtime.fitted import both
from support.stash.stashed import assert_same

WIDTH, ROWS, LAYERS = 32, 512, 16
SLOW = 1e6  # bytes a second of the link


class Layer(nn.Module):
    """Saves much more inside than it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(functional.gelu(self.norm(self.up(x)))))


def deep() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 8))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return functional.cross_entropy(y, torch.arange(len(y), device=y.device) % 8)


def in_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    run, left = model.__dict__.get("_hydra_ext_context"), []
    for seed, x in enumerate(torch.randn(4, ROWS, WIDTH, generator=torch.Generator().manual_seed(2))):
        if run is not None:
            left += run.step([x], lambda given: loss_of(model, given), seeds=[seed]).losses
            continue
        torch.manual_seed(seed)
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
    return left


# ---- calls ----------------------------------------------------------------------------------------------------------


@contextmanager
def in_pieces(stash: hydra_ext.stash, outer: list[nn.Module], pieces: list[nn.Module]) -> Iterator[None]:
    with stash:
        stash._saving._recomputed.choose((), torch.device("cpu"), given=outer, pieces=pieces)
        yield


def divided(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The outermost modules with numbered names, and the modules inside that do not write to what they take."""
    outer = [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]
    outer = [name for name in outer if not any(name.startswith(f"{other}.") for other in outer)]
    modules = dict(model.named_modules())
    pieces = [piece for name in outer for child in modules[name].children() for piece in pieces_of(child)]
    return [modules[name] for name in outer], pieces


def pieces_of(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return [*module]
    return [] if getattr(module, "inplace", False) else [module]


MODELS = {name: (FAMILIES | PICTURES)[name] for name in ("gpt2", "t5", "mixtral", "unet_batch_norm")}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_plain_calls(name: str) -> None:
    family, found, calls = MODELS[name], {}, (0, 0)
    for nested in (False, True):
        model = family.make(seed=1)
        stash = hydra_ext.stash(hydra_ext.Offload(), model=model, device="simulated")
        outer, pieces = divided(model)
        left = found.setdefault(nested, [])
        for batch in family.batches(seed=2, count=3):
            if nested:
                with in_pieces(stash, outer, pieces):
                    loss = family.loss(model, batch)
                loss.backward()
            else:
                loss = family.loss(model, batch)
                loss.backward()
            left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            left += [buffer.clone() for buffer in model.buffers()]
        calls = stash.report().recomputed, 3 * len(outer)
    assert_same(found[True], found[False])
    assert calls[0] > 2 * calls[1] > 0


def test_a_second_call_has_the_pieces_of_the_first_whatever_is_chosen_by_then() -> None:
    family = MODELS["gpt2"]
    model, twin = family.make(seed=1), family.make(seed=1)
    stash = hydra_ext.stash(hydra_ext.Offload(), model=model, device="simulated")
    outer, pieces = divided(model)
    batch = family.batches(seed=2, count=1)[0]
    torch.manual_seed(0)
    with in_pieces(stash, outer, pieces[::2]):
        loss = family.loss(model, batch)
    with in_pieces(stash, outer, pieces[1::2]):
        loss.backward()
    torch.manual_seed(0)
    family.loss(twin, batch).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert stash.report().recomputed == len(outer) + len(pieces[::2])


class Part(nn.Module):
    """Does not save what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x * 2)
        return y


class WritesLater(nn.Module):
    """Writes to what its part has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.part(x)
        x += y
        return x


def test_a_module_whose_arguments_are_written_to_later_is_no_piece() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(WritesLater() for _ in range(3)))
    twin = copy.deepcopy(model)
    stash = hydra_ext.stash(hydra_ext.Offload(), model=model, device="simulated")
    for seed in range(3):
        for each in (model, twin):
            torch.manual_seed(seed)
            x = torch.randn(64, WIDTH)
            with stash if each is model else nullcontext():
                if each is model:
                    parts = [layer.part for layer in model]
                    stash._saving._recomputed.choose([*model], torch.device("cpu"), pieces=parts)
                loss = each(x).square().mean()
            loss.backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert stash.report().recomputed == 3 * len(model)  # the trial of each among them


# ---- plans ----------------------------------------------------------------------------------------------------------


def problem() -> StepProblem:
    model, x = deep(), torch.randn(ROWS, WIDTH)
    profile = dry_run(model, x, lambda given: loss_of(model, given))
    return StepProblem(profile, StepSetting(microbatches=1, to_device=SLOW, to_host=SLOW, buffer_bytes=0))


@pytest.mark.full
def test_a_deep_chain_is_foreseen_faster_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with_pieces = problem()
    budget = int(0.13 * with_pieces.ideal_bytes)
    monkeypatch.setattr("hydra_ext.plan.steps.problem.in_pieces", lambda *_: None)
    without = problem()
    found = with_pieces.solve(budget)
    assert found.seconds < 0.9 * without.solve(budget).seconds
    chain = with_pieces.segments[found.cut]
    assert any(segment.freedom.nested for segment in chain)
    assert found.peak_bytes == max(point.total for point in memory_of(chain, found, 0)) <= budget


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(2))
def test_a_plan_in_pieces_has_the_bits_of_a_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_ext.runtime.step_planner._LaneSpeed.bytes_per_second", lambda _: SLOW)
    found = both(deep, in_steps, budget=3_000_000, device=SimulatedDevice(asynchronous=True, seed=seed))
    assert found.equal
    assert found.retries == 0
    assert found.pieces
    steps = 2  # with this plan, after the one that tries it
    assert found.second_calls >= steps * len([*found.recomputed, *found.pieces])
