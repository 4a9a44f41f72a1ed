"""Policies of single modules beside a plan for the rest: they are kept to, and the bits are those of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, Compress, Keep, Offload, Recompute, SimulatedDevice
from hydra_ext.activations.report import PartReport
from hydra_ext.errors import InvalidArgument, UnsupportedModel
from hydra_ext.runtime.fit import Rung
from support.runtime.fitted import Found, Program, both
from support.runtime.layered import ROWS, WIDTH, Layered, data, loss_of

LAYERS = 4
TIGHT, MIDDLE, AMPLE = 450_000, 1_200_000, 2**24  # all that one forward saves takes 2 MiB
CRAWLING = SimulatedDevice(to_device_bytes_per_second=5e6, to_host_bytes_per_second=5e6)


class Layer(nn.Module):
    """Saves much more inside than it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(x))))


class Net(Layered):
    def __init__(self) -> None:
        super().__init__(Layer() for _ in range(LAYERS))


def in_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
    return left


def in_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Steps of two microbatches, by ``run.step`` where the model is offloaded."""
    run, left = model.__dict__.get("_hydra_ext_context"), []
    for step in range(4):
        batches = data(8)[2 * step : 2 * step + 2]
        if run is not None:
            left += run.step(batches, lambda x: loss_of(model, x), seeds=[2 * step, 2 * step + 1]).losses
            continue
        for index, x in enumerate(batches):
            torch.manual_seed(2 * step + index)
            loss = loss_of(model, x)
            (loss / 2).backward()
            left.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return left


def parts(found: Found) -> dict[str, PartReport]:
    return {part.name: part for part in found.stash.parts}


# ---- what is given is kept to ---------------------------------------------------------------------------------------

EACH = {"": "auto", "layers.0": Keep(), "layers.1": Offload(), "layers.2": Recompute()}


def by_function(name: str, module: nn.Module) -> Any:
    return EACH.get(name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("program", [in_a_loop, in_steps])
def test_bits_are_equal_and_each_policy_is_followed(program: Program, seed: int) -> None:
    device = SimulatedDevice(asynchronous=True, seed=seed)
    found = both(Net, program, budget=MIDDLE, device=device, activations=by_function if seed else EACH)
    assert found.equal
    assert found.retries == 0
    again = found.planned.pop("layers.2")
    assert again in ("RECOMPUTE", "RECOMPUTE_OFFLOADED")
    given = {name: choice for name, choice in found.planned.items() if name.startswith(("layers.0", "layers.1"))}
    assert {(name[:8], choice) for name, choice in given.items()} == {("layers.0", "KEEP"), ("layers.1", "OFFLOAD")}
    calls = 4 if program is in_a_loop else 8
    assert found.second_calls == calls - 1  # not in the measured microbatch


@pytest.mark.cases(1)
@pytest.mark.parametrize("program", [in_a_loop, in_steps])
def test_what_is_to_leave_leaves_and_what_is_to_stay_stays(program: Program) -> None:
    """Where there is room for all, and where there is room for few."""
    roomy = both(Net, program, budget=AMPLE, activations={"": "auto", "layers.1": Offload()})
    assert roomy.equal
    assert parts(roomy)["layers.1"].stayed == 0
    others = [part for name, part in parts(roomy).items() if name != "layers.1"]
    assert sum(part.moved for part in others) <= sum(part.stayed for part in others)
    tight = both(Net, program, budget=MIDDLE, activations={"": "auto", "layers.0": Keep()})
    assert tight.equal
    first, *_ = parts(tight).values()
    measured = 1 / (4 if program is in_a_loop else 8)
    assert first.moved == measured * (first.moved + first.stayed)  # layers.0, of which the newest would stay otherwise


def test_what_is_to_stay_leaves_where_memory_is_short() -> None:
    """The first batch, which is measured, is small."""

    def growing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        left = []
        for rows, x in zip((4, 4, ROWS, ROWS), data(4), strict=True):
            loss = loss_of(model, x[:rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            left.append(loss.detach())
        return left

    found = both(Net, growing, budget=TIGHT, activations={"": "auto", "layers.*": Keep()})
    assert found.equal
    assert found.stash.stayed == 0
    assert sum(part.moved for part in parts(found).values()) > TIGHT


def test_a_budget_that_holds_no_plan_with_what_is_given_trains_without_it() -> None:
    found = both(Net, in_steps, budget=TIGHT, activations={"": "auto", "layers.*": Keep()})
    assert found.equal
    assert not found.planned


def test_a_module_inside_of_a_recomputed_one_is_called_again_with_it() -> None:
    policies = {"": "auto", "layers.0": Recompute(), "layers.0.up": Recompute(), "layers.0.act": Keep()}
    found = both(Net, in_a_loop, budget=MIDDLE, activations=policies)
    assert found.equal
    assert found.second_calls == 3
    assert not [name for name in found.planned if name.startswith("layers.0.")]


def test_what_is_given_is_followed_in_rounds_of_a_given_size() -> None:
    """Nothing is planned there."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget=AMPLE, device=SimulatedDevice(), activations=EACH) as run:
        for _ in range(2):
            run.step(data(4), lambda x: loss_of(model, x), round_size=2)
        report = run.report().activations
    assert report is not None
    assert report.recomputed == 8
    stayed = {part.name: part.stayed > 0 for part in report.parts if part.name.startswith("layers")}
    assert stayed == {"layers.0": True, "layers.1": False, "layers.2": True, "layers.3": True}  # 2: what it takes


