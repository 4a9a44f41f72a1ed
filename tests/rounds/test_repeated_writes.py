"""A module that is called again in backward leaves parameters as its first call has left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import UnsupportedModel

WIDTH, STEPS, MICROBATCHES = 16, 3, 2
ROOMY = 2**21


def in_place(shadow: Tensor, weight: Tensor) -> None:
    shadow.lerp_(weight, 0.5)


def in_data(shadow: Tensor, weight: Tensor) -> None:
    shadow.data.lerp_(weight.data, 0.5)


def replaced(shadow: Tensor, weight: Tensor) -> None:
    shadow.data = shadow * 0.5 + weight * 0.5


class Averaged(nn.Module):
    """Keeps an average of its weight, which its outputs do not show."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shadow = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        self.write = write
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.of(self)
        with torch.no_grad():
            self.write(self.shadow, self.linear.weight)
        return torch.tanh(self.linear(x))


class Shown(Averaged):
    """Its outputs do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) @ self.shadow)


COUNTED = [0]


class Calls:
    """Counts calls where neither an undo nor a repetition sees it."""

    __slots__ = ()

    def of(self, _module: nn.Module) -> None:
        COUNTED[0] += 1


def steps() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, WIDTH, generator=generator) for _ in range(MICROBATCHES)] for _ in range(STEPS)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def made(layer: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), layer(), nn.Linear(WIDTH, 4))
    return model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def in_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for inputs in steps():
        for x in inputs:
            (loss_of(model, x) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


WRITES = pytest.mark.parametrize("write", [in_place, in_data, replaced])


@WRITES
@pytest.mark.parametrize("kind", [Averaged, Shown])
@pytest.mark.parametrize(
    "choices",
    [{"recompute": True}, {"recompute": True, "round_size": 1}, {"recompute": True, "round_size": 2}],
    ids=str,
)
@pytest.mark.parametrize("activations", ["auto", None])
def test_blocks_that_rounds_recompute(
    activations: Any, choices: dict[str, Any], kind: type[Averaged], write: Callable[[Tensor, Tensor], None]
) -> None:
    expected = in_a_loop(*made(lambda: kind(write)))
    model, optimizer = made(lambda: kind(write))
    COUNTED[0] = 0
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=[*model], activations=activations) as run:
        for inputs in steps():
            run.step(inputs, lambda x: loss_of(model, x), **choices)
    assert_same([*model.state_dict().values()], expected)
    assert COUNTED[0] > 2 * MICROBATCHES * STEPS  # some were called again


@WRITES
@pytest.mark.parametrize("rounds", [False, True])
def test_modules_with_the_policy(rounds: bool, write: Callable[[Tensor, Tensor], None]) -> None:
    expected = in_a_loop(*made(lambda: Averaged(write)))
    model, optimizer = made(lambda: Averaged(write))
    policy = {"0": hydra_ext.Recompute(), "1": hydra_ext.Recompute()}
    with hydra_ext.offload(model, optimizer, budget=ROOMY, blocks=[*model], activations=policy) as run:
        if rounds:
            for inputs in steps():
                run.step(inputs, lambda x: loss_of(model, x))
        else:
            in_a_loop(model, optimizer)
        activations = run.report().activations
    assert_same([*model.state_dict().values()], expected)
    assert activations is not None
    assert activations.recomputed > 0


@WRITES
def test_without_offload_a_write_that_cannot_be_undone_is_refused(write: Callable[[Tensor, Tensor], None]) -> None:
    model, _ = made(lambda: Averaged(write))
    with (
        pytest.raises(UnsupportedModel, match="writes to its inputs, or to its parameters"),
        hydra_ext.stash({"0": hydra_ext.Recompute()}, model=model),
    ):
        loss_of(model, steps()[0][0])


class Follows(nn.Module):
    """Updates a parameter of its blocks when their calls have ended. No graph saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Averaged(lambda _shadow, _weight: None) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            for block in self.blocks:
                block.shadow.lerp_(block.linear.weight, 0.5)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("activations", ["policy", "rounds"])
def test_parameters_that_no_graph_saves_may_change_after_the_call(activations: str) -> None:
    def follows() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Follows()
        return model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)

    expected = in_a_loop(*follows())
    model, optimizer = follows()
    policy: Any = {"blocks.*": hydra_ext.Recompute()} if activations == "policy" else None
    COUNTED[0] = 0
    blocks = [f"blocks.{index}" for index in range(3)]
    with hydra_ext.offload(model, optimizer, budget=ROOMY, activations=policy, blocks=blocks) as run:
        for inputs in steps():
            run.step(inputs, lambda x: loss_of(model, x), recompute=True if policy is None else None)
    assert_same([*model.state_dict().values()], expected)
    assert COUNTED[0] > 3 * MICROBATCHES * STEPS
