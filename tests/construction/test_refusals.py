"""What cannot be built in parts says why, and nothing is left behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hydra_ext import errors
from hydra_ext.construction import fill, materialize
from support.construction.constructors import FromNumbers
from support.runtime.leaving import beside

pytestmark = pytest.mark.every_case

PARAMETER_NEW = nn.Parameter.__dict__["__new__"]
THERE_BEFORE = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Any:
    before = {name: value for name, value in vars(nn.init).items() if callable(value)}
    register = nn.Module.register_parameter
    yield
    assert nn.Parameter.__dict__["__new__"] is PARAMETER_NEW
    assert nn.Module.register_parameter is register
    assert {name: value for name, value in vars(nn.init).items() if callable(value)} == before
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


def with_view_attribute() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.rows = layer.weight.data.t()
    return nn.Sequential(layer, nn.Linear(3, 3))


def with_view_buffer() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_buffer("first_row", layer.weight.data[0])
    return nn.Sequential(layer, nn.Linear(3, 3))


def with_graph() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.doubled = layer.weight * 2
    return layer


def with_numpy_view() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.array = layer.weight.detach().numpy()
    return nn.Sequential(layer, nn.Linear(3, 3))


def with_overlap() -> nn.Module:
    data = torch.randn(6)
    return nn.ParameterList([nn.Parameter(data[:4]), nn.Parameter(data[2:])])


def with_hook() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 3)


def nested() -> nn.Module:
    return materialize(lambda: nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: nn.LazyLinear(3), errors.UnsupportedModel, "lazy"),
        (lambda: THERE_BEFORE, errors.UnsupportedModel, "was made before this call"),
        (lambda: nn.Linear(2, 2).state_dict(), errors.UnsupportedModel, "return a torch.nn.Module"),
        (on_meta, errors.UnsupportedModel, "on meta"),
        (with_view_attribute, errors.UnsupportedModel, "shares the memory of 0.weight"),
        (with_view_buffer, errors.UnsupportedModel, "shares the memory of 0.weight"),
        (with_numpy_view, errors.UnsupportedModel, "shares the memory of 0.weight"),
        (with_graph, errors.UnsupportedModel, "torch still uses weight"),
        (with_overlap, errors.UnsupportedModel, "0 and 1 are two parameters in the same memory"),
        (with_hook, errors.UnsupportedModel, "hooks"),
        (nested, errors.StateError, "inside the constructor"),
        (nn.Linear(2, 2), TypeError, "missing 1 required positional argument"),
        ("MyModel", errors.InvalidArgument, "build='MyModel'"),
    ],
)
def test_a_constructor_that_cannot_be_followed_is_refused(
    build: Callable[[], nn.Module], error: type[Exception], says: str
) -> None:
    state = torch.get_rng_state()
    with pytest.raises(error, match=says):
        materialize(build)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not parameter.is_meta for parameter in THERE_BEFORE.parameters())


@pytest.mark.parametrize("thrown", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_the_constructor_raises_comes_out_and_the_next_one_works(thrown: BaseException) -> None:
    def build() -> nn.Module:
        nn.Linear(4, 4)
        raise thrown

    with pytest.raises(type(thrown)):
        materialize(build)
    model = materialize(lambda: nn.Linear(4, 4))
    fill(model)
    assert not model.weight.is_meta


def test_tensors_of_a_constructor_that_failed_can_be_looked_at() -> None:
    held: list[Any] = []

    def build() -> nn.Module:
        held.extend(nn.Linear(300, 300) for _ in range(3))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        materialize(build)
    assert all(layer.weight.untyped_storage().nbytes() == 360000 for layer in held)


def test_tensors_of_a_run_that_was_repeated_can_be_looked_at() -> None:
    held: list[Any] = []

    def build() -> nn.Module:
        layers = [nn.Linear(30, 30) for _ in range(3)]
        held.append([layer.weight.detach() for layer in layers])
        held.append(float(layers[0].weight.detach().sum()))
        return nn.Sequential(nn.Linear(2, 2))

    materialize(build)
    runs = [each for each in held if isinstance(each, list)]
    assert len(runs) > 1, "it was not run again"
    assert all(weight.untyped_storage().nbytes() == 3600 for weights in runs for weight in weights)


class Changing:
    """A constructor that changes when it is told to."""

    def __init__(self, change: str) -> None:
        self.change = change
        self.calls = 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        change = self.change if self.calls > 1 else ""
        width = 5 if change == "shape" else 4
        layers: list[nn.Module] = [nn.Linear(4, width), nn.Linear(width, 2, dtype=torch.float32)]
        if change == "dtype":
            layers[1] = layers[1].to(torch.float64)
        if change == "more":
            layers.append(nn.Linear(2, 2))
        if change == "order":
            layers.reverse()
        if change == "numbers":
            torch.rand(1)
        return nn.Sequential(*layers)


@pytest.mark.parametrize("change", ["shape", "more", "order", "numbers"])
def test_a_constructor_that_makes_something_else_the_second_time_is_refused(change: str) -> None:
    model = materialize(Changing(change))
    with pytest.raises(errors.BuildDiffers, match="does not build the same model"):
        fill(model, ["0.weight"])
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_constructor_whose_dtype_differs_the_second_time_is_refused() -> None:
    model = materialize(Changing("dtype"))
    with pytest.raises(errors.BuildDiffers, match=r"1\.weight"):
        fill(model, ["1.weight"])


def test_names_and_models_that_are_not_known_are_refused_before_anything_is_filled() -> None:
    model = materialize(lambda: nn.Linear(3, 3))
    with pytest.raises(errors.InvalidArgument, match="no parameter 'wieght'"):
        fill(model, ["bias", "wieght"])
    with pytest.raises(errors.InvalidArgument, match="a collection of names"):
        fill(model, "weight")
    with pytest.raises(errors.InvalidDevice, match="nowhere"):
        fill(model, ["weight"], device="nowhere")
    with pytest.raises(errors.InvalidDevice, match="no memory on meta"):
        fill(model, ["weight"], device="meta")
    with pytest.raises(errors.StateError, match="did not return"):
        fill(copy.deepcopy(model), ["weight"])
    assert model.weight.is_meta
    assert model.bias.is_meta


def test_a_model_whose_dtype_or_parameters_were_changed_is_refused() -> None:
    model = materialize(lambda: nn.Linear(3, 3)).to(torch.bfloat16)
    with pytest.raises(errors.ModelChanged, match=r"inside it"):
        fill(model)
    model = materialize(lambda: nn.Linear(3, 3))
    model.extra = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(errors.ModelChanged, match="extra"):
        fill(model, ["weight", "extra"])
    assert model.weight.is_meta


def test_hooks_on_a_parameter_without_memory_are_not_lost_silently() -> None:
    model = materialize(lambda: nn.Linear(3, 3))
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(errors.UnsupportedModel, match="once it has memory"):
        fill(model)


def test_other_threads_make_their_parameters_undisturbed_and_wait_with_their_models() -> None:
    inside, made, go_on = threading.Event(), threading.Event(), threading.Event()
    others: list[Any] = []

    def slow() -> nn.Module:
        layer = nn.Linear(3, 3)
        inside.set()
        assert go_on.wait(60)
        return nn.Sequential(layer, nn.Linear(3, 3))

    def other() -> None:
        assert inside.wait(60)
        first = nn.LayerNorm(2500)  # nothing random: all threads share torch's generator
        second = nn.LayerNorm(2500)
        others.append((first, second))
        made.set()
        others.append(materialize(lambda: nn.LayerNorm(2)))

    models: list[nn.Module] = []
    with beside(other), beside(lambda: models.append(materialize(slow)), until=go_on):
        assert made.wait(60)
        assert len(others) == 1
        first, second = others[0]
        assert first.weight.untyped_storage().nbytes() == second.weight.untyped_storage().nbytes() == 10000
    fill(models[0])
    fill(others[1])


def test_reading_the_memory_past_torch_gives_the_right_numbers() -> None:
    seen: list[list[Any]] = []

    def build() -> nn.Module:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        arrays = first.bias.detach().numpy(), np.asarray(second.bias.data)
        seen.append([first.weight.tolist(), *(array.tolist() for array in arrays)])
        assert first.weight.data_ptr() not in (0, second.weight.data_ptr())
        return nn.Sequential(first, second)

    torch.manual_seed(1)
    expected = build()
    torch.manual_seed(1)
    fill(materialize(build), ["0.bias"])
    assert len(seen) >= 3
    assert all(each == seen[0] for each in seen)
    assert seen[0][0] == expected[0].weight.tolist()


def test_what_a_part_that_was_not_asked_for_decides_is_right() -> None:
    torch.manual_seed(2)
    expected = FromNumbers()
    torch.manual_seed(2)
    model = materialize(FromNumbers)
    fill(model, ["third.weight"])
    assert torch.equal(model.third.weight, expected.third.weight)
    assert torch.equal(model.norm, expected.norm)


def test_a_model_that_is_dropped_takes_its_recipe_along() -> None:
    import gc
    import weakref

    class Token:
        pass

    token = Token()
    gone = weakref.ref(token)
    model = materialize(lambda token=token: nn.Linear(2, 2))
    del token
    assert gone() is not None
    del model
    gc.collect()
    assert gone() is None
