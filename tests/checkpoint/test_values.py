"""Values as JSON: what was given comes back, type by type, and nothing else does."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_ext.checkpoint.format.values import BadValue, Encoder, decode
from hydra_ext.errors import UnsupportedState

pytestmark = pytest.mark.every_case

TENSOR = torch.arange(3)
VALUES: list[Any] = [
    None,
    True,
    -7,
    2.5,
    float("inf"),
    float("-inf"),
    "text",
    [],
    (1, (2.5, [3])),
    {"a": {"b": (1,)}},
    {1: "one", (2, 3): "two"},
    {"$": "the mark itself"},
    Counter({"a": 2, "b": 0}),
    torch.bfloat16,
    [TENSOR, {"deep": TENSOR}],
    ({1: TENSOR, (2, 3.5): [TENSOR]}, Counter({"a": TENSOR})),
]


def there_and_back(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    tensors: dict[str, Tensor] = {entry.name: entry.fetch() for entry in encoder.entries}
    return decode(json.loads(text), tensors.__getitem__, "value")


def shape(value: Any) -> Any:
    """The value with the types of all that is in it."""
    if isinstance(value, dict):
        return type(value), [(shape(key), shape(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape(each) for each in value]
    return type(value), value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_was_given_comes_back(value: Any) -> None:
    assert shape(there_and_back(value)) == shape(value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: [None, value],
        lambda value: {"a": value},
        lambda value: {"$": "tuple", "items": [None, value]},
        lambda value: {"$": "dict", "items": [[1, value]]},
    ],
)
def test_a_tensor_of_another_place_is_refused(wrap: Any) -> None:
    value = wrap({"$": "tensor", "name": "value/b"})
    with pytest.raises(BadValue, match="'value/b', which belongs elsewhere"):
        decode(value, lambda _: TENSOR, "value")
    decode(value, lambda _: TENSOR)


def test_no_number_stays_one() -> None:
    back = there_and_back(float("nan"))
    assert isinstance(back, float)
    assert math.isnan(back)


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": value}, lambda value: {1: value}])
def test_what_is_nested_too_deeply_is_refused_when_it_is_given(wrap: Any) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = wrap(value)
        return value

    deepest = next(depth for depth in range(1, 10_000) if not is_taken(nested(depth + 1)))
    assert shape(there_and_back(nested(deepest))) == shape(nested(deepest))
    with pytest.raises(UnsupportedState, match="nested too deeply"):
        Encoder().encode(nested(deepest + 1), "value")


def is_taken(value: Any) -> bool:
    try:
        Encoder().encode(value, "value")
    except UnsupportedState:
        return False
    return True


@pytest.mark.parametrize(
    "value",
    [
        {"$": "float", "name": "1.0"},
        {"$": "float", "name": "infinity"},
        {"$": "dtype", "name": "Tensor"},
        {"$": "dtype"},
        {"$": "tensor", "name": "not there"},
        {"$": "tensor", "name": 1},
        {"$": "tuple", "items": {}},
        {"$": "tuple", "items": "ab"},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "counter", "items": 1},
        {"$": "set", "items": []},
        {"$": None},
    ],
    ids=repr,
)
def test_what_no_encoder_makes_is_refused(value: Any) -> None:
    def none(name: str) -> Tensor:
        raise KeyError(name)

    for inside in (value, [value], {"a": value}, {"$": "tuple", "items": [value]}):
        with pytest.raises(BadValue):
            decode(inside, none)
