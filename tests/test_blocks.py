"""What moves together: every parameter in one block, every use announced by a site."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hydra_ext.blocks import Layout, discover
from hydra_ext.errors import UnsupportedModel
from support.models.zoo import FAMILIES

pytestmark = pytest.mark.every_case


def names(layout: Layout) -> list[str]:
    return [block.name for block in layout.blocks]


def assert_complete(model: nn.Module, layout: Layout) -> None:
    placed = [parameter for block in layout.blocks for _, parameter in block.parameters]
    assert len(placed) == len({id(parameter) for parameter in placed})
    assert {id(p) for p in placed} == {id(p) for p in model.parameters() if p.numel() > 0}
    by_name = dict(model.named_parameters())
    assert all(by_name[name] is parameter for block in layout.blocks for name, parameter in block.parameters)
    announced = {block for site in layout.sites for block in site.blocks}
    assert announced == set(range(len(layout.blocks)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [1, 4, 16, 1000])
def test_every_parameter_of_real_models_is_in_one_block_and_announced(family: str, share: int) -> None:
    model = FAMILIES[family].make(0)
    total = sum(parameter.nbytes for parameter in model.parameters())
    layout = discover(model, largest_bytes=total // share)
    assert_complete(model, layout)
    largest_leaf = max(sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules())
    assert max(block.nbytes for block in layout.blocks) <= max(total // share, largest_leaf)


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Random trees with shared parameters and every kind of container."""
    kind = draw(st.sampled_from(["linear", "list", "dict", "sequential", "own"] if depth else ["linear"]))
    if kind == "linear":
        return nn.Linear(draw(st.integers(1, 4)), draw(st.integers(1, 4)), bias=draw(st.booleans()))
    children = draw(st.lists(modules(depth - 1), min_size=1, max_size=3))
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "dict":
        return nn.ModuleDict({f"m{index}": child for index, child in enumerate(children)})
    if kind == "sequential":
        return nn.Sequential(*children)
    module = nn.Module()
    for index, child in enumerate(children):
        module.add_module(f"m{index}", child)
    module.register_parameter("own", nn.Parameter(torch.zeros(draw(st.integers(0, 3)))))
    if draw(st.booleans()):
        module.register_parameter("tied", next(children[0].parameters(), None))
    module.extra = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    return module


@given(modules(), st.integers(0, 200))
def test_every_parameter_of_any_tree_is_in_one_block_and_announced(model: nn.Module, largest: int) -> None:
    root = nn.Module()
    root.add_module("model", model)
    assert_complete(root, discover(root, largest_bytes=largest))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_a_tied_weight_belongs_to_its_first_module_and_is_used_at_both() -> None:
    layout = discover(Tied(), largest_bytes=100)
    assert names(layout) == ["embed", "layers.0", "layers.1"]
    assert {site.name: site.blocks for site in layout.sites} == {
        "embed": (0,),
        "layers.0": (1,),
        "layers.1": (2,),
        "head": (0,),
    }


def test_named_modules_are_blocks_whatever_their_size() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert names(discover(model, largest_bytes=1)) == ["0.0", "0.1", "1"]
    assert names(discover(model, largest_bytes=1, modules=["0"])) == ["0", "1"]
    assert names(discover(model, largest_bytes=1, modules=[model[0]])) == ["0", "1"]


def test_the_modules_of_a_named_list_are_one_block() -> None:
    """Each of them is a site, and the list, which is never called, is none."""
    model = nn.ModuleDict(
        {"pair": nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]), "last": nn.Linear(2, 2)}
    )
    layout = discover(model, largest_bytes=1, modules=["pair"])
    assert names(layout) == ["pair.0", "last"]
    assert [(site.name, site.blocks) for site in layout.sites] == [("pair.0", (0,)), ("pair.1", (0,)), ("last", (1,))]
    assert len(layout.blocks[0].parameters) == 4


def test_lists_in_a_named_list_are_no_sites() -> None:
    inner = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": inner, "pair": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), inner])})
    layout = discover(model, largest_bytes=1, modules=["pair"])
    assert [(site.name, site.blocks) for site in layout.sites] == [("first", (0,)), ("pair.0.0", (1, 0))]


def test_blocks_that_are_not_there_or_lie_in_each_other_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(UnsupportedModel, match="is not a module of Sequential"):
        discover(model, largest_bytes=1, modules=["nowhere"])
    with pytest.raises(UnsupportedModel, match="is not a module of Sequential"):
        discover(model, largest_bytes=1, modules=[nn.Linear(1, 1)])
    with pytest.raises(UnsupportedModel, match="lies inside"):
        discover(model, largest_bytes=1, modules=["0", "0.0"])
