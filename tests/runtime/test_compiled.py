"""What torch.compile has made of a model, or of its parts, opens windows: before the context, in it, traced or not."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.calls import StandIn
from hydra_ext.errors import MissingDependency, StateError
from hydra_ext.runtime import compiled as following
from support.benches import assert_same
from support.runtime.outcomes import POISONED

# torch.compile looks at `.grad` of what it traces and hides the warning where warnings are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH = 16
BUDGET = 2**16
MICROBATCHES = [torch.full((2, WIDTH), float(index)) for index in range(4)]
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


def in_place(model: nn.Module, part: nn.Module | None = None, **options: Any) -> nn.Module:
    (part or model).compile(backend="eager", **options)
    return model


def replaced(model: Net, **options: Any) -> Net:
    model.part = compiled(model.part, **options)
    return model


def with_penalty(model: Net) -> Call:
    penalty = compiled(lambda: sum(parameter.pow(2).sum() for parameter in model.parameters()))
    return lambda x: model(x) + penalty() * 0.01


# All with windows, and with the bits of a plain loop.
FORMS: dict[str, Callable[[Net], Call]] = {
    "the model": compiled,
    "the model ahead of time": lambda model: torch.compile(model, backend="aot_eager"),
    "the model as one graph": lambda model: compiled(model, fullgraph=True),
    "its call as one graph": lambda model: compiled(model.__call__, fullgraph=True),
    "its forward": lambda model: compiled(model.forward),
    "a function of it": lambda model: compiled(lambda x: model(x)),
    "the loss": lambda model: compiled(lambda x: model(x).pow(2).sum()),
    "in place": in_place,
    "in place as one graph": lambda model: in_place(model, fullgraph=True),
    "a part in place as one graph": lambda model: in_place(model, model.part, fullgraph=True),
    "a part replaced": replaced,
    "a part replaced as one graph": lambda model: replaced(model, fullgraph=True),
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


def evaluate(model: nn.Module, call: Call) -> list[torch.Tensor]:
    seen = []
    model.eval()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            seen.append(call(torch.ones(4, WIDTH)).detach().clone())
    model.train()
    return seen


WHEN = ("before", "called before", "inside")
# These at all times, others at one each.
OFTEN = ("the model", "in place", "its parts")
TIMES = [
    pytest.param(form, when, marks=[] if form in OFTEN or number % 3 == turn else pytest.mark.full)
    for number, form in enumerate(FORMS)
    for turn, when in enumerate(WHEN)
]


@pytest.mark.parametrize(("form", "when"), TIMES)
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


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_evaluations_open_windows(form: str) -> None:
    plain, model = Net(), Net()
    expected = evaluate(plain, FORMS[form](plain))
    torch._dynamo.reset()
    call = FORMS[form](model)
    with hydra_ext.offload(model, budget=BUDGET, checks=None if form == "a penalty" else POISONED) as run:
        assert_same(expected, evaluate(model, call))
        assert run.report().windows >= 3


# One graph over calls that open windows: there is none.
REFUSED: dict[str, Callable[[nn.Module], Call]] = {
    "its forward": lambda model: compiled(model.forward, fullgraph=True),
    "the loss": lambda model: compiled(lambda x: model(x).pow(2).sum(), fullgraph=True),
    "a function of its parts": lambda model: compiled(parts(model), fullgraph=True),
    "a container of torch's own": lambda model: compiled(model, fullgraph=True),
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("form", REFUSED)
def test_what_is_to_be_one_graph_and_needs_windows_is_refused_before_a_gradient_is_made(form: str, when: str) -> None:
    make = (lambda: nn.Sequential(Outer(), Part())) if form == "a container of torch's own" else Net
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    call = None if when == "inside" else REFUSED[form](model)
    if call is not None and when == "called before":
        call(torch.ones(1, WIDTH))
    with hydra_ext.offload(model, budget=BUDGET, checks=POISONED) as run:
        call = REFUSED[form](model) if call is None else call
        with pytest.raises(StateError, match=r"model\.compile\(fullgraph=True\)") as raised:
            call(torch.ones(1, WIDTH))
        assert isinstance(raised.value, torch._dynamo.exc.Unsupported)  # as without offload, where a graph breaks
        again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301 - written in the same line
        assert type(again) is StateError
        assert all(parameter.grad is None for parameter in model.parameters())
        ours = train(model, in_place(model, fullgraph=True))  # what the message says
        assert run.report().windows >= 4
    assert_same(train(plain, plain), ours)
    call(torch.ones(1, WIDTH))


def test_a_container_that_is_to_be_one_graph_is_refused_in_a_step_too() -> None:
    model = nn.Sequential(Outer(), Part())
    call = compiled(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        hydra_ext.offload(model, optimizer, budget=BUDGET) as run,
        pytest.raises(StateError, match=r"model\.compile\(fullgraph=True\)"),
    ):
        run.step([torch.ones(1, WIDTH)] * 2, lambda x: call(x).sum())


def in_a_loop(call: Call, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for microbatch in MICROBATCHES:
            (call(microbatch).pow(2).sum() / len(MICROBATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("form", ["the model as one graph", "in place as one graph"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("activations", [None, hydra_ext.Offload()], ids=str)
def test_one_graph_goes_with_steps_and_activations(form: str, options: Any, activations: Any) -> None:
    container = form == "in place as one graph"  # its parts are called as they are, and recomputed
    plain, model = ((nn.Sequential(Outer(), Part(), nn.Linear(WIDTH, WIDTH)) if container else Net()) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    call = FORMS[form](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=BUDGET, activations=activations, checks=POISONED) as run:
        for _ in range(2):
            run.step(MICROBATCHES, lambda x: call(x).pow(2).sum(), **options)
        in_a_loop(call, optimizer, 1)
        assert run.report().windows >= 2 + len(MICROBATCHES)
    in_a_loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)
    assert_same(list(plain.parameters()), list(model.parameters()))


def test_a_signal_is_served_as_the_call_of_one_graph_begins(tmp_path: Path) -> None:
    model = Net()
    call = compiled(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=BUDGET) as run:
        run.save_on_sigterm(tmp_path)
        in_a_loop(call, optimizer, 1)
        signal.raise_signal(signal.SIGTERM)
        in_a_loop(call, optimizer, 1)  # the step that was under way
        with pytest.raises(SystemExit):
            in_a_loop(call, optimizer, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


DYNAMO = "torch._dynamo"
MODULES = f"{DYNAMO}.variables.nn_module.UnspecializedNNModuleVariable"
NAMES = [f"{DYNAMO}.reset_code_caches", f"{DYNAMO}.exc.Unsupported", MODULES, f"{MODULES}.call_function"]


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_whose_dynamo_is_another_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = Net(), Net()
    following._refusal_type.cache_clear()
    with monkeypatch.context() as other:
        other.delattr(name)
        refused = pytest.raises(MissingDependency, match=rf"{name.rpartition('.')[2]}.*pip install")
        with refused, hydra_ext.offload(model, budget=BUDGET):
            pass
    assert_same(train(plain, plain), train(model, model))
    with hydra_ext.offload(model, budget=BUDGET) as run:  # nothing is left of the other one
        assert_same(train(plain, plain), train(model, compiled(model)))
        assert run.report().windows >= 4


def test_dynamo_is_as_before() -> None:
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    before = UnspecializedNNModuleVariable.call_function
    first, second = Net(), Net()
    with hydra_ext.offload(first, budget=BUDGET):
        with hydra_ext.offload(second, budget=BUDGET):
            assert UnspecializedNNModuleVariable.call_function is not before
        assert UnspecializedNNModuleVariable.call_function is not before
    assert UnspecializedNNModuleVariable.call_function is before


def test_module_compile_is_as_before() -> None:
    before = nn.Module.compile
    with hydra_ext.offload(Net(), budget=BUDGET):
        with hydra_ext.offload(Net(), budget=BUDGET):
            assert nn.Module.compile is not before
        assert nn.Module.compile is not before
    assert nn.Module.compile is before


@pytest.mark.parametrize("name", ["outer", "outer.first", "outer.first.layer", "part", "layer", "head"])
def test_a_part_compiled_inside_and_called_alone_opens_windows(name: str) -> None:
    plain, model = Net(), Net()
    found = {}
    for one in (plain, model):
        with hydra_ext.offload(one, budget=BUDGET, checks=POISONED) if one is model else nullcontext() as run:
            part = one.get_submodule(name)
            for _ in range(2):  # what it is compiled as the second time takes the place of the first
                part.compile(backend="eager")
                part(torch.ones(4, WIDTH)).pow(2).sum().backward()
            if run is not None:
                assert run.report().windows >= 4
                assert run.report().loads > 0
        found[one] = [parameter.grad for parameter in part.parameters()]
        part(torch.ones(4, WIDTH))
    assert_same(found[plain], found[model])
    assert not isinstance(vars(part)["_compiled_call_impl"], StandIn)  # of the model's, which came last
