"""A dense table that native optimizers step by rows has the bits of steps of the whole, whenever it is read."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Run
from hydra_ext.errors import InvalidOptimizer, StateError
from hydra_ext.optim import SGD, Adam, AdamW, clip, rows
from hydra_ext.optim.host_optimizer import HostOptimizer
from support.tables import BUDGET, WIDTH, Recommender, Trained, batches, bits, expect_same, train

# torch's Adagrad makes sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

STEPS = 9
Rule = Callable[[Any], HostOptimizer]

RULES: dict[str, Rule] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.5),
    "sgd with decay": lambda parameters: SGD(parameters, lr=0.5, weight_decay=0.1),
    "sgd with momentum": lambda parameters: SGD(parameters, lr=0.5, momentum=0.9, dampening=0.3),
    "nesterov": lambda parameters: SGD(parameters, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: Adam(parameters, lr=0.1),
    "adam with penalty": lambda parameters: Adam(parameters, lr=0.1, weight_decay=0.1),
    "adam without eps": lambda parameters: Adam(parameters, lr=0.1, eps=0.0, weight_decay=0.1),
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
}


def both(
    rule: Rule,
    *,
    steps: int = STEPS,
    between: Callable[[Run | None, int], None] = lambda _run, _step: None,
    **offloaded: Any,
) -> tuple[Trained, Trained]:
    made: list[HostOptimizer] = []

    def make(parameters: Any) -> HostOptimizer:
        made.append(rule(parameters))
        return made[-1]

    def change_rates(run: Run | None, step: int) -> None:
        for group in made[-1].param_groups:
            group["lr"] *= 0.75 if step % 2 else 1.2
        between(run, step)

    found = []
    for each in ({}, {"budget": BUDGET, **offloaded}):
        torch.manual_seed(5)
        model = Recommender(sparse=False, twice=True)
        with torch.no_grad():
            model.one.weight[7] = -0.0
            model.bags.weight[::3] *= 0.0  # zeros of both signs
        found.append(
            train(model, make, batches(2 * steps), accumulate=2, gradients=False, between=change_rates, **each)
        )
    return found[0], found[1]


@pytest.mark.parametrize("way", ["loop", "step"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_have_the_bits_of_steps_of_the_whole(rule: str, way: str, home: dict[str, Any]) -> None:
    plain, ours = both(RULES[rule], way=way, home=home)
    expect_same(ours, plain, gradients=False)
    assert ours.report is not None
    assert ours.report.tables is not None
    assert ours.report.tables.stepped_by_rows == ours.report.tables.names


@pytest.mark.cases(1)
@pytest.mark.parametrize("rule", ["adamw", "sgd with momentum"])
def test_a_table_catches_up_after_many_steps(rule: str, home: dict[str, Any]) -> None:
    caught_up: list[int] = []

    def note(run: Run | None, step: int) -> None:
        if run is not None:
            caught_up.append(run.tables[0].steps.caught_up)  # type: ignore[union-attr]

    plain, ours = both(RULES[rule], steps=70, between=note, home=home)
    expect_same(ours, plain, gradients=False)
    assert [caught_up[step] for step in (62, 63, 69)] == [0, 1, 1]


def test_rows_that_rest_are_not_touched(home: dict[str, Any]) -> None:
    model = Recommender(sparse=False)
    with hydra_ext.offload(model, Adam(model.parameters()), budget=BUDGET, device="simulated", **home) as run:
        steps = run.tables[1].steps
        assert steps is not None
        nn.functional.mse_loss(model(batches(1)[0]), torch.zeros(16)).backward()
        run.optimizer.step()  # type: ignore[union-attr]
        touched = rows.gradient_of(model.bags.weight)._indices()[0]  # type: ignore[union-attr]
        before = steps._made.clone()
        assert before.nonzero().squeeze(1).equal(touched)
        at = torch.tensor([5000])
        with torch.no_grad():
            model.bags(at[None])
        assert steps._made[at] == 1
        assert rows.has_rows(model.bags.weight)


READERS: dict[str, Callable[[Recommender, HostOptimizer, Run | None], list[Tensor]]] = {
    "sum": lambda model, _, run: [model.one.weight.detach().sum(), model.bags.weight[17].detach().clone()],
    "numpy": lambda model, _, run: [torch.from_numpy(model.one.weight.detach().numpy().copy())],
    "data": lambda model, _, run: [model.one.weight.data.clone()],
    "several": lambda model, _, run: list(torch._foreach_norm([model.one.weight.detach(), model.bags.weight.detach()])),
    "average": lambda model, _, run: [torch.zeros_like(model.one.weight).lerp(model.one.weight.detach(), 0.5)],
    "state": lambda model, _, run: [value.clone() for value in model.state_dict().values()],
    "moments": lambda model, optimizer, run: [
        value.clone() for parameter in model.parameters() for value in optimizer.state[parameter].values()
    ],
    "optimizer's state": lambda model, optimizer, run: [
        value.clone() for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()
    ],
    "copy": lambda model, _, run: [copy.deepcopy(model.bags).weight.detach(), copy.deepcopy(model).one.weight.detach()],
    "copied moments": lambda model, optimizer, run: list(copy.deepcopy(optimizer.state[model.one.weight]).values()),
    "pickle": lambda model, optimizer, run: [
        torch.load(_saved(model.one.weight)).detach(),
        *torch.load(_saved(optimizer.state[model.bags.weight])).values(),
        torch.load(_saved(model.bags.state_dict()))["weight"],
        *torch.load(_saved(optimizer.state_dict()))["state"][1].values(),
    ],
    "written": lambda model, _, run: [_doubled(model.one.weight)],
    "trained anew": lambda model, _, run: [model.one.weight.requires_grad_(True).detach().clone()],
}


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@torch.no_grad()
def _doubled(weight: Tensor) -> Tensor:
    weight[5:90].mul_(2)
    return weight.clone()


@pytest.mark.cases(4)
@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_a_table_finds_it_up_to_date(reader: str, home: dict[str, Any]) -> None:
    def go(budget: int | None) -> list[Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        optimizer = AdamW(model.parameters(), lr=0.1)
        found: list[Tensor] = []

        def loop(run: Run | None) -> None:
            for number, batch in enumerate(batches(6)):
                nn.functional.mse_loss(model(batch), batch["target"]).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number in (2, 4):
                    found.extend(READERS[reader](model, optimizer, run))

        if budget is None:
            loop(None)
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **home) as run:
                loop(run)
        assert type(model.one.weight) is nn.Parameter
        assert type(optimizer.state[model.one.weight]["exp_avg"]) is Tensor
        return [*found, *(parameter.detach() for parameter in model.parameters())]

    plain, ours = go(None), go(BUDGET)
    assert all(type(value) in (Tensor, nn.Parameter) for value in ours)
    for one, other in zip(ours, plain, strict=True):
        assert bits(one).equal(bits(other))


def test_a_view_from_outside_sees_every_step(home: dict[str, Any]) -> None:
    def go(budget: int | None) -> list[Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        view, found = model.one.weight.detach()[100:200], []
        optimizer = AdamW(model.parameters(), lr=0.1)

        def loop() -> None:
            for batch in batches(3):
                nn.functional.mse_loss(model(batch), batch["target"]).backward()
                optimizer.step()
                found.append(view.clone())
                optimizer.zero_grad()

        if budget is None:
            loop()
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **home):
                loop()
        return found

    for ours, plain in zip(go(BUDGET), go(None), strict=True):
        assert ours.equal(plain)


@pytest.mark.parametrize("inside", [False, True])
def test_a_storage_that_is_held_sees_every_step(inside: bool, home: dict[str, Any]) -> None:
    """torch has one object for a storage, so it counts one owner however many hold that object."""

    def go(budget: int | None) -> list[Tensor]:
        torch.manual_seed(5)
        model, found = Recommender(sparse=False), []
        optimizer = AdamW(model.parameters(), lr=0.1)
        held = None if inside else model.one.weight.untyped_storage()

        def loop() -> None:
            nonlocal held
            for batch in batches(3):
                nn.functional.mse_loss(model(batch), batch["target"]).backward()
                optimizer.step()
                if held is None:
                    held = model.one.weight.untyped_storage()
                found.append(torch.empty(0).set_(held)[: 60 * WIDTH].clone())
                optimizer.zero_grad()

        if budget is None:
            loop()
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **home):
                loop()
        return found

    for ours, plain in zip(go(BUDGET), go(None), strict=True):
        assert ours.equal(plain)


def test_a_table_that_other_processes_may_read_makes_every_step(home: dict[str, Any]) -> None:
    model = Recommender(sparse=False)
    with hydra_ext.offload(model, AdamW(model.parameters()), budget=BUDGET, device="simulated", **home) as run:
        model.one.share_memory()
        for batch in batches(2):
            nn.functional.mse_loss(model(batch), batch["target"]).backward()
            run.optimizer.step()  # type: ignore[union-attr]
        assert [table.steps.caught_up for table in run.tables] == [2, 0]  # type: ignore[union-attr]


def test_norms_are_those_of_dense_gradients(home: dict[str, Any]) -> None:
    plain, ours = Recommender(sparse=False), Recommender(sparse=False)
    ours.load_state_dict(plain.state_dict())
    (batch,) = batches(1)
    plain(batch).square().sum().backward()
    with hydra_ext.offload(ours, AdamW(ours.parameters()), budget=BUDGET, device="simulated", **home):
        ours(batch).square().sum().backward()
        for limit in (1e9, 0.1):
            expected = hydra_ext.optim.clip_grad_norm_(plain.parameters(), limit)
            assert rows.has_rows(ours.bags.weight)
            assert hydra_ext.optim.clip_grad_norm_(ours.parameters(), limit).equal(expected)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert one.grad.equal(other.grad)  # type: ignore[union-attr]
        assert not rows.has_rows(ours.bags.weight)


def test_gradients_are_dense_to_others(home: dict[str, Any]) -> None:
    """Reading a gradient, as torch's clipping does, makes a step of the whole table."""

    def go(budget: int | None) -> list[Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        optimizer = AdamW(model.parameters(), lr=0.1)
        found: list[Tensor] = []
        model.bags.weight.register_post_accumulate_grad_hook(lambda weight: found.append(weight.grad.clone()))  # type: ignore[union-attr]

        def loop() -> None:
            for number, batch in enumerate(batches(6)):
                nn.functional.mse_loss(model(batch), batch["target"]).backward()
                if number % 3 == 1:
                    found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
                if number % 3 == 2:
                    model.one.weight.grad *= 2
                optimizer.step()
                model.zero_grad()

        if budget is None:
            loop()
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **home):
                loop()
        return [*found, *(parameter.detach() for parameter in model.parameters())]

    for ours, plain in zip(go(BUDGET), go(None), strict=True):
        assert bits(ours).equal(bits(plain))


