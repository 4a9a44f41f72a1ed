"""Blocks that are called again in backward, in rounds and by a stash.

What they draw is drawn again; what differs is kept, or raises before a wrong gradient is there.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from support.rounds.deviating import (
    CALLS,
    CHECKS,
    DEPTH,
    WIDTH,
    Deviating,
    Experts,
    HiddenShuffle,
    LayerDrop,
    Net,
    Shuffle,
    assert_equal,
    batches,
    host_states,
    in_a_loop,
    loss,
    seed_hosts,
    with_recompute,
)

WAYS = pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "stash"])


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def assert_is_the_loop(make: Callable[[], nn.Module], *, seed: int, microbatches: int = 1, **choices: Any) -> Any:
    torch.manual_seed(0)
    model = Net(make)
    torch.manual_seed(0)
    twin = Net(make)
    steps = batches(6, microbatches)
    seed_hosts(seed)
    expected = in_a_loop(twin, steps)
    ended = host_states()
    seed_hosts(seed)
    found, report = with_recompute(model, steps, **choices)
    assert len(found) == len(expected)
    assert_equal(found, expected)
    assert host_states() == ended
    return report


# ---- Python's and numpy's random numbers ----------------------------------------------------------------------------
@WAYS
@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_dropped_are_dropped_again(rounds: bool, seed: int) -> None:
    assert_is_the_loop(lambda: LayerDrop(0.3 if seed == 0 else 0.02), seed=seed, rounds=rounds)


@WAYS
def test_a_permuted_output_is_permuted_as_it_was(rounds: bool) -> None:
    assert_is_the_loop(Shuffle, seed=1, rounds=rounds)


@WAYS
def test_equal_experts_are_chosen_as_they_were(rounds: bool) -> None:
    assert_is_the_loop(lambda: Experts(lambda count: int(np.random.randint(count))), seed=1, rounds=rounds)


OWN: dict[str, Callable[[], Any]] = {
    "python": lambda: random.Random(5),
    "numpy": lambda: np.random.default_rng(5),
    "numpy's older ones": lambda: np.random.RandomState(5),
    "torch": lambda: torch.Generator().manual_seed(5),
}


@WAYS
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_generator_that_a_module_holds_draws_again(rounds: bool, own: Callable[[], Any]) -> None:
    assert_is_the_loop(lambda: Noisy(own()), seed=1, rounds=rounds)


class Noisy(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        of_torch = isinstance(self.generator, torch.Generator)
        drawn = torch.rand(1, generator=self.generator) if of_torch else self.generator.random()
        return torch.tanh(self.linear(x * float(drawn)))


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize("round_size", [3, None])
@pytest.mark.parametrize("make", [LayerDrop, Shuffle])
def test_microbatches_draw_in_the_order_of_a_loop(
    make: type[nn.Module], round_size: int | None, recompute: bool | None
) -> None:
    report = assert_is_the_loop(make, seed=2, microbatches=3, rounds=True, round_size=round_size, recompute=recompute)
    # Known from the first round, if that is one of a single microbatch.
    alone_from_the_start = round_size is None or recompute is None
    assert report.refusals == (0 if alone_from_the_start else 1)
    assert report.fallbacks == 18 - (1 if alone_from_the_start else 0)


def test_what_only_fn_draws_refuses_no_round() -> None:
    torch.manual_seed(0)
    model = Net(lambda: nn.Linear(WIDTH, WIDTH))
    twin = copy.deepcopy(model)
    steps = batches(1, 3)

    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x + random.random() + np.random.randn())

    seed_hosts(3)
    for x in steps[0]:
        (noisy(twin, x) / 3).backward()
    ended = host_states()
    seed_hosts(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hydra_ext.offload(model, optimizer, budget=2**20, device="simulated", blocks=[*model.blocks]) as run:
        found: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in model.parameters()))
        run.step(steps[0], lambda x: noisy(model, x), round_size=3, recompute=True)
        assert host_states() == ended
        report = run.report()
    assert (report.rounds, report.refusals, report.fallbacks) == (1, 0, 0)
    assert all(torch.equal(mine, p.grad) for mine, p in zip(found, twin.parameters(), strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("choices", [{}, {"round_size": None, "recompute": None}], ids=["given", "chosen"])
def test_a_backward_that_draws_draws_as_the_loop(choices: dict[str, Any]) -> None:
    """Where a round has drawn in another order in its backward, the step is undone."""
    torch.manual_seed(0)
    model = Net(lambda: nn.Linear(WIDTH, WIDTH))
    twin = copy.deepcopy(model)
    for block in (*model.blocks, *twin.blocks):
        block.weight.register_hook(lambda gradient: gradient + random.random())
    steps = batches(4, 3)
    seed_hosts(3)
    expected = in_a_loop(twin, steps)
    ended = host_states()
    seed_hosts(3)
    found, report = with_recompute(model, steps, rounds=True, **choices)
    assert_equal(found, expected)
    assert host_states() == ended
    assert len(found) == len(steps)
    assert report.refusals == (0 if choices else 1)  # seen in the first round, of one microbatch, or in one of several
    assert report.retries == 0


# ---- arguments ------------------------------------------------------------------------------------------------------
class Jitters(nn.Module):
    """Writes to what it is given, as the routers of some mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x *= torch.empty_like(x).uniform_(0.9, 1.1)
        return torch.tanh(self.linear(x))


