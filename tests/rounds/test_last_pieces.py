"""What follows the last block goes backward right after its forward: one microbatch's logits at a time, same bits."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import _C, Checks
from hydra_ext.runtime.rounds.executor import Round
from support.models.zoo import Batch, Family
from support.rounds.rounds import (
    Plan,
    Seen,
    assert_nothing_left,
    build_optimizer,
    differences,
    train_loop,
    train_rounds,
)

PLAN = Plan(m=4)
ROOMY = 2**28
VOCABULARY = 32768
TOKENS = (2, 16)


def gpt2(tied: bool) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=8,
        n_head=2,
        n_positions=TOKENS[1],
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def batch_of_tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    return {"input_ids": ids, "labels": ids}


TIED = Family("tied", lambda: gpt2(tied=True), batch_of_tokens)
UNTIED = Family("untied", lambda: gpt2(tied=False), batch_of_tokens)


class Layered(nn.Module):
    """A plain stack that says when its head runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).pow(2).mean()


LAYERED = Family("layered", Layered, lambda generator: {"x": torch.randn(3, 8, generator=generator)})


def activations(family: Family, m: int, *, recompute: bool = False) -> int:
    """Device bytes of activations at their highest in a step of ``m`` microbatches."""
    model = family.make(0)
    optimizer = build_optimizer(model, PLAN)
    batches = family.batches(1, 2 * m)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        for step, size in enumerate((1, m)):  # the first one sees whether blocks can be recomputed
            mine = batches[step * m : (step + 1) * m]
            run.step(mine, lambda b: family.loss(model, b), round_size=size, recompute=recompute)
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
        peak = max(size for kind in kinds for _, size in run.core.pager.recorded(kind))
        report = run.report()
        assert report.windows > 0
        assert (report.refusals, report.fallbacks, report.faults) == (0, 0, 0)
    return peak


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", [TIED, UNTIED], ids=lambda family: family.name)
def test_seven_more_microbatches_take_less_than_one_more_of_logits(family: Family, recompute: bool) -> None:
    logits = 4 * VOCABULARY * TOKENS[0] * TOKENS[1]
    one, eight = activations(family, 1, recompute=recompute), activations(family, 8, recompute=recompute)
    assert one > 2 * logits
    assert eight - one < logits


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("round_size", [4, 3])
@pytest.mark.parametrize("family", [TIED, UNTIED, LAYERED], ids=lambda family: family.name)
def test_it_is_the_loop_to_the_bit(family: Family, round_size: int, recompute: bool) -> None:
    batches = family.batches(1, 3 * PLAN.m)
    expected = train_loop(family.make(0), family.loss, batches, PLAN, steps=3)
    model = family.make(0)
    with hydra_ext.offload(model, build_optimizer(model, PLAN), budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        seen = train_rounds(run, model, family.loss, batches, PLAN, steps=3, round_size=round_size, recompute=recompute)
        report = run.report()
    assert differences(seen, expected) == []
    assert report.windows > 0
    assert (report.refusals, report.fallbacks) == (0, 0)


@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16])
def test_the_last_piece_of_each_microbatch_goes_backward_before_the_next_ones_is_made(
    grad_dtype: torch.dtype | None,
) -> None:
    model = Layered()
    order: list[str] = []
    model.head.register_forward_hook(lambda *_: order.append("forward"))
    model.head.register_full_backward_hook(lambda *_: order.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(
        model, optimizer, budget=ROOMY, grad_dtype=grad_dtype, checks=Checks(poison_hosts=True)
    ) as run:
        run.step(LAYERED.batches(1, 3), lambda b: model(**b), round_size=3, recompute=False)
        assert run.report().windows > 0
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
    assert order == ["forward", "backward"] * 3


def test_blocks_that_backward_follows_at_once_are_not_recomputed() -> None:
    model = Layered()
    calls = [0] * 5
    for number, layer in enumerate([*model.layers, model.head]):
        layer.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks, checks = list(model.layers), Checks(poison_hosts=True)
    counts = []
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=blocks, checks=checks) as run:
        for _ in range(3):
            run.step(LAYERED.batches(1, 3), lambda b: model(**b), round_size=3, recompute=True)
            counts.append(list(calls))
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
        assert run.report().windows > 0
    # The first step also sees whether calling them again gives the same; the second sees where the forwards end.
    assert counts[0] == [7] * 5
    assert [after - before for before, after in zip(counts[1], counts[2], strict=True)] == [6, 6, 6, 6, 3]


# ---- what ends early ------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by the user's code."""