@pytest.mark.parametrize("width", [16, 7, 3 * rows._CHUNK])
def test_sums_of_rows_are_those_of_dense_gradients(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_CHUNKS_AT_ONCE", 2)
    at = torch.tensor([0, 3, 4, 8]) if width > 16 else torch.randperm(20000)[:300].sort().values
    dense = torch.zeros(9 if width > 16 else 20000, width)
    # Of so many sizes that the order of the sums shows.
    dense[at] = torch.randn(len(at), width) * 10.0 ** torch.randint(-9, 9, (len(at), width))
    parameter = nn.Parameter(torch.empty_like(dense))
    parameter.grad = torch.sparse_coo_tensor(at[None], dense[at], dense.shape, check_invariants=True)
    rows.mark(parameter, lambda: None)
    by_rows = clip.sums_of_squares([parameter], [None])
    rows.unmark(parameter)
    parameter.grad = dense
    assert by_rows == clip.sums_of_squares([parameter], [None])


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["by rows", "whole"])
@pytest.mark.parametrize("limit", [1e9, 0.05])
def test_steps_clip_tables(limit: float, moments: torch.dtype, home: dict[str, Any]) -> None:
    there = home if moments == torch.float32 else {}  # others move whole there
    plain_norms: list[Tensor] = []
    found = []
    for budget in (None, BUDGET):
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        optimizer = AdamW(model.parameters(), lr=0.1, moments=moments)
        given = batches(6)

        def loss_of(batch: Any, model: Recommender = model) -> Tensor:
            return nn.functional.mse_loss(model(batch), batch["target"])

        if budget is None:
            for batch in given:
                loss_of(batch).backward()
                plain_norms.append(hydra_ext.optim.clip_grad_norm_(model.parameters(), limit))
                optimizer.step()
                optimizer.zero_grad()
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **there) as run:
                for batch, norm in zip(given, plain_norms, strict=True):
                    assert run.step([batch], loss_of, max_norm=limit).grad_norm.equal(norm)  # type: ignore[union-attr]
                tables = run.report().tables
                assert tables is not None
                assert len(tables.stepped_by_rows) == (2 if moments == torch.float32 else 0)
        found.append([parameter.detach() for parameter in model.parameters()])
    for ours, plain in zip(*found, strict=True):
        assert bits(ours).equal(bits(plain))