def test_a_block_that_writes_to_its_argument_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Jitters(), nn.Linear(WIDTH, WIDTH)])
    twin = copy.deepcopy(model)

    def loss_of(model: nn.ModuleList, x: Tensor) -> Tensor:
        for block in model:
            x = block(x)
        return x.square().mean()

    microbatches = batches(1, 3)[0]
    for number, x in enumerate(microbatches):
        torch.manual_seed(number)
        (loss_of(twin, x) / len(microbatches)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hydra_ext.offload(model, optimizer, budget=2**20, device="simulated", blocks=[*model]) as run:
        found: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in model.parameters()))
        run.step(microbatches, lambda x: loss_of(model, x), seeds=[0, 1, 2], round_size=1, recompute=True)
        assert run.report().fallbacks == 0
    assert len(found) == 6
    assert all(torch.equal(mine, p.grad) for mine, p in zip(found, twin.parameters(), strict=True))


def test_a_recomputed_round_leaves_nothing_on_the_device() -> None:
    """Its budget may be what the next round needs to the last byte."""
    torch.manual_seed(0)
    model = Net(lambda: nn.Linear(WIDTH, WIDTH))
    held: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hydra_ext.offload(model, optimizer, budget=2**20, device="simulated", blocks=[*model.blocks]) as run:

        def noted(x: Tensor) -> Tensor:
            held.append(run.activation_bytes())
            return loss(model, x)

        run.step(batches(1, 4)[0], noted, round_size=1, recompute=True)
    assert held == [0, 4, 8, 12]  # losses of the rounds before


# ---- what no state that is restored decides -------------------------------------------------------------------------
@pytest.mark.full
@WAYS
def test_a_block_that_deviates_late_is_caught(rounds: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Net(lambda: Deviating(50))
    twin = copy.deepcopy(model)
    steps = batches(20, 1)
    CALLS[0] = -10_000
    expected = in_a_loop(twin, steps)
    CALLS[0] = 0
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: found.append([p.grad.clone() for p in model.parameters()]))
    activations = {"": hydra_ext.Offload(), "blocks.*": hydra_ext.Recompute()}
    options = {"blocks": [*model.blocks]} if rounds else {"activations": activations}

    def train(run: hydra_ext.Run) -> None:
        for (x,) in steps:
            if rounds:
                run.step([x], lambda x: loss(model, x), recompute=True)
            else:
                loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()

    with hydra_ext.offload(model, optimizer, budget=2**20, device="simulated", **options) as run:  # type: ignore[arg-type]
        if rounds:
            train(run)
            assert "run.step makes a step again" in caplog.text
            assert "not complete" not in caplog.text
        else:
            with pytest.raises(UnsupportedModel, match="gives something else when it is called a second time"):
                train(run)
            optimizer.zero_grad()
            CALLS[0] = -10_000
            train(run)  # what has deviated is kept
    assert len(found) >= len(steps)
    assert_equal(found[:5], expected)  # the sixth step meets the fiftieth call