@pytest.mark.parametrize("before", [False, True])
def test_an_error_after_the_last_block_leaves_gradients_as_they_were(before: bool) -> None:
    model = LAYERED.make(0)
    batches = LAYERED.batches(1, 12)
    optimizer = build_optimizer(model, PLAN)
    factor = torch.ones((), requires_grad=True)  # a leaf that is not the model's
    calls = iter(range(4))

    def fn(batch: Batch) -> Tensor:
        loss = LAYERED.loss(model, batch) * factor
        if next(calls) == 2:
            raise Stop
        return loss

    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run:
        if before:
            LAYERED.loss(model, batches[4]).backward()
        there = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with pytest.raises(Stop):
            run.step(batches[:4], fn, round_size=4, recompute=False)
        assert_nothing_left(run)
        after = [p.grad for p in model.parameters()]
        assert [g is None for g in after] == [not before] * len(after)
        assert all(a is None or (b is not None and torch.equal(a, b)) for a, b in zip(after, there, strict=True))
        assert factor.grad is None
        model.zero_grad()
        seen = train_rounds(run, model, LAYERED.loss, batches, PLAN, steps=2, round_size=4, recompute=False)
        assert run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS) == 0
    assert differences(seen, train_loop(LAYERED.make(0), LAYERED.loss, batches, PLAN, steps=2)) == []


def test_an_interrupt_between_forward_and_backward_leaves_nothing_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    model = LAYERED.make(0)
    batches = LAYERED.batches(1, 8)
    optimizer = build_optimizer(model, PLAN)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run:
        backward = Round.backward
        monkeypatch.setattr(Round, "backward", stop)
        with pytest.raises(KeyboardInterrupt):
            run.step(batches[:4], lambda b: LAYERED.loss(model, b), round_size=4, recompute=False)
        monkeypatch.setattr(Round, "backward", backward)
        assert_nothing_left(run)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS) == 0
        seen = train_rounds(run, model, LAYERED.loss, batches, PLAN, steps=2, round_size=4, recompute=False)
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
    assert differences(seen, train_loop(LAYERED.make(0), LAYERED.loss, batches, PLAN, steps=2)) == []


class SharingLate(Layered):
    """From its third microbatch on, one more uses what the one before made."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept.append(self.head.bias.sum() if len(self.kept) != 2 else self.kept[-1] * 1)
        return y + self.kept[-1]


def test_microbatches_that_turn_out_to_share_a_graph_are_undone() -> None:
    model = SharingLate()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batches = LAYERED.batches(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, expected = Seen(), Seen()
    seen.watch(model, optimizer)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run:
        run.step(batches, lambda b: model(**b), round_size=4, recompute=False)
        seen.step_ended(model)
        assert (run.report().refusals, run.report().fallbacks) == (1, 4)
    plain = SharingLate()
    plain.load_state_dict(state)
    plain.kept = [torch.zeros(())] * 4  # as after the round that was refused
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected.watch(plain, theirs)
    for batch in batches:
        (plain(**batch) / 4).backward()
    theirs.step()
    theirs.zero_grad()
    expected.step_ended(plain)
    assert differences(seen, expected) == []


def test_a_leaf_that_is_not_the_models_gets_its_gradient_in_order() -> None:
    def train(run: hydra_ext.Run | None, model: nn.Module, scale: Tensor) -> Tensor:
        def fn(batch: Batch) -> Tensor:
            return functional.softplus(LAYERED.loss(model, batch) * scale) + scale * batch["x"].mean()

        batches = LAYERED.batches(1, 4)
        if run is not None:
            run.step(batches, fn, round_size=4, recompute=False)
        else:
            for batch in batches:
                (fn(batch) / 4).backward()
        assert scale.grad is not None
        return scale.grad

    expected = train(None, LAYERED.make(0), torch.full((), 0.7, requires_grad=True))
    model = LAYERED.make(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run:
        assert torch.equal(train(run, model, torch.full((), 0.7, requires_grad=True)), expected)
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
        assert run.report().windows > 0


def test_a_graph_that_runs_through_another_offloaded_model_waits_and_opens_its_window() -> None:
    def train(model: nn.Module, other: nn.Module, run: hydra_ext.Run | None) -> list[Tensor]:
        batches = LAYERED.batches(1, 4)

        def fn(batch: Batch) -> Tensor:
            return LAYERED.loss(model, {"x": other(batch["x"])})

        if run is not None:
            seen: list[Tensor] = []
            run.optimizer.register_step_pre_hook(lambda *_: seen.extend(gradients(model)))
            run.step(batches, fn, round_size=4, recompute=False)
            return [*seen, *gradients(other)]
        for batch in batches:
            (fn(batch) / 4).backward()
        return [*gradients(model), *gradients(other)]

    def gradients(module: nn.Module) -> list[Tensor]:
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    def second() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    expected = train(LAYERED.make(0), second(), None)
    model, other = LAYERED.make(0), second()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = Checks(poison_hosts=True)
    with (
        hydra_ext.offload(other, budget=ROOMY, checks=checks) as theirs,
        hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=list(model.layers), checks=checks) as run,
    ):
        seen = train(model, other, run)
        assert theirs.report().windows == 4 + 1
        assert (run.report().refusals, run.report().fallbacks) == (0, 0)
    assert len(seen) == len(expected) == 14
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
