"""Figures by part of a model, and what its parts are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.activations.parts import parts_of
from support.models.zoo import FAMILIES
from support.stash.stashed import gradients


class Block(nn.Module):
    def __init__(self, *, shortcut: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.shortcut = nn.Sequential(nn.Linear(64, 64), nn.Tanh()) if shortcut else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x) + self.shortcut(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    stages = [nn.Sequential(Block(shortcut=True), Block(shortcut=False)) for _ in range(2)]
    return nn.Sequential(nn.Linear(64, 64), *stages, nn.Sigmoid())


def test_parts_are_the_layers_of_lists_and_what_stands_beside() -> None:
    assert [name for name, _ in parts_of(net())] == ["0", "1.0", "1.1", "2.0", "2.1", "3"]
    assert [name for name, _ in parts_of(nn.Linear(2, 2))] == [""]
    names = [name for name, _ in parts_of(FAMILIES["gpt2"].make(seed=1))]
    assert names[:2] == ["transformer.wte", "transformer.wpe"]
    assert [name for name in names if ".h." in name] == [f"transformer.h.{number}" for number in range(len(names) - 5)]
    assert names[-2:] == ["transformer.ln_f", "lm_head"]


@pytest.mark.parametrize("policy", [hydra_ext.Offload(), hydra_ext.Keep(), hydra_ext.Compress(error=0.01)])
def test_every_byte_is_counted_for_one_part(policy: hydra_ext.Offload | hydra_ext.Keep | hydra_ext.Compress) -> None:
    model, x = net(), torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    stash = hydra_ext.stash(policy, model=model, device="simulated")
    for _ in range(2):
        gradients(model, lambda: model(x).square().sum(), stash)
    report = stash.report()
    outside = [""] if policy == hydra_ext.Keep() else []  # what is squared is what the last one has saved
    assert [part.name for part in report.parts] == [*outside, "0", "1.0", "1.1", "2.0", "2.1", "3"]
    assert report.saved_bytes == sum(part.stayed + part.moved + part.compressed for part in report.parts)
    assert report.compressed_bytes == sum(part.compressed for part in report.parts)
    assert report.stream_bytes == sum(part.stored for part in report.parts)
    if policy == hydra_ext.Keep():
        # What it takes in, twice with a shortcut, a tanh's and a ReLU's output, for each of two steps.
        assert [part.kept // (2 * x.nbytes) for part in report.parts] == [1, 1, 4, 2, 4, 2, 1]
    if policy == hydra_ext.Compress(error=0.01):
        assert all(part.ratio > 2 for part in report.parts if part.name in ("1.0", "2.1"))


def test_what_is_compiled_as_a_whole_has_no_parts() -> None:
    model, x = net(), torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    expected = gradients(model, lambda: model(x).square().sum())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    policies = {"": hydra_ext.Offload(), "1": hydra_ext.Keep()}
    stash = hydra_ext.stash(policies, model=model, device="simulated")
    found = gradients(model, lambda: compiled(x).square().sum(), stash)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    report = stash.report()
    assert (report.intervals, [part.name for part in report.parts]) == (0, [""])  # no module's hook has run
