"""Adapters over one frozen base in one ``run.step``: a base block is fetched once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import hydra_ext
from hydra_ext import Checks, SimulatedDevice

ADAPTERS, LAYERS, WIDTH, STEPS = 8, 6, 128, 3
RATES = [1e-2 / 2**adapter for adapter in range(ADAPTERS)]
# Activations of all adapters leave as many slots as those of one do: then all have one adapter's traffic.
BLOCK = 4 * (WIDTH * WIDTH + WIDTH + 8 * WIDTH * ADAPTERS)
BUDGET = 3 * BLOCK + 5 * 2**14


class Adapted(nn.Module):
    """A frozen layer, and a product of two small matrices for each adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(4, WIDTH) / 8) for _ in range(ADAPTERS)])
        self.up = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 4) / 8) for _ in range(ADAPTERS)])
        self.active = 0

    def forward(self, x: Tensor) -> Tensor:
        low = functional.linear(x, self.down[self.active])
        return torch.tanh(self.base(x) + functional.linear(low, self.up[self.active]))

    def choose(self, adapter: int) -> None:
        self.active = adapter

    def train_only(self, adapter: int) -> None:
        """Chooses the adapter as libraries of adapters do: the parameters of the others are not trained."""
        self.choose(adapter)
        for matrices in (self.down, self.up):
            for number, matrix in enumerate(matrices):
                matrix.requires_grad_(number == adapter)


Choose = Callable[[Adapted, int], None]
WAYS: dict[str, Choose] = {"attribute": Adapted.choose, "requires_grad": Adapted.train_only}


@dataclass
class Result:
    """Losses by adapter, trained numbers, whether each parameter is trained, and bytes of weights in the last step."""

    losses: dict[int, list[float]]
    numbers: dict[str, Tensor]
    trained: dict[str, bool]
    moved: int = 0
    report: Any = None


def batches(adapters: list[int]) -> list[tuple[Tensor, int]]:
    return [(torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(each)), each) for each in adapters]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(LAYERS)])
    named = list(model.named_parameters())
    groups = [
        {"params": [each for name, each in named if name.endswith(f".{adapter}") and "base" not in name], "lr": rate}
        for adapter, rate in enumerate(RATES)
    ]
    return model, torch.optim.AdamW(groups, weight_decay=0.1)


def train(choose: Choose, adapters: list[int], *, offloaded: bool, round_size: int | None = None) -> Result:
    model, optimizer = make()
    result = Result({adapter: [] for adapter in adapters}, {}, {})

    def fn(batch: tuple[Tensor, int]) -> Tensor:
        x, adapter = batch
        for layer in model:
            choose(layer, adapter)  # type: ignore[arg-type]
        return model(x).square().mean()

    def note(losses: list[Tensor]) -> None:
        for adapter, loss in zip(adapters, losses, strict=True):
            result.losses[adapter].append(float(loss.detach()))

    if not offloaded:
        for _ in range(STEPS):
            losses = [fn(batch) for batch in batches(adapters) if True]
            losses = []
            optimizer.zero_grad()
            for batch in batches(adapters):
                losses.append(fn(batch))
                losses[-1].backward()
            optimizer.step()
            note(losses)
    else:
        device = SimulatedDevice(to_device_bytes_per_second=1e9, to_host_bytes_per_second=1e9)
        checks = Checks(poison_hosts=True)
        with hydra_ext.offload(
            model, optimizer, budget=BUDGET, device=device, checks=checks, blocks=list(model), activations=None
        ) as run:
            for _ in range(STEPS):
                before = run.report().weights_moved_bytes
                output = run.step(batches(adapters), fn, reduction="sum", round_size=round_size)
                note(list(output.losses))
                result.moved = run.report().weights_moved_bytes - before
            result.report = run.report()
    result.numbers = {name: each.detach().clone() for name, each in model.named_parameters()}
    result.trained = {name: each.requires_grad for name, each in model.named_parameters()}
    return result


@pytest.mark.parametrize("way", WAYS)
def test_adapters_share_each_fetch_of_the_base(way: str) -> None:
    everything = list(range(ADAPTERS))
    plain = train(WAYS[way], everything, offloaded=False)
    together = train(WAYS[way], everything, offloaded=True, round_size=ADAPTERS)
    single = train(WAYS[way], [0], offloaded=True, round_size=1)
    assert together.report.evictions > 0
    report = together.report
    assert (report.rounds, report.refusals, report.fallbacks) == (STEPS + 1, 0, 0)  # the first has one microbatch
    assert together.moved == single.moved > 0
    assert together.losses == plain.losses
    assert together.trained == plain.trained
    assert all(torch.equal(each, together.numbers[name]) for name, each in plain.numbers.items())