class Flat(nn.Sequential):
    """Its children are grouped where a plan recomputes."""

    def __init__(self) -> None:
        super().__init__(*(module for _ in range(LAYERS) for module in Layer().children()), nn.Linear(WIDTH, 8))


@pytest.mark.full
def test_children_with_policies_are_in_no_group() -> None:
    policies = {"": "auto", "1": Keep(), "9": Recompute()}
    found = both(Flat, in_steps, budget=MIDDLE, device=CRAWLING, activations=policies)
    assert found.equal
    assert found.planned["1"] == "KEEP"
    assert found.planned["9"].startswith("RECOMPUTE")
    assert any(":" in name and choice.startswith("RECOMPUTE") for name, choice in found.planned.items())


CALLS: list[int] = []


class Counting(Layer):
    """Gives other numbers in each call."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(0)
        return super().forward(x * len(CALLS))


def test_a_given_module_that_cannot_be_called_again_raises() -> None:
    CALLS.clear()

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = Counting()

    with pytest.raises(UnsupportedModel, match="Counting"):
        both(Odd, in_a_loop, budget=MIDDLE, activations={"": "auto", "layers.1": Recompute()})


# ---- leave to compress ----------------------------------------------------------------------------------------------

BOUND = 0.05
ALLOWED = "layers.[12]"


def gradients(activations: Any, steps: int = 3, budget: int = MIDDLE) -> tuple[list[dict[str, Tensor]], Any, Any]:
    """Of each step, without any update."""
    torch.manual_seed(0)
    model = Net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    left = []
    with hydra_ext.offload(
        model, optimizer, budget=budget, device=CRAWLING, activations=activations, checks=Checks(poison_hosts=True)
    ) as run:
        torch.manual_seed(1)
        for x in data(steps):
            loss_of(model, x).backward()
            run.sync()
            left.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        report = run.report().activations
        fit = run.fit
    return left, report, fit


def test_a_plan_compresses_within_the_bound_where_it_may_and_nowhere_else() -> None:
    exact, _, _ = gradients("auto")
    found, report, fit = gradients({"": "auto", ALLOWED: Compress(error=BOUND)})
    assert fit.applied.compressed
    assert all(name.startswith(("layers.1", "layers.2")) for name in fit.applied.compressed)
    assert report.compressed > 0
    compressed = {part.name for part in report.parts if part.compressed}
    assert compressed == {"layers.1", "layers.2"}
    assert {layer.weight.rpartition(".")[0] for layer in report.layers if layer.saved_bytes} <= {
        f"layers.{number}.{name}" for number in (1, 2) for name in ("up", "down")
    }
    sums = sums_of_output_gradients()
    inexact = set()
    for given, plain, of_outputs in zip(found, exact, sums, strict=True):
        for name, gradient in plain.items():
            if torch.equal(given[name], gradient):
                continue
            inexact.add(name)
            worst = BOUND * of_outputs[name][:, None] + 1e-6
            assert ((given[name] - gradient).abs() <= worst).all(), name
    assert inexact
    assert all(name.startswith(("layers.1", "layers.2")) and name.endswith("weight") for name in inexact)


def sums_of_output_gradients() -> list[dict[str, Tensor]]:
    """For each step and weight, the absolute gradients of its layer's output, summed over rows."""
    torch.manual_seed(0)
    model = Net().train()
    sums: list[dict[str, Tensor]] = []

    def watch(name: str, output: Tensor) -> None:
        output.register_hook(lambda given: sums[-1].update({name: given.abs().sum(0)}))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output, name=name: watch(f"{name}.weight", output))
    torch.manual_seed(1)
    for x in data(3):
        sums.append({})
        loss_of(model, x).backward()
    return sums


def test_a_plan_with_room_compresses_nothing_after_the_measured_microbatch() -> None:
    _, report, fit = gradients({"": "auto", ALLOWED: Compress(error=BOUND)}, budget=AMPLE)
    assert fit.applied.compressed == []
    _, measured, _ = gradients({"": "auto", ALLOWED: Compress(error=BOUND)}, steps=1, budget=AMPLE)
    assert report.compressed == measured.compressed > 0


@pytest.mark.full
def test_an_adaptive_bound_is_known_before_a_plan_is_made() -> None:
    _, report, fit = gradients({"": "auto", "layers.*": Compress()}, steps=4)
    assert fit.applied.compressed
    assert any(layer.saved_bytes for layer in report.layers)
    _, report, fit = gradients({"": "auto", "layers.*": Compress()}, steps=1)
    assert fit._steps.rung is Rung.MEASURED


# ---- contradictions -------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ({"layers.0": "auto"}, "only the whole model can be planned"),
        ({"": "auto", "layers.0": "auto"}, "only the whole model can be planned"),
        ({"": "auto", "absent.*": Keep()}, "no module of Net has a name that matches 'absent"),
        ({"": "auto", "*": Keep()}, "also matches the whole model"),
        ({"": "auto", "head": 3}, "the policy of 'head' is a int"),
        ({"": "auto", "head": Offload("dynamic")}, "for a whole model"),
        ({"": "auto", "head": Offload("conv")}, "chooses what leaves as 'auto' does"),
        (lambda name, _: "auto" if name == "head" else None, "only the whole model can be planned"),
    ],
)
def test_contradictions_are_refused(activations: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        hydra_ext.offload(Net(), budget=AMPLE, device="simulated", activations=activations)
