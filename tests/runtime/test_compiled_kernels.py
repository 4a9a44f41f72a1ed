"""Graphs of torch.compile's own backend, whose kernels read weights where they are: each block becomes one.

The plain model is compiled as a whole, which fuses more. So its numbers are near, not equal; those of a run with room
for all weights are equal, since its graphs are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

import hydra_ext
from hydra_ext.errors import StateError
from support.benches import assert_same, tight_budget
from support.runtime.outcomes import POISONED
from support.windows.window_subjects import batch, language_loss, tiny_gpt2

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS = 4
Compiled = tuple[nn.Module, Callable[..., Any]]  # what offload gets, and what is called


def in_place(model: nn.Module) -> Compiled:
    model.compile()
    return model, model


def before(model: nn.Module) -> Compiled:
    return model, torch.compile(model)


def given(model: nn.Module) -> Compiled:
    compiled: Any = torch.compile(model)
    return compiled, compiled


FORMS = {"before": before, "in place": in_place, "given": given}


@pytest.fixture(autouse=True)
def _nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled in this process, and their files are gone afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # the backend's


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x))


class Net(nn.Module):
    """Three blocks whose code is the same, so that it is compiled quickly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@dataclass(frozen=True)
class Subject:
    make: Callable[[], nn.Module]
    loss: Callable[[Any, int], torch.Tensor]
    budget: int
    blocks: list[str] | None = None


SUBJECTS = {
    "net": Subject(
        Net, lambda call, index: call(torch.full((4, 64), 0.1 * index)), 3 * 2**14, [f"blocks.{i}" for i in range(3)]
    ),
    "gpt2": Subject(
        tiny_gpt2,
        lambda call, index: call(batch(index), labels=batch(index), use_cache=False).loss,
        tight_budget(tiny_gpt2(), language_loss),
    ),
}


def trained(
    subject: Subject, form: str, budget: int, *, rounds: bool
) -> tuple[list[torch.Tensor], hydra_ext.Report, list[int]]:
    """Losses and weights; the report; and the graphs that there were after each step."""
    torch._dynamo.reset()
    counters.clear()
    model = subject.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offloaded, call = FORMS[form](model)
    prefix = "_orig_mod." if offloaded is not model else ""
    blocks = None if subject.blocks is None else [prefix + name for name in subject.blocks]
    losses, graphs = [], []
    with hydra_ext.offload(offloaded, optimizer, budget=budget, blocks=blocks, checks=POISONED) as run:
        for step in range(STEPS):
            indices = [2 * step, 2 * step + 1]
            if rounds:
                losses += run.step(indices, lambda index: subject.loss(call, index), seeds=indices).losses
            else:
                for index in indices:
                    torch.manual_seed(index)
                    loss = subject.loss(call, index)
                    (loss / 2).backward()
                    losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"])
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())], run.report(), graphs


@pytest.mark.parametrize(
    ("name", "form", "rounds"),
    [
        pytest.param(
            name, form, rounds, marks=[] if (name, form, rounds) == ("net", "given", True) else pytest.mark.full
        )
        for name in SUBJECTS
        for form in FORMS
        for rounds in (False, True)
    ],
)
def test_each_block_is_a_graph_and_none_is_compiled_again(name: str, form: str, rounds: bool) -> None:
    subject = SUBJECTS[name]
    found, report, graphs = trained(subject, form, subject.budget, rounds=rounds)
    assert report.evictions > 0
    assert (report.faults, report.fallbacks) == (0, 0)
    assert graphs[1] > 0
    assert len(set(graphs[1:])) == 1  # after the second step there are no new ones
    roomy, roomy_report, _ = trained(subject, form, 2**26, rounds=rounds)
    assert roomy_report.evictions == 0
    assert_same(roomy, found)


@pytest.mark.full
def test_the_numbers_are_near_those_of_the_model_as_it_is() -> None:
    expected = []
    for compiles in (False, True):
        model = tiny_gpt2().eval()
        subject, call = in_place(model) if compiles else (model, model)
        budget = tight_budget(tiny_gpt2(), language_loss)
        with hydra_ext.offload(subject, budget=budget, checks=POISONED), torch.no_grad():
            expected.append(call(batch(0)).logits.clone())
    torch.testing.assert_close(expected[1], expected[0], rtol=1e-4, atol=1e-5)


class Reads(nn.Module):
    """Its forward reads the weights of a part without a call of that part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.second.weight.sin()


def test_a_graph_that_reads_the_weights_of_another_module_is_told_without_frames() -> None:
    model = Reads()
    model.compile()
    with hydra_ext.offload(model, budget=3 * 2**13, activations=None) as run:
        with pytest.raises(StateError, match=r"a compiled graph reads 'second\.weight' outside of the call") as raised:
            model(torch.ones(2, 64))
        assert "frame #" not in str(raised.value)
        assert "\n" not in str(raised.value)
        assert not run.core.gate.open


def test_one_graph_of_several_blocks_is_refused_with_what_to_do() -> None:
    model = tiny_gpt2()
    model.compile(fullgraph=True)
    budget = tight_budget(tiny_gpt2(), language_loss)
    with (
        hydra_ext.offload(model, budget=budget) as run,
        pytest.raises(StateError, match="Leave fullgraph=True out, so that each block becomes a graph of its own"),
    ):
        model(batch(0))
    assert run.report().windows > 0
