"""Heads that run in rows under a budget, in ``run.step`` and in a plain loop: the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Auto, Checks, SimulatedDevice
from hydra_ext.errors import StateError
from hydra_ext.heads import calls
from hydra_ext.heads.bits import HeadShape
from support.runtime.fitted import optimizer_of

CLASSES, WIDTH, ROWS, TOKENS, STEPS = 4099, 16, 2, 48, 2
SHAPE = HeadShape(
    rows=ROWS * TOKENS,
    inputs=WIDTH,
    classes=CLASSES,
    has_bias=False,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
TIGHT = SHAPE.logits_bytes + 4 * SHAPE.weight_bytes
Loss = Callable[[nn.Module, Tensor], Tensor]


class Language(nn.Module):
    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES if tied else 64, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(self.embedding(tokens)).relu())
        return y


def tokens() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(64, (ROWS, TOKENS), generator=draw) for _ in range(2 * STEPS)]


def made(**options: bool) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def loss_of(model: nn.Module, given: Tensor) -> Tensor:
    target = torch.where(given % 9 == 0, -100, given * 61)
    return functional.cross_entropy(model(given).view(-1, CLASSES), target.view(-1))


def in_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss = loss_of) -> list[Tensor]:
    left = []
    for number, given in enumerate(tokens()):
        loss = loss_of(model, given)
        (loss / 2).backward()
        left.append(loss.detach().clone())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return left


def in_steps(run: hydra_ext.Run, loss_of: Loss = loss_of, **choices: Any) -> list[Tensor]:
    given, left = tokens(), []
    for first in range(0, len(given), 2):
        left += run.step(given[first : first + 2], lambda each: loss_of(run.model, each), **choices).losses
    return left


def entered(model: nn.Module, budget: int, *, auto: Auto | None = None) -> hydra_ext.offload:
    return hydra_ext.offload(
        model,
        optimizer_of(model),
        budget=budget,
        device=SimulatedDevice(asynchronous=True),
        activations=auto or "auto",
        checks=Checks(poison_hosts=True),
    )


def heads_of(run: hydra_ext.Run) -> calls.Heads:
    assert run.fit is not None
    return run.fit.heads


def all_equal(losses: list[Tensor], plain: nn.Module, found: list[Tensor], model: nn.Module) -> bool:
    before, after = ([*many, *module.state_dict().values()] for many, module in ((losses, plain), (found, model)))
    return len(before) == len(after) and all(map(torch.equal, before, after))


CHOICES: dict[str, dict[str, Any] | None] = {
    "loop": None,
    "step": {},
    "round": {"round_size": 2},
    "recomputed": {"round_size": 2, "recompute": True},
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=["", "bias", "tied"])
def test_a_head_that_does_not_fit_runs_in_rows(choices: dict[str, Any] | None, options: dict[str, bool]) -> None:
    plain, model = made(**options), made(**options)
    losses = in_a_loop(plain, optimizer_of(plain))
    with entered(model, TIGHT) as run:
        assert run.optimizer is not None
        found = in_a_loop(model, run.optimizer) if choices is None else in_steps(run, **choices)
        tally, report = heads_of(run).tally, run.report()
    assert all_equal(losses, plain, found, model)
    assert tally.parts > 3 * len(losses)
    assert tally.wholes == 0
    assert report.retries == 0
    assert report.peak_bytes < SHAPE.least_bytes


class Branched(Language):
    """Its logits are made before blocks that need the head's room, and read behind them."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        widths = [WIDTH, 6 * WIDTH, 480, 480, 480, 480]
        self.branch = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embedding(tokens)
        return self.head(hidden), self.branch(hidden).square().mean()


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_head_whose_block_has_made_room_is_brought_again(choices: dict[str, Any] | None) -> None:
    def branched(model: nn.Module, given: Tensor) -> Tensor:
        logits, other = model(given)
        return functional.cross_entropy(logits.view(-1, CLASSES), given.view(-1) * 61) + other

    torch.manual_seed(0)
    plain = Branched()
    model = copy.deepcopy(plain)
    losses = in_a_loop(plain, optimizer_of(plain), branched)
    with entered(model, TIGHT) as run:
        assert run.optimizer is not None
        optimizer = run.optimizer
        found = in_a_loop(model, optimizer, branched) if choices is None else in_steps(run, branched, **choices)
        tally, report = heads_of(run).tally, run.report()
    assert all_equal(losses, plain, found, model)
    assert tally.parts > 0
    assert tally.wholes == 0
    assert report.evictions > 0


def test_under_autocast_it_is_the_plain_one() -> None:
    """The weight that the product takes is a copy, which is gone when the loss is made."""

    def cast(model: nn.Module, given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, given)

    plain, model = made(), made()
    losses = in_a_loop(plain, optimizer_of(plain), cast)
    with entered(model, SHAPE.ample_bytes - 1) as run:
        assert run.optimizer is not None
        found = in_a_loop(model, run.optimizer, cast)
        assert heads_of(run).tally.parts == 0
    assert all_equal(losses, plain, found, model)


def test_with_room_it_is_the_plain_one() -> None:
    model = made()
    with entered(model, 2 * SHAPE.ample_bytes) as run:
        in_steps(run)
        assert heads_of(run).tally.parts == 0
        assert run.plan().heads_in_rows == ()


