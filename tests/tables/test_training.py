"""Tables of ten times the budget train with the bits of plain PyTorch, and their rows move, not the tables."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from support.tables import (
    BUDGET,
    ROWS,
    WIDTH,
    Optimizer,
    Recommender,
    Trained,
    batches,
    expect_same,
    rows_of,
    train,
)

# torch's Adagrad makes sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return hydra_ext.optim.AdamW(parameters, lr=0.1)


# By name: arguments of the model and of its batches.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "mean": ({"mode": "mean"}, {}),
    "padding": ({"padding_idx": 3, "mode": "mean"}, {}),
    "max norm": ({"max_norm": 2.0}, {}),
    "last offset": ({"include_last_offset": True}, {"last_offset": True}),
    "weighted": ({}, {"weighted": True}),
    "twice": ({"twice": True}, {}),
}
DENSE_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **FORMS,
    "max": ({"mode": "max"}, {}),
    "by frequency": ({"scale_grad_by_freq": True}, {}),
}
CASES = [(True, form) for form in FORMS] + [(False, form) for form in DENSE_FORMS]


def both(
    sparse: bool, form: str, make: Optimizer, *, steps: int = 3, accumulate: int = 2, **offloaded: Any
) -> tuple[Trained, Trained]:
    options, of_batches = DENSE_FORMS[form]
    given = batches(steps * accumulate, **of_batches)
    found = []
    for each in ({}, {"budget": BUDGET, **offloaded}):
        torch.manual_seed(5)
        found.append(train(Recommender(sparse=sparse, **options), make, given, accumulate=accumulate, **each))
    return found[0], found[1]


@pytest.mark.parametrize("way", ["loop", "step"])
@pytest.mark.parametrize(("sparse", "form"), CASES)
def test_every_form_has_the_bits_of_plain_pytorch(sparse: bool, form: str, way: str) -> None:
    plain, ours = both(sparse, form, adagrad, way=way)
    expect_same(ours, plain, gradients=way == "loop")
    assert ours.report is not None
    assert ours.report.tables is not None
    assert ours.report.tables.names == ("one.weight", "bags.weight")
    assert ours.report.tables.nbytes == 2 * ROWS * WIDTH * 4 >= 10 * BUDGET


@pytest.mark.parametrize(
    ("sparse", "make"),
    [(True, sgd), (False, sgd), (False, adam), (False, adamw)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_optimizers_step_the_tables(sparse: bool, make: Optimizer) -> None:
    for way in ("loop", "step"):
        plain, ours = both(sparse, "usual", make, way=way)
        expect_same(ours, plain, gradients=way == "loop")


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_move_not_tables(sparse: bool) -> None:
    given = batches(6)
    for way in ("loop", "step"):
        report = train(Recommender(sparse=sparse), sgd, given, accumulate=2, budget=BUDGET, way=way).report
        assert report is not None
        ours = report.tables
        assert ours is not None
        assert ours.rows_moved_bytes == rows_of(given, unique=True) * WIDTH * 4
        assert ours.gradients_moved_bytes == rows_of(given, unique=not sparse) * WIDTH * 4
        assert ours.rows_written_back_bytes == 0


def test_gradients_on_the_host_take_no_memory_of_the_device() -> None:
    peaks = []
    for count in (2, 12):
        given = batches(1) * count
        report = train(
            Recommender(sparse=True), sgd, given, accumulate=count, budget=8 * BUDGET, gradients=False
        ).report
        assert report is not None
        peaks.append(report.peak_bytes)
    gradient = rows_of(batches(1), unique=False) * WIDTH * 4
    assert peaks[1] < peaks[0] + gradient


@pytest.mark.parametrize("seed", range(4))
def test_transfers_may_end_late(seed: int) -> None:
    device = hydra_ext.SimulatedDevice(poison=True, asynchronous=True, seed=seed)
    plain, ours = both(True, "twice", adagrad, way=("loop", "step")[seed % 2], device=device)
    expect_same(ours, plain, gradients=seed % 2 == 0)


@pytest.mark.parametrize(("sparse", "make"), [(True, adagrad), (False, adamw)], ids=["sparse", "dense"])
def test_microbatches_of_a_round_are_computed_again(sparse: bool, make: Optimizer) -> None:
    plain, ours = both(sparse, "twice", make, accumulate=4, way="step", step={"recompute": True, "round_size": 4})
    expect_same(ours, plain, gradients=False)
    assert ours.report is not None
    assert ours.report.rounds > 0


@pytest.mark.parametrize("sparse", [True, False])
def test_a_round_that_wrote_rows_leaves_no_trace(sparse: bool) -> None:
    """With max_norm the forward writes to tables, so microbatches cannot share a round: what one wrote is undone."""
    options: dict[str, Any] = {"max_norm": 2.0, "twice": True}
    given = batches(8)
    found = []
    for each in ({}, {"budget": 4 * BUDGET, "way": "step", "step": {"round_size": 4, "recompute": False}}):
        torch.manual_seed(5)
        found.append(train(Recommender(sparse=sparse, **options), sgd, given, accumulate=4, **each))
    plain, ours = found
    expect_same(ours, plain, gradients=False)
    assert ours.report is not None
    assert ours.report.tables is not None
    assert ours.report.refusals == 1
    assert ours.report.tables.rows_written_back_bytes > 0


def test_sparse_adam_and_another_optimizer_share_a_model() -> None:
    def go(budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = Recommender(sparse=True)
        tables = [model.one.weight, model.bags.weight]
        others = [*model.bottom.parameters(), *model.top.parameters()]
        of_tables = torch.optim.SparseAdam(tables, lr=0.1)
        of_others = torch.optim.Adam(others, lr=0.1)

        def loop() -> None:
            for batch in batches(4):
                nn.functional.mse_loss(model(batch), batch["target"]).backward()
                for optimizer in (of_tables, of_others):
                    optimizer.step()
                    optimizer.zero_grad()

        if budget is None:
            loop()
        else:
            with hydra_ext.offload(model, of_others, budget=budget, device="simulated"):
                loop()
        return [*model.parameters(), *(state["exp_avg_sq"] for state in of_tables.state.values())]

    for ours, plain in zip(go(BUDGET), go(None), strict=True):
        assert ours.equal(plain)


def test_tables_get_their_numbers_on_entering() -> None:
    for build in (lambda: Recommender(sparse=True), lambda: nn.Embedding(ROWS, WIDTH)):
        torch.manual_seed(3)
        plain = build()
        torch.manual_seed(3)
        ours = hydra_ext.materialize(build)
        with hydra_ext.offload(ours, budget=BUDGET, device="simulated") as run:
            assert run.report().tables is not None
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert one.equal(other)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it behind a break
def test_a_compiled_model_looks_rows_up() -> None:
    found = []
    for budget in (None, BUDGET):
        torch.manual_seed(5)
        model = Recommender(sparse=False)
        compiled = torch.compile(model, backend="eager")
        optimizer = adamw(model.parameters())
        with (
            nullcontext() if budget is None else hydra_ext.offload(model, optimizer, budget=budget, device="simulated")
        ):
            for batch in batches(3):
                nn.functional.mse_loss(compiled(batch), batch["target"]).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([parameter.detach() for parameter in model.parameters()])
    for ours, plain in zip(*found, strict=True):
        assert ours.equal(plain)