@pytest.mark.parametrize("kept", [False, True])
def test_steps_that_are_skipped_or_have_no_gradient(kept: bool, home: dict[str, Any]) -> None:
    """A scaler skips a step whose gradients are infinite; zero_grad leaves zeros, with which a step is made."""

    def go(budget: int | None) -> list[Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        optimizer = AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def loop() -> None:
            for number, batch in enumerate(batches(6)):
                if number != 4:
                    loss = nn.functional.mse_loss(model(batch), batch["target"])
                    scaler.scale(loss * (math.inf if number == 2 else 1.0)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                elif kept:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=not kept)

        if budget is None:
            loop()
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **home):
                loop()
        return [*(parameter.detach() for parameter in model.parameters()), optimizer.state[model.one.weight]["step"]]

    for ours, plain in zip(go(BUDGET), go(None), strict=True):
        assert bits(ours).equal(bits(plain))


def test_a_dense_gradient_given_by_hand_steps_the_whole(home: dict[str, Any]) -> None:
    def go(budget: int | None) -> list[Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        optimizer = AdamW(model.parameters(), lr=0.1)

        def loop() -> None:
            for number, batch in enumerate(batches(5)):
                nn.functional.mse_loss(model(batch), batch["target"]).backward()
                if number == 3:
                    model.one.weight.grad = torch.full_like(model.one.weight, 0.25)
                optimizer.step()
                optimizer.zero_grad()

        if budget is None:
            loop()
        else:
            with hydra_ext.offload(model, optimizer, budget=budget, device="simulated", **home):
                loop()
        return [parameter.detach() for parameter in model.parameters()]

    for ours, plain in zip(go(BUDGET), go(None), strict=True):
        assert bits(ours).equal(bits(plain))


def test_gradients_that_are_left_over_are_dense_outside(home: dict[str, Any]) -> None:
    plain, ours = Recommender(sparse=False), Recommender(sparse=False)
    ours.load_state_dict(plain.state_dict())
    optimizers = [AdamW(model.parameters(), lr=0.1) for model in (plain, ours)]
    first, second = batches(2)
    plain(first).sum().backward()
    with hydra_ext.offload(ours, optimizers[1], budget=BUDGET, device="simulated", **home):
        ours(first).sum().backward()
        assert rows.has_rows(ours.one.weight)
    assert ours.one.weight.grad.layout == torch.strided  # type: ignore[union-attr]
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        model(second).sum().backward()
        optimizer.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert bits(one.grad).equal(bits(other.grad))  # type: ignore[arg-type]
        assert bits(one.detach()).equal(bits(other.detach()))


def test_gradients_from_before_are_added_to(home: dict[str, Any]) -> None:
    plain, ours = Recommender(sparse=False), Recommender(sparse=False)
    ours.load_state_dict(plain.state_dict())
    optimizers = [AdamW(model.parameters(), lr=0.1) for model in (plain, ours)]
    first, second = batches(2)
    for model in (plain, ours):
        model(first).sum().backward()
    plain(second).sum().backward()
    optimizers[0].step()
    with hydra_ext.offload(ours, optimizers[1], budget=BUDGET, device="simulated", **home):
        ours(second).sum().backward()
        optimizers[1].step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert bits(one.detach()).equal(bits(other.detach()))


def test_rows_that_a_table_lacks_are_refused() -> None:
    weights, made = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int32)
    plain, heavy = SGD([weights]), SGD([weights], momentum=0.9)
    step, momentum = (rule._scalars(rule.param_groups[0], 1, False) for rule in (plain, heavy))
    pool = plain.pool
    for row in (-1, 4):
        with pytest.raises(StateError, match="a row that its parameter lacks"):
            _C.step_rows([weights], torch.tensor([row]), made, step, torch.ones(1, 2), 1, pool)
    with pytest.raises(StateError, match="other rows than those"):
        _C.step_rows([weights], torch.tensor([1]), made, step, torch.ones(2, 2), 1, pool)
    with pytest.raises(StateError, match="not those of the parameter"):
        _C.step_rows([weights], torch.tensor([1]), made[:3], step, torch.ones(1, 2), 1, pool)
    with pytest.raises(StateError, match="another type of tensor"):
        _C.step_rows([weights], torch.tensor([1.0]), made, step, torch.ones(1, 2), 1, pool)
    with pytest.raises(StateError, match="float32 alone"):
        _C.catch_up_rows([weights, weights.bfloat16()], torch.tensor([1]), made, 0, [(momentum, False)], pool)
    assert weights.equal(torch.zeros(4, 2))
    assert made.equal(torch.zeros(4, dtype=torch.int32))