@pytest.mark.parametrize("way", WAYS)
def test_each_adapter_has_the_numbers_of_a_training_alone(way: str) -> None:
    together = train(WAYS[way], list(range(ADAPTERS)), offloaded=True, round_size=ADAPTERS)
    for adapter in range(ADAPTERS):
        alone = train(WAYS[way], [adapter], offloaded=False)
        assert together.losses[adapter] == alone.losses[adapter]
        for name, each in alone.numbers.items():
            if name.endswith(f".{adapter}") and "base" not in name:
                assert torch.equal(each, together.numbers[name])


class Freezing(nn.Module):
    """A layer that trains itself only in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.requires_grad_(not self.linear.weight.requires_grad)
        return self.linear(x)  # type: ignore[no-any-return]


def test_layers_that_count_their_calls_run_one_at_a_time() -> None:
    def run_steps(*, offloaded: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Freezing(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [x for x, _ in batches([0, 1, 2])]
        report = None
        if offloaded:
            budget = 3 * 4 * WIDTH * (WIDTH + 1) + 2**17
            with hydra_ext.offload(
                model, optimizer, budget=budget, device="simulated", checks=Checks(poison_hosts=True), activations=None
            ) as run:
                for _ in range(STEPS):
                    run.step(data, lambda x: model(x).square().mean(), reduction="sum", round_size=3)
                report = run.report()
        else:
            for _ in range(STEPS):
                optimizer.zero_grad()
                for x in data:
                    model(x).square().mean().backward()
                optimizer.step()
        return [each.detach().clone() for each in model.parameters()], report

    plain, _ = run_steps(offloaded=False)
    offloaded, report = run_steps(offloaded=True)
    assert report.refusals > 0
    assert all(map(torch.equal, plain, offloaded))


def test_a_round_that_fails_leaves_what_is_trained_as_it_was_and_can_be_made_again() -> None:
    model, optimizer = make()

    def fn(batch: tuple[Tensor, int]) -> Tensor:
        x, adapter = batch
        for layer in model:
            layer.train_only(adapter)  # type: ignore[operator]
        if adapter == 2 and failing:
            raise RuntimeError("scripted")
        return model(x).square().mean()

    with hydra_ext.offload(
        model, optimizer, budget=BUDGET, device="simulated", blocks=list(model), activations=None
    ) as run:
        failing = False
        run.step(batches([0, 1, 2, 3]), fn, reduction="sum", round_size=ADAPTERS)
        before = [each.requires_grad for each in model.parameters()]
        failing = True
        with pytest.raises(RuntimeError, match="scripted"):
            run.step(batches([0, 1, 2, 3]), fn, reduction="sum", round_size=ADAPTERS)
        assert [each.requires_grad for each in model.parameters()] == before
        failing = False
        run.step(batches([0, 1, 2, 3]), fn, reduction="sum", round_size=ADAPTERS)
        assert run.report().refusals == 0
    assert before == ["base" not in name and name.endswith(".3") for name, _ in model.named_parameters()]


def language_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tiny language model with adapters of peft, whose dropout draws random numbers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = LlamaConfig(vocab_size=128, num_attention_heads=4, num_key_value_heads=4, **sizes)
    choice = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "init_lora_weights": False}
    model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(**choice), adapter_name="a0")
    for adapter in range(1, ADAPTERS):
        model.add_adapter(f"a{adapter}", peft.LoraConfig(**choice))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    groups = [
        {"params": [each for name, each in model.named_parameters() if f".a{adapter}." in name]}
        for adapter in range(ADAPTERS)
    ]
    return model, torch.optim.AdamW([{**group, "lr": rate} for group, rate in zip(groups, RATES, strict=True)])


def test_adapters_of_a_library_share_rounds() -> None:
    tokens = [torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(each)) for each in range(ADAPTERS)]
    seeds = list(range(ADAPTERS))

    def trained(*, offloaded: bool) -> tuple[list[Tensor], list[bool], Any]:
        model, optimizer = language_model()

        def fn(adapter: int) -> Tensor:
            model.set_adapter(f"a{adapter}")  # type: ignore[operator]
            return model(input_ids=tokens[adapter], labels=tokens[adapter]).loss  # type: ignore[no-any-return]

        report = None
        if offloaded:
            checks = Checks(poison_hosts=True)
            with hydra_ext.offload(model, optimizer, budget="800KiB", device="simulated", checks=checks) as run:
                for _ in range(STEPS):
                    run.step(list(range(ADAPTERS)), fn, reduction="sum", seeds=seeds, round_size=ADAPTERS)
                report = run.report()
        else:
            for _ in range(STEPS):
                optimizer.zero_grad()
                for adapter in range(ADAPTERS):
                    torch.manual_seed(seeds[adapter])
                    fn(adapter).backward()
                optimizer.step()
        parameters = list(model.parameters())
        return [each.detach().clone() for each in parameters], [each.requires_grad for each in parameters], report

    plain, flags, _ = trained(offloaded=False)
    numbers, same_flags, report = trained(offloaded=True)
    assert report.evictions > 0
    assert report.refusals == report.fallbacks == 0
    assert report.rounds < STEPS * ADAPTERS
    assert flags == same_flags
    assert all(map(torch.equal, plain, numbers))
