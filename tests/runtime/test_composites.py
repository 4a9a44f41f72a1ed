"""Quantised weights move as their packed bytes, whatever they consist of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import AlreadyOffloaded, ModelChanged, UnsupportedModel
from hydra_ext.state.composites import inner_tensors
from support.benches import assert_same
from support.composites import KINDS, LAYERS, WIDTH, Packed, packed, quantised, trained_of
from support.runtime.outcomes import POISONED

PACKED_BYTES = WIDTH * WIDTH
BUDGET = 22 * PACKED_BYTES  # of 16 layers, with adapters, activations, and weights as they compute
Loop = Callable[[nn.Module, torch.optim.Optimizer, "hydra_ext.Run | None"], list[Tensor]]


def batches(step: int, width: int = WIDTH) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(2, width) for _ in range(4)]


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda batch: (model(batch) - 0.1).square().mean()


def in_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer, run: hydra_ext.Run | None) -> list[Tensor]:
    losses, width = [], model[0].down.in_features
    for step in range(2):
        for batch in batches(step, width):
            loss = loss_of(model)(batch)
            (loss / 4).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(batches(9, width)[0]))
    return losses


def in_rounds(**options: Any) -> Loop:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, run: hydra_ext.Run | None) -> list[Tensor]:
        if run is None:
            return in_a_loop(model, optimizer, run)
        losses: list[Tensor] = []
        for step in range(2):
            losses += [loss.detach().cpu() for loss in run.step(batches(step), loss_of(model), **options).losses]
        with torch.no_grad():
            losses.append(model(batches(9)[0]))
        report = run.report()
        assert report.rounds > 0
        assert report.refusals == report.fallbacks == 0
        return losses

    return steps


LOOPS: dict[str, Loop] = {
    "loop": in_a_loop,
    "rounds": in_rounds(round_size=4),
    "recomputed": in_rounds(round_size=2, recompute=True),
}


def outcome(kind: str, loop: Loop, **options: Any) -> list[Tensor]:
    model = quantised(kind)
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-2)
    if not options:
        return [*loop(model, optimizer, None), *trained_of(model)]
    frozen = [tensor for each in model.parameters() for tensor in inner_tensors(each).values()]
    frozen += [*model.buffers()]
    before = [(tensor, tensor.clone()) for tensor in frozen if not tensor.requires_grad]
    own = [*model.parameters(), *model.buffers()]
    with hydra_ext.offload(model, optimizer, checks=POISONED, **options) as run:
        found = loop(model, optimizer, run)
        report = run.report()
        assert report.evictions > 0
        assert report.faults == 0
        assert 0 < report.parameter_bytes < 1.6 * LAYERS * PACKED_BYTES  # beside adapters
        assert report.weights_moved_bytes >= 6 * PACKED_BYTES * LAYERS // 2
    assert all(one is other for one, other in zip(own, [*model.parameters(), *model.buffers()], strict=True))
    assert before
    assert all(torch.equal(tensor, copy) for tensor, copy in before)
    return [*found, *trained_of(model)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_have_the_bits_of_the_same_model_without_offload(kind: str, loop: str, seed: int) -> None:
    device = hydra_ext.SimulatedDevice(poison=True, asynchronous=True, seed=seed)
    assert_same(outcome(kind, LOOPS["loop"]), outcome(kind, LOOPS[loop], budget=BUDGET, device=device))


# Memory that attributes share, such as that of 8-bit weights of bitsandbytes, stays on the host.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "attributes"])
def test_quantised_weights_lie_on_the_disk(kind: str, tmp_path: Path) -> None:
    def loop(**options: Any) -> list[Tensor]:
        model = quantised(kind, width=256, layers=32)
        optimizer = hydra_ext.optim.AdamW(trained_of(model), lr=1e-2)
        if not options:
            return [*in_a_loop(model, optimizer, None), *trained_of(model)]
        with hydra_ext.offload(model, optimizer, budget="1MiB", spill_dir=tmp_path, checks=POISONED, **options) as run:
            found = in_a_loop(model, optimizer, run)
            assert run.report().disk_weight_bytes > 0
        return [*found, *trained_of(model)]

    assert_same(loop(), loop(host_budget="1500KiB"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_packed_bytes(kind: str, tmp_path: Path) -> None:
    model = quantised(kind)
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-2)
    with hydra_ext.offload(model, optimizer, budget=BUDGET, checks=POISONED) as run:
        in_a_loop(model, optimizer, run)
        saved = run.save(tmp_path)
        expected = in_a_loop(model, optimizer, run)
    of_weights = sum(tensor.nbytes for each in model.parameters() for tensor in inner_tensors(each).values())
    of_weights += sum(buffer.nbytes for buffer in model.buffers())
    of_state = 2 * sum(parameter.nbytes + 4 for parameter in trained_of(model))
    stored = sum(file.stat().st_size for file in saved.rglob("*.safetensors"))
    assert of_weights + of_state <= stored < of_weights + of_state + LAYERS * PACKED_BYTES // 2
    other = quantised(kind)
    with torch.no_grad():
        for tensor in (t for each in other.parameters() for t in inner_tensors(each).values()):
            tensor.zero_()
        for buffer in other.buffers():
            buffer.zero_()
    again = torch.optim.AdamW(trained_of(other), lr=1e-2)
    with hydra_ext.offload(other, again, budget=BUDGET, checks=POISONED) as run:
        assert run.load(tmp_path) is not None
        assert_same(expected, in_a_loop(other, again, run))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_inside_the_context_has_the_weights(kind: str) -> None:
    expected = quantised(kind).state_dict()
    model = quantised(kind)
    with hydra_ext.offload(model, budget=BUDGET, device=hydra_ext.SimulatedDevice(poison=True)):
        model(batches(0)[0])
        found = model.state_dict()
        assert list(found) == list(expected)
        for name, value in expected.items():
            mine = [*inner_tensors(nn.Parameter(found[name], requires_grad=False)).values()]
            theirs = [*inner_tensors(nn.Parameter(value, requires_grad=False)).values()]
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_attributes_that_users_give_to_quantised_weights_are_seen_inside() -> None:
    model = quantised("subclass")
    model[0].base.weight.label = "first"
    seen = []
    model[0].base.register_forward_pre_hook(lambda module, _: seen.append(module.weight.label))
    with hydra_ext.offload(model, budget=BUDGET):
        model(batches(0)[0])
    assert seen == ["first"]


def test_attributes_that_are_parameters_or_buffers_are_no_part_of_a_weight() -> None:
    def build() -> nn.Sequential:
        model = quantised("attributes")
        for layer in model:
            layer.base.weight.beside = model[0].up.weight  # is trained
            layer.base.weight.largest_seen = layer.base.weight.coding.largest
            layer.base.register_buffer("largest", layer.base.weight.coding.largest)
        return model

    plain, model = build(), build()
    expected = in_a_loop(plain, torch.optim.SGD(trained_of(plain), lr=0.1), None)
    optimizer = torch.optim.SGD(trained_of(model), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=BUDGET, checks=POISONED) as run:
        found = in_a_loop(model, optimizer, run)
        names = [name for block in run.layout.blocks for name, _ in block.parameters]
        assert "0.up.weight" in names
        assert not any("largest" in name or "beside" in name for name in names)
    assert_same([*expected, *trained_of(plain)], [*found, *trained_of(model)])


def test_a_weight_that_modules_share_moves_once() -> None:
    model = quantised("subclass")
    model[3].base.weight = model[1].base.weight
    expected = model(batches(0)[0])
    with torch.no_grad(), hydra_ext.offload(model, budget=BUDGET, checks=POISONED) as run:
        assert_same([expected.detach()], [model(batches(0)[0])])
        names = [name for block in run.layout.blocks for name, _ in block.parameters]
        assert names.count("1.base.weight.numbers") == 1
        assert "3.base.weight.numbers" not in names


def test_what_cannot_be_kept_exact_is_refused() -> None:
    model = quantised("subclass")
    with pytest.raises(UnsupportedModel, match=r"'0.base.weight' is quantised, and param_dtype=torch.bfloat16 would"):
        hydra_ext.offload(model, budget=BUDGET, param_dtype=torch.bfloat16)
    with hydra_ext.offload(model, budget=BUDGET), pytest.raises(AlreadyOffloaded, match=r"'0.base.weight' is inside"):
        hydra_ext.offload(nn.Sequential(model[0]), budget=BUDGET).__enter__()


def test_a_weight_that_is_unfrozen_inside_is_refused() -> None:
    model = quantised("subclass")
    with hydra_ext.offload(model, budget=BUDGET):
        model[2].base.weight.requires_grad_()
        with pytest.raises(ModelChanged, match=r"'2.base.weight' was frozen when the context was entered"):
            model(batches(0)[0])
        model[2].base.weight.requires_grad_(False)
        model(batches(0)[0])


def test_a_subclass_that_is_trained_is_refused() -> None:
    model = quantised("subclass")
    weight = packed(torch.ones(WIDTH, WIDTH))
    assert isinstance(weight, Packed)
    model[0].base.weight = weight.requires_grad_()
    with pytest.raises(UnsupportedModel, match=r"'0.base.weight' is a tensor subclass without plain storage"):
        hydra_ext.offload(model, budget=BUDGET)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "buffers"])
def test_a_plan_counts_packed_bytes(kind: str) -> None:
    model = quantised(kind)
    plan = hydra_ext.plan.fit(model, batches(0)[0], loss_of(model), budget=10 * BUDGET)
    packed_bytes = sum(tensor.nbytes for each in model.parameters() for tensor in inner_tensors(each).values())
    assert packed_bytes <= plan.host_bytes < 2 * packed_bytes


def test_parameters_of_other_classes_share_their_attributes() -> None:
    class Gained(nn.Parameter):
        pass

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Gained(torch.randn(WIDTH, WIDTH), requires_grad=False)
            self.weight.scale, self.weight.calls = torch.ones(WIDTH), 0
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: Tensor) -> Tensor:
            self.weight.calls += 1
            return self.up(given @ self.weight * self.weight.scale * self.weight.calls)

    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    with torch.no_grad(), hydra_ext.offload(model, budget=BUDGET):
        model(batches(0)[0])
        first = model(batches(0)[0])
        for layer in model:
            layer.weight.scale = 2 * layer.weight.scale
            layer.weight.calls = 1
        assert not torch.equal(first, model(batches(0)[0]))
    assert [layer.weight.calls for layer in model] == [2, 2, 2, 2]


def test_a_weight_that_is_given_other_tensors_inside_is_refused() -> None:
    model = quantised("subclass")
    with hydra_ext.offload(model, budget=BUDGET):
        weight = model[2].base.weight
        before, weight.scale = weight.scale, weight.scale * 3
        with pytest.raises(ModelChanged, match=r"'2.base.weight' was given other tensors or attributes inside"):
            model(batches(0)[0])
        weight.scale, weight.added = before, 1
        model(batches(0)[0])
    model = quantised("attributes")
    model[2].base.weight.bits = 4
    with hydra_ext.offload(model, budget=BUDGET):
        model[2].base.weight.bits = 8
        with pytest.raises(ModelChanged, match=r"'2.base.weight' was given other tensors or attributes inside"):
            model(batches(0)[0])