def test_other_code_gets_whole_logits() -> None:
    def halved(model: nn.Module, given: Tensor) -> Tensor:
        logits = model(given)
        logits.mul_(0.5)
        return functional.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), given[:, 1:].reshape(-1))

    plain, model = made(), made()
    losses = in_a_loop(plain, optimizer_of(plain), halved)
    with entered(model, SHAPE.ample_bytes - 1) as run:
        assert run.optimizer is not None
        found = in_a_loop(model, run.optimizer, halved)
        tally = heads_of(run).tally
    assert all_equal(losses, plain, found, model)
    assert tally.wholes == len(losses)


def write_to_a_copy(logits: Tensor) -> Any:
    copied = logits.to(torch.float32, copy=True)
    return copied.div_(copied.norm()).sum().item()


READERS: list[Callable[[Tensor], Any]] = [
    write_to_a_copy,
    lambda logits: logits.clone().mul_(2).sum().item(),
    lambda logits: logits.share_memory_().sum().item(),
    lambda logits: torch.from_dlpack(logits).sum().item(),
    lambda logits: float(np.from_dlpack(logits).sum(dtype=np.float64)),
]


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_logits_finds_their_numbers_and_leaves_them(reader: Callable[[Tensor], Any]) -> None:
    found: list[Any] = []

    def read(model: nn.Module, given: Tensor) -> Tensor:
        logits = model(given).view(-1, CLASSES)
        found.append(reader(logits.detach()))
        return functional.cross_entropy(logits, given.view(-1) * 61)

    plain, model = made(), made()
    losses = in_a_loop(plain, optimizer_of(plain), read)
    with entered(model, SHAPE.ample_bytes - 1) as run:
        assert run.optimizer is not None
        again = in_a_loop(model, run.optimizer, read)
        assert heads_of(run).in_rows
    assert all_equal(losses, plain, again, model)
    assert found[: len(losses)] == found[len(losses) :]


@pytest.mark.parametrize("auto", [None, Auto(inexact_heads=True)])
def test_a_head_of_no_rows_is_the_plain_one(auto: Auto | None) -> None:
    model = made()
    with entered(model, 7 * SHAPE.weight_bytes // 4, auto=auto) as run:
        assert model(torch.zeros(0, TOKENS, dtype=torch.int64)).shape == (0, TOKENS, CLASSES)
        assert not heads_of(run).in_rows


def test_logits_that_are_metrics_can_be_read_after_the_step() -> None:
    model, plain = made(), made()
    expected = [plain(given).detach() for given in tokens()[:2]]
    with entered(model, SHAPE.ample_bytes - 1) as run:

        def fn(given: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(given)
            return functional.cross_entropy(logits.view(-1, CLASSES), given.view(-1)), logits.detach()

        heads_of(run).is_wary = True
        output = run.step(tokens()[:2], fn, round_size=1)
        assert heads_of(run).in_rows
        assert all(map(torch.equal, output.metrics, expected))


def test_without_the_same_bits_it_is_the_plain_one_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "has_plain_bits", lambda _: False)
    model = made()
    for auto in (None, Auto()):
        with entered(model, TIGHT, auto=auto) as run, pytest.raises(torch.OutOfMemoryError):
            in_steps(run)
        assert heads_of(run).tally.parts == 0
    with entered(model, TIGHT, auto=Auto(inexact_heads=True)) as run:
        in_steps(run)
        assert heads_of(run).tally.parts > 0


def test_a_step_in_which_the_plain_one_fails_is_made_in_rows() -> None:
    """The budget has room for what a head takes, and none for the logits, which stay as a metric."""
    plain, model = made(), made()
    losses = in_a_loop(plain, optimizer_of(plain))
    kept: list[Tensor] = []

    def keeping(model: nn.Module, given: Tensor) -> Tensor:
        handle = model.register_forward_hook(lambda _module, _given, out: kept.append(out.detach()))
        loss = loss_of(model, given)
        handle.remove()
        return loss

    with entered(model, SHAPE.least_bytes + SHAPE.logits_bytes // 2) as run:
        found = in_steps(run, keeping)
        tally, retries = heads_of(run).tally, run.report().retries
    assert all_equal(losses, plain, found, model)
    assert tally.parts > 0
    assert tally.wholes == 0
    assert retries == 1


def test_logits_of_the_step_before_raise() -> None:
    model = made()
    with entered(model, TIGHT) as run:
        logits = model(tokens()[0])
        functional.cross_entropy(logits.view(-1, CLASSES), tokens()[1].view(-1)).backward()
        assert run.optimizer is not None
        run.optimizer.step()
        with pytest.raises(StateError, match=r"before optimizer\.step"):
            logits.argmax(-1)


def test_the_least_budget_of_a_plan_is_that_of_the_head_in_rows_and_trains() -> None:
    plain, model = made(), made()
    losses = in_a_loop(plain, optimizer_of(plain))
    fn = lambda each: loss_of(model, each)  # noqa: E731
    elsewhere = hydra_ext.plan.fit(model, tokens()[0], fn, device="t4-16", microbatches=2)
    assert elsewhere.heads_in_rows == ()
    least = hydra_ext.plan.fit(model, tokens()[0], fn, device="t4-16", microbatches=2, inexact_heads=True).least_bytes
    plan = hydra_ext.plan.fit(model, tokens()[0], fn, microbatches=2, budget=least)
    assert plan.heads_in_rows == ("head",)
    assert "in rows, with the loss: head" in str(plan)
    assert plan.least_bytes == least
    assert least < SHAPE.least_bytes / 2 < elsewhere.least_bytes
    with entered(model, least + least // 20) as run:
        found = in_steps(run)
        assert heads_of(run).in_rows == ["head"]
    assert all_equal(losses, plain, found, model)