def test_sparse_tables_need_an_optimizer_that_knows_them() -> None:
    model = Recommender(sparse=True)
    optimizer = AdamW(model.parameters())
    with hydra_ext.offload(model, optimizer, budget=BUDGET, device="simulated"):
        model(batches(1)[0]).sum().backward()
        with pytest.raises(InvalidOptimizer, match="sparse=False"):
            optimizer.step()


@pytest.mark.parametrize("native", [True, False])
def test_training_goes_on_from_a_checkpoint(native: bool, tmp_path: Path, home: dict[str, Any]) -> None:
    there = home if native else {}  # with host_budget= the optimizer is one of ours

    def go(folder: Path | None, *, until: int = 8) -> list[Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=not native)
        kind: Any = AdamW if native else torch.optim.Adagrad
        optimizer = kind(model.parameters(), lr=0.1)
        given = batches(8)

        def loss_of(batch: Any) -> Tensor:
            return nn.functional.mse_loss(model(batch), batch["target"])

        if folder is None:
            for batch in given:
                loss_of(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            with hydra_ext.offload(model, optimizer, budget=BUDGET, device="simulated", **there) as run:
                run.load(folder)
                while run.steps < until:
                    run.step([given[run.steps]], loss_of)
                    if run.steps in (3, 5):
                        run.save(folder)
        return [
            value.detach()
            for parameter in model.parameters()
            for value in (parameter, *optimizer.state[parameter].values())
        ]

    go(tmp_path, until=6)
    for ours, plain in zip(go(tmp_path), go(None), strict=True):
        assert bits(ours).equal(bits(plain))