def test_a_step_that_cannot_be_made_again_says_that_it_is_not_complete() -> None:
    model = Net(lambda: Deviating(50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    CALLS[0] = 0
    with hydra_ext.offload(model, optimizer, budget=2**20, device="simulated", blocks=[*model.blocks]) as run:

        def train() -> None:
            for (x,) in batches(20, 1):
                run.step([x], lambda x: loss(model, x), recompute=True)

        with pytest.raises(UnsupportedModel, match=r"not complete, and cannot be made again: hooks run"):
            train()
        optimizer.zero_grad()


def choices_of(start: int) -> Callable[[int], int]:
    counter = itertools.count(start)
    return lambda count: next(counter) % count


@pytest.mark.every_case
@WAYS
@pytest.mark.parametrize("block", ["permuted", "equal experts"])
def test_a_permutation_or_an_exchanged_parameter_is_seen(rounds: bool, block: str) -> None:
    torch.manual_seed(0)
    taken: list[Any] = []
    model = Net(HiddenShuffle if block == "permuted" else lambda: Experts(choices_of(0)))
    twin = copy.deepcopy(model)
    steps = batches(1, 1)
    steps[0][0].requires_grad_()  # else the first block's gradients need none of its weights
    for each in model.blocks:
        note_what_is_taken(each, taken)
    if not rounds:
        with pytest.raises(UnsupportedModel, match="gives something else"):
            with_recompute(model, steps, rounds=False)
        return
    found, report = with_recompute(model, steps, rounds=True)
    for each, what in zip(twin.blocks, taken[-DEPTH:], strict=True):  # the last forward's
        take(each, what)
    assert_equal(found, in_a_loop(twin, steps))
    assert report.refusals == 0


def note_what_is_taken(block: Any, taken: list[Any]) -> None:
    if isinstance(block, Experts):
        draw = block.draw
        block.draw = lambda count: taken.append(draw(count)) or taken[-1]
    else:
        order = block.order
        block.order = lambda: taken.append(order()) or taken[-1]


def take(block: Any, what: Any) -> None:
    if isinstance(block, Experts):
        block.draw = lambda _: what
    else:
        block.order = lambda: what


# ---- hooks of the user ----------------------------------------------------------------------------------------------
class Deep(nn.Module):
    """Saves far more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(6):
            x = torch.tanh(x)
        return x


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda block, hook: block.register_forward_hook(hook),
    "before it": lambda block, hook: block.register_forward_pre_hook(hook),
    "inside": lambda block, hook: block.linear.register_forward_hook(hook),
    "backward": lambda block, hook: block.register_full_backward_hook(hook),
    "before that": lambda block, hook: block.register_full_backward_pre_hook(hook),
}


def calls_of_hooks(kind: str, *, offloaded: bool, recompute: bool | None = None) -> tuple[int, int, list[Any]]:
    """Calls of a hook in the second block, forwards of the first one, and the parameters after two steps.

    The budget has no room for what four microbatches save.
    """
    torch.manual_seed(0)
    model, calls, forwards = Net(Deep), [0], [0]
    HOOKS[kind](model.blocks[1], lambda *_: calls.__setitem__(0, calls[0] + 1))
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda x: forwards.__setitem__(0, forwards[0] + 1) or forward(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = [[torch.randn(256, WIDTH) for _ in range(4)] for _ in range(2)]
    if not offloaded:
        for step in steps:
            for x in step:
                (loss(model, x) / len(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        with hydra_ext.offload(
            model, optimizer, budget=2**19, device="simulated", blocks=[*model.blocks], activations=None, checks=CHECKS
        ) as run:
            for step in steps:
                run.step(step, lambda x: loss(model, x), recompute=recompute)
            report = run.report()
        assert (report.retries, report.refusals, report.fallbacks) == (0, 0, 0)
    return calls[0], forwards[0], [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_run_as_often_as_in_a_loop_unless_recomputation_is_asked_for(kind: str) -> None:
    once, forwards, expected = calls_of_hooks(kind, offloaded=False)
    calls, more_forwards, found = calls_of_hooks(kind, offloaded=True)
    assert more_forwards > forwards == 8  # blocks without hooks are recomputed
    assert calls == once == 8
    assert_equal([found], [expected])
    asked, _, found = calls_of_hooks(kind, offloaded=True, recompute=True)
    assert (asked > once) == (kind in ("forward", "before it", "inside"))
    assert_equal([found], [expected])


# ---- tensors that cannot be compared --------------------------------------------------------------------------------
class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("dense", torch.eye(WIDTH).roll(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(self.dense.to_sparse(), self.linear(x).t()).t())


class Recurrent(nn.Module):
    """Whose library saves notes that nothing has written all of."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        junk = [torch.full((length,), float("nan")) for length in range(4000, 4040)]
        del junk  # its memory is what the notes begin as
        return self.lstm(x[None])[0][0]  # type: ignore[no-any-return]


@WAYS
@pytest.mark.parametrize("make", [Sparse, Recurrent])
def test_tensors_that_cannot_be_compared_are_kept(make: Callable[[], nn.Module], rounds: bool) -> None:
    assert_is_the_loop(make, seed=1, rounds=rounds)
