"""With recompute=True, a microbatch's second forward starts from what the first one started from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydra_ext.errors import StateError
from hydra_ext.pipeline.stages.kept import twice
from support.plain import given_twice
from support.ranks import run_ranks


@pytest.mark.full
def test_neither_the_forward_nor_the_data_loader_changes_what_is_run_again(tmp_path: Path) -> None:
    for found in run_ranks(given_twice.weights, folder=tmp_path):
        plain = found.pop("")
        for kind, weights in found.items():
            for index, (weight, expected) in enumerate(zip(weights, plain, strict=True)):
                assert torch.equal(weight, expected), f"{kind}: weight {index}"


def test_tensors_that_require_gradients_get_them(tmp_path: Path) -> None:
    (first, error), _ = run_ranks(given_twice.gradients, False, folder=tmp_path)
    assert all(first)
    assert not error


def test_and_may_not_be_written_to_before(tmp_path: Path) -> None:
    for _, error in run_ranks(given_twice.gradients, True, folder=tmp_path):
        assert "was written to before its forward was run again" in error


def test_what_shares_memory_with_a_tensor_that_wants_a_gradient_is_no_copy() -> None:
    x = torch.ones(4, requires_grad=True)
    y = torch.zeros(4)
    given = twice({"x": x, "y": y, "same": y, "half": x.detach()[2:]})
    first = next(given)
    first["y"].fill_(1)
    second = next(given)
    assert second["x"] is x
    assert second["half"] is first["half"]
    assert second["same"] is second["y"]
    assert second["y"].tolist() == [0, 0, 0, 0]
    given = twice({"x": x, "half": x.detach()[2:]})
    next(given)["half"].fill_(2)
    with pytest.raises(StateError, match="was written to before its forward was run again"):
        next(given)
