"""What a step leaves in the process and on the modules is what a loop would: random states, attributes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks

WIDTH = 32
ROOMY = 2**20


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 + index, WIDTH, generator=generator) for index in range(3)]


class Blocks(nn.Module):
    """Keeps the size of the last batch; only the first batch runs the first block, so that its backward ends last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.last = 0

    def forward(self, x: Tensor) -> Tensor:
        self.last = len(x)
        y: Tensor = self.blocks(self.first(x) if len(x) == 2 else x)
        return y


class Averages(Blocks):
    """Sets an attribute twice in a call, each time from what was there: no round can be equal to that."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 1.0
        y: Tensor = self.blocks(x)
        self.average = 0.5 * self.average + float(y.detach().mean())
        return torch.dropout(self.blocks[0](y), 0.5, True) * (1 + self.average)


def steps_of(model: Blocks, check: Callable[[hydra_ext.Run], None], *, recompute: bool | None = None) -> hydra_ext.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True)) as run:
        for _ in range(3):
            run.step(batches(), lambda x: model(x).pow(2).mean(), seeds=[1, 2, 3], round_size=3, recompute=recompute)
            check(run)
        return run


@pytest.mark.parametrize("recompute", [False, True])
def test_attributes_are_those_of_the_last_microbatch_though_another_one_ran_longer(recompute: bool) -> None:
    model = Blocks()
    seen: list[int] = []
    run = steps_of(model, lambda _: seen.append(model.last), recompute=recompute)
    assert seen == [4, 4, 4]
    assert (run.report().refusals, run.report().fallbacks) == (0, 0)


@pytest.mark.parametrize("kind", [Blocks, Averages])
def test_random_states_are_as_before_a_step_with_seeds(kind: type[Blocks]) -> None:
    before = torch.get_rng_state()
    seen: list[bool] = []
    torch.manual_seed(5)
    wanted = torch.get_rng_state()
    model = kind()
    torch.manual_seed(5)
    run = steps_of(model, lambda _: seen.append(torch.equal(torch.get_rng_state(), wanted)), recompute=False)
    torch.set_rng_state(before)
    assert seen == [True, True, True]
    assert run.report().fallbacks == (9 if kind is Averages else 0)


class Around(Blocks):
    """Writes between its blocks, where microbatches take turns: rounds watch that."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.hooks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        self.hooks.append(len(self._forward_pre_hooks))
        return x


def test_no_hook_of_a_round_stays_on_a_module() -> None:
    model = Around()
    left: list[int] = []

    def count(_run: hydra_ext.Run) -> None:
        left.extend(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    steps_of(model, count)
    assert max(model.hooks) > 0
    assert not any(left)


def test_hooks_on_accumulated_gradients_refuse_no_round_of_what_can_be_undone() -> None:
    """A whole step could not be: what the hooks did would be done twice. A round could."""
    model = Around()
    calls: list[None] = []
    model.blocks[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hydra_ext.offload(model, optimizer, budget=ROOMY, activations=None) as run:
        for _ in range(3):
            run.step(batches(), lambda x: model(x).pow(2).mean(), seeds=[1, 2, 3])
    assert calls
    assert (run.report().refusals, run.report().fallbacks) == (0, 0)
    assert run.report().rounds < 9
