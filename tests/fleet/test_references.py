"""Functions as names: what a job holds of them, and what cannot be named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydra_ext.errors import InvalidJob
from hydra_ext.fleet import references
from support.fleet import trainings

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN | st.sampled_from([torch.float32, torch.bfloat16]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_what_is_bound_comes_back(first: Any, second: Any) -> None:
    described = references.describe(partial(trainings.batches, first, steps=second), "data")
    found = references.resolve(described)
    assert (found.func, found.args, found.keywords) == (trainings.batches, (first,), {"steps": second})


def test_functions_of_partials_and_classes_come_back() -> None:
    inner = partial(trainings.mishap, what="raise")
    found = references.resolve(references.describe(partial(trainings.job, "a", loss=inner), "loss"))
    assert found.keywords["loss"].func is trainings.mishap
    assert references.resolve(references.describe(torch.optim.AdamW, "optimizer")) is torch.optim.AdamW


class Colour(str, Enum):
    RED = "red"


def inside() -> Callable[[], None]:
    def function() -> None: ...

    return function


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: None, "other processes cannot find by its name"),
        (inside(), "other processes cannot find by its name"),
        (trainings.Stream(3), "is a Stream, which a worker cannot make again"),
        (partial(trainings.batches, torch.ones(1)), "is a Tensor, which a worker cannot make again"),
        (partial(trainings.batches, {1: 2}), "a key that is not a text"),
        (trainings.Stream(3).__iter__, "where something else is found"),
        (partial(trainings.batches, Colour.RED), "is a Colour, which a worker cannot make again"),
    ],
)
@pytest.mark.every_case
def test_what_has_no_name_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        references.describe(value, "job 'a': data")


def test_a_name_that_is_gone_is_told() -> None:
    with pytest.raises(InvalidJob, match="has no gone any more"):
        references.resolve({"module": "support.fleet.trainings", "name": "gone"})
    with pytest.raises(InvalidJob, match="cannot be imported here"):
        references.resolve({"module": "support.fleet.none", "name": "gone"})


def test_only_numbers_that_are_not_whole_may_differ_in_jobs_that_run_alike() -> None:
    first, second = (references.describe(partial(torch.optim.SGD, lr=lr, foreach=False), "") for lr in (0.1, 0.2))
    assert references.shape_of(first) == references.shape_of(second)
    other = references.describe(partial(torch.optim.SGD, lr=0.1, foreach=True), "")
    assert references.shape_of(other) != references.shape_of(first)


PROGRAM = """
import torch, hydra_ext
from torch import nn

def model(): return nn.Linear(4, 2)
def data(): return [[torch.randn(3, 4)]]
def loss(net, batch): return net(batch).square().mean()

jobs = [hydra_ext.Job("a", model=model, optimizer=torch.optim.Adam, data=data, loss=loss, steps=2)]
{guard}print(hydra_ext.Fleet("fleet", devices=1, budget="1MiB").run(jobs, techniques=["plain"])["a"].is_done)
"""


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__': "])
@pytest.mark.every_case
def test_a_program_may_define_the_functions_if_it_guards_the_call(guard: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(PROGRAM.format(guard=guard))
    done = subprocess.run([sys.executable, "sweep.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if guard:
        assert done.stdout == "True\n", done.stderr
    else:
        assert "call run() below if __name__ == '__main__':" in done.stderr
