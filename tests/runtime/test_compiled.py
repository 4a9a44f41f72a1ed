"""What torch.compile has made of a model, or of its parts, opens windows: before the context, in it, traced or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from support.benches import assert_same
from support.outcomes import POISONED

# torch.compile looks at `.grad` of what it traces and hides the warning where warnings are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH = 16
BUDGET = 2**16
Call = Callable[[torch.Tensor], torch.Tensor]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outer, self.part, self.layer = Outer(), Part(), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.part(self.outer(x))))


def compiled(what: Any, **options: Any) -> Any:
    return torch.compile(what, backend="eager", **options)


def parts(model: Net, each: Callable[[Any], Any] = lambda part: part) -> Call:
    outer, part, layer, head = map(each, (model.outer, model.part, model.layer, model.head))
    return lambda x: head(layer(part(outer(x))))


def in_place(model: Net) -> Net:
    model.compile(backend="eager")
    return model


def with_penalty(model: Net) -> Call:
    penalty = compiled(lambda: sum(parameter.pow(2).sum() for parameter in model.parameters()))
    return lambda x: model(x) + penalty() * 0.01


FORMS: dict[str, Callable[[Net], Call]] = {
    "the model": compiled,
    "the model ahead of time": lambda model: torch.compile(model, backend="aot_eager"),
    "its forward": lambda model: compiled(model.forward),
    "a function of it": lambda model: compiled(lambda x: model(x)),
    "in place": in_place,
    "its parts": lambda model: parts(model, compiled),
    "a function of its parts": lambda model: compiled(parts(model)),
    "a penalty": with_penalty,
}


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(model: Net, call: Call) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for index in range(2):
        torch.manual_seed(index)
        loss = call(torch.randn(4, WIDTH)).pow(2).sum()
        loss.backward()
        seen += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("when", ["before", "called before", "inside"])
@pytest.mark.parametrize("form", FORMS)
def test_windows_are_opened(form: str, when: str) -> None:
    plain, model = Net(), Net()
    plainly = FORMS[form](plain)
    expected = [train(plain, plainly) for _ in range(3)]
    torch._dynamo.reset()
    call = None if when == "inside" else FORMS[form](model)
    found = [] if when != "called before" else [train(model, call)]
    checks = None if form == "a penalty" else POISONED  # its backward reads host parameters
    with hydra_ext.offload(model, budget=BUDGET, checks=checks) as run:
        call = FORMS[form](model) if call is None else call
        found.append(train(model, call))
        report = run.report()
        assert report.windows >= 4
        assert report.loads > 0
    found.append(train(model, call))
    for ours, theirs in zip(found, expected, strict=False):
        assert_same(theirs, ours)
    assert run.report().windows == report.windows


def test_what_is_to_be_one_graph_and_needs_windows_is_refused_before_a_gradient_is_made() -> None:
    model = Net()
    call = compiled(parts(model), fullgraph=True)
    call(torch.ones(1, WIDTH))
    with hydra_ext.offload(model, budget=BUDGET):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compiled = torch\.compile\(model\)"):
            call(torch.ones(1, WIDTH))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_dynamo_is_as_before() -> None:
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    before = UnspecializedNNModuleVariable.call_function
    first, second = Net(), Net()
    with hydra_ext.offload(first, budget=BUDGET):
        with hydra_ext.offload(second, budget=BUDGET):
            assert UnspecializedNNModuleVariable.call_function is not before
        assert UnspecializedNNModuleVariable.call_function is not before
    assert UnspecializedNNModuleVariable.call_function is before
