"""What needs more of a table than the rows that its module looks up raises, and says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import BudgetTooSmall, ModelChanged, UnsupportedModel
from hydra_ext.optim import AdamW
from support.tables import BUDGET, ROWS, WIDTH, Recommender, batches, bits


class Reader(nn.Module):
    """Calls the model, and then something that reads its first table."""

    def __init__(self, read: Callable[[nn.Embedding], Any]) -> None:
        super().__init__()
        self.model = Recommender(sparse=True)
        self.read = read

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.model(batch), self.read(self.model.one)


def read_by(read: Callable[[nn.Embedding], Any], **options: Any) -> Any:
    reader = Reader(read)
    with hydra_ext.offload(reader, budget=BUDGET, device="simulated", **options):
        return reader(*batches(1))[1]


READS: dict[str, Callable[[nn.Embedding], Any]] = {
    "sum": lambda one: one.weight.sum(),
    "linear": lambda one: nn.functional.linear(torch.zeros(1, WIDTH), one.weight),
    "numpy": lambda one: one.weight.numpy(),
    "data": lambda one: one.weight.data,
    "index": lambda one: one.weight[3],
    "several": lambda one: torch._foreach_norm([one.weight, torch.ones(2)]),
    "storage": lambda one: one.weight.untyped_storage(),
    "freezing": lambda one: one.weight.requires_grad_(False),
    "setting": lambda one: setattr(one.weight, "requires_grad", False),
    "copy": copy.deepcopy,
    "state": lambda one: one.state_dict(),
    "jagged": lambda one: one(torch.nested.nested_tensor([torch.arange(5), torch.arange(3)], layout=torch.jagged)),
    "swapped": lambda one: nn.functional.embedding(one.weight, torch.ones(2, 2)),
}


@pytest.mark.parametrize("name", READS)
def test_other_reads_of_a_table_raise(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"the forward uses 'model\.one\.weight' in") as raised:
        read_by(READS[name])
    assert "blocks= of hydra_ext.offload" in str(raised.value)


def test_what_needs_no_bytes_works() -> None:
    def read(one: nn.Embedding) -> Any:
        weight = one.weight
        weight_is_known = {weight: 1}[weight]
        return weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.numel(), weight_is_known

    assert read_by(read) == (torch.Size([ROWS, WIDTH]), torch.float32, torch.device("cpu"), True, ROWS * WIDTH, 1)
    assert read_by(lambda one: isinstance(one.weight, nn.Parameter))
    assert "model.one.weight" in read_by(lambda one: repr(one.weight))


def test_a_table_may_be_frozen_inside() -> None:
    reader = Reader(lambda one: one.weight.requires_grad)
    with hydra_ext.offload(reader, budget=BUDGET, device="simulated"):
        assert reader(*batches(1))[1] is True
        reader.model.one.weight.requires_grad_(False)
        result, trained = reader(*batches(1))
        assert trained is False
        result.sum().backward()
    assert reader.model.one.weight.grad is None
    assert reader.model.bags.weight.grad is not None


def test_attributes_of_the_parameter_are_seen() -> None:
    reader = Reader(lambda one: one.weight.scaling)  # type: ignore[union-attr]
    reader.model.one.weight.scaling = 3  # type: ignore[union-attr]
    with hydra_ext.offload(reader, budget=BUDGET, device="simulated"):
        assert reader(*batches(1))[1] == 3


def test_the_functions_look_rows_up_too() -> None:
    torch.manual_seed(1)
    at = torch.tensor([[4, 4, 2]])
    found = read_by(lambda one: nn.functional.embedding_bag(at, one.weight, mode="max"))
    torch.manual_seed(1)
    assert found.equal(nn.functional.embedding_bag(at, Reader(READS["sum"]).model.one.weight, mode="max"))


@pytest.mark.parametrize("index", [-1, ROWS])
def test_rows_that_are_not_there_raise_as_in_torch(index: int) -> None:
    with pytest.raises(IndexError, match=rf"index out of range in self: 'one.weight' has {ROWS} rows"):
        run_with({"one": torch.tensor([index])})


def test_indices_that_are_no_integers_raise_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="to have one of the following scalar types: Long, Int"):
        run_with({"one": torch.ones(2)})


def run_with(changes: dict[str, Tensor]) -> Tensor:
    model = Recommender(sparse=True)
    with hydra_ext.offload(model, budget=BUDGET, device="simulated"):
        return model({**batches(1)[0], **changes})


CHANGES: dict[str, Callable[[nn.Embedding], object]] = {
    "dtype": lambda one: one.bfloat16(),
    "size": lambda one: setattr(one.weight, "data", torch.ones(ROWS + 10, WIDTH)),
    "strides": lambda one: setattr(one.weight, "data", torch.ones(WIDTH, ROWS).t()),
}


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_was_given_another_form_raises(change: str, make: Any) -> None:
    model = Recommender(sparse=False)
    optimizer = make(model.parameters())
    with hydra_ext.offload(model, optimizer, budget=BUDGET, device="simulated"):
        model(*batches(1)).sum().backward()
        optimizer.step()
        CHANGES[change](model.one)
        with pytest.raises(ModelChanged, match=r"'one.weight' has shape"):
            model(*batches(1))


def test_rows_count_toward_the_budget() -> None:
    model = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum"), nn.Linear(WIDTH, 1))
    with (
        hydra_ext.offload(model, budget=BUDGET, device="simulated", activations=None),
        pytest.raises(torch.OutOfMemoryError, match=rf"\({ROWS // 8 * WIDTH * 4} bytes\) asked"),
    ):
        model(torch.arange(ROWS // 8).reshape(1, -1))


def test_a_graph_of_the_gradient_raises() -> None:
    model = Recommender(sparse=True)
    with hydra_ext.offload(model, budget=BUDGET, device="simulated"):
        loss = model(*batches(1)).sum()
        with pytest.raises(UnsupportedModel, match="create_graph=True"):
            torch.autograd.grad(loss, [model.one.weight], create_graph=True)


def test_max_norm_writes_in_the_type_of_the_table() -> None:
    model = Recommender(sparse=True, max_norm=1.0)
    with (
        hydra_ext.offload(model, budget=BUDGET, device="simulated", param_dtype=torch.bfloat16),
        pytest.raises(UnsupportedModel, match="the write would be lost"),
    ):
        model(*batches(1))


@pytest.mark.parametrize(("sparse", "moments"), [(True, torch.float32), (False, torch.bfloat16)])
def test_tables_that_do_not_step_by_rows_move_whole_beside_a_limit_of_the_host(
    sparse: bool, moments: torch.dtype, tmp_path: Path
) -> None:
    model = Recommender(sparse=sparse)
    optimizer = hydra_ext.optim.AdamW(model.parameters(), moments=moments)
    with pytest.raises(BudgetTooSmall, match="'one'"):
        hydra_ext.offload(model, optimizer, budget=BUDGET, device="simulated", host_budget="1GiB", spill_dir=tmp_path)


def test_named_blocks_move_whole() -> None:
    model = Recommender(sparse=True)
    with hydra_ext.offload(model, budget=4 * model.one.weight.nbytes, device="simulated", blocks=["one"]) as run:
        model(*batches(1))
        assert run.report().tables.names == ("bags.weight",)
        assert "one" in [block.name for block in run.layout.blocks]


def test_what_else_uses_the_weight_keeps_it_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(ROWS, WIDTH, sparse=True)
            self.head = nn.Linear(WIDTH, ROWS, bias=False)
            self.head.weight = self.one.weight

    class Own(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return self.weight[input]

    for model in (Tied(), Own(ROWS, WIDTH, sparse=True), nn.Embedding(ROWS, WIDTH)):
        with hydra_ext.offload(model, budget=4 * ROWS * WIDTH * 4, device="simulated") as run:
            assert run.report().tables is None


def test_dense_tables_are_those_of_more_than_half_the_budget() -> None:
    size = ROWS * WIDTH * 4
    for budget, tables in ((2 * size, 0), (2 * size - 2, 1), (size - 1, 1)):
        with hydra_ext.offload(nn.Embedding(ROWS, WIDTH), budget=budget, device="simulated") as run:
            assert len(run.layout.tables) == tables


def test_embeddings_that_share_a_weight_are_one_table() -> None:
    def made() -> nn.ModuleList:
        torch.manual_seed(2)
        pair = nn.ModuleList([nn.Embedding(ROWS, WIDTH, sparse=True), nn.EmbeddingBag(ROWS, WIDTH, sparse=True)])
        pair[1].weight = pair[0].weight
        return pair

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = made()

        def forward(self, at: Tensor) -> Tensor:
            return self.pair[0](at).sum(1) + self.pair[1](at)

    plain, ours, at = Pair(), Pair(), torch.tensor([[1, 1, 5], [5, 2, 2]])
    plain(at).square().sum().backward()
    with hydra_ext.offload(ours, budget=BUDGET, device="simulated") as run:
        ours(at).square().sum().backward()
        assert run.report().tables.names == ("pair.0.weight",)
    expected, found = plain.pair[0].weight.grad, ours.pair[0].weight.grad
    assert found._indices().equal(expected._indices())
    assert bits(found._values()).equal(bits(expected._values()))
