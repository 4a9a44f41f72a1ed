"""Interrupted trainings: small models, their optimizers and schedules, and loops that draw all their data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, optim
from support.benches import parameter_bytes
from support.models.zoo import FAMILIES, VOCABULARY

STEPS = 6
Parameters = Iterable[nn.Parameter]


class Images(nn.Module):
    """Convolutions with channels-last weights, statistics in buffers, and dropout. The first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
        )
        self.head = nn.Linear(16, 4)
        self.to(memory_format=torch.channels_last)
        self.body[0].requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(pixels).mean((2, 3)))


class Rounded(torch.optim.Optimizer):
    """An optimizer with fp32 state for 16-bit parameters, which it creates late and not only in tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "who": ("me", 1.5), "kind": torch.float32})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if parameter.grad is None or (number % 2 and state["count"] < 5):
                    continue
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["seen"] = {3: [torch.ones(2)], "rest": float("inf")}
                state["sum"].mul_(0.9).add_(parameter.grad.float())
                state["seen"][3][0].add_(0.1)
                parameter.sub_((group["lr"] * state["sum"] * state["seen"][3][0][0]).to(parameter.dtype))


def two_groups(parameters: Parameters) -> list[dict[str, Any]]:
    members = list(parameters)
    return [{"params": members[::2]}, {"params": members[1::2], "lr": 3e-3, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(two_groups(p), lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "sgd": lambda p: torch.optim.SGD(two_groups(p), lr=1e-2, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "rounded": lambda p: Rounded(p),
    "split": lambda p: optim.AdamW(two_groups(p), lr=1e-3),
    "fp32 master": lambda p: optim.AdamW(p, lr=1e-3, master="fp32", moments=torch.bfloat16),
    "native sgd": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9),
    "corrected": lambda p: optim.DelayCorrectedAdamW(two_groups(p), lr=1e-3),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda _: None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=2 * STEPS),
    "function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
}


@dataclass(frozen=True)
class Job:
    """A training that depends only on its seed."""

    family: str = "gpt2"
    optimizer: str = "adamw"
    schedule: str = "cosine"
    dtype: torch.dtype = torch.float32

    def make(self, seed: int) -> Made:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        model = Images() if self.family == "images" else FAMILIES[self.family].build()
        model = model.train().to(self.dtype)
        optimizer = OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])
        return Made(self, model, optimizer, SCHEDULES[self.schedule](optimizer))


@dataclass
class Made:
    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any

    def loss(self) -> Tensor:
        """Returns the loss of data that is drawn from every random state."""
        scale = random.random() + numpy.random.rand()
        if self.job.family == "images":
            pixels = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
            output = self.model(pixels.to(self.job.dtype))
            return nn.functional.cross_entropy(output, torch.randint(0, 4, (4,))) * scale
        tokens = torch.randint(3, VOCABULARY, (2, 16))
        return self.model(input_ids=tokens, labels=tokens).loss * scale

    def step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach().clone()

    def steps(self, count: int) -> list[Tensor]:
        return [self.step() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Returns everything that the next step depends on."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "state": {
                name: copied(self.optimizer.state[parameter])
                for name, parameter in self.model.named_parameters()
                if parameter in self.optimizer.state
            },
            "groups": [copied({k: v for k, v in g.items() if k != "params"}) for g in self.optimizer.param_groups],
            "schedule": None if self.schedule is None else copied(self.schedule.state_dict()),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": numpy.random.get_state()[1].tolist(),
        }


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)({key: copied(each) for key, each in value.items()})
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value


def differences(ours: Any, plain: Any, place: str = "") -> list[str]:
    """Lists where two nested values differ in types or bits."""
    if type(ours) is not type(plain):
        return [f"{place}: {type(ours)} for {type(plain)}"]
    if isinstance(plain, Tensor):
        same = ours.dtype == plain.dtype and ours.stride() == plain.stride() and torch.equal(ours, plain)
        return [] if same else [f"{place}: {ours.dtype} {ours.stride()} for {plain.dtype} {plain.stride()}"]
    if isinstance(plain, dict):
        if ours.keys() != plain.keys():
            return [f"{place}: {list(ours)} for {list(plain)}"]
        return [found for key in plain for found in differences(ours[key], plain[key], f"{place}/{key}")]
    if isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return [f"{place}: {len(ours)} for {len(plain)}"]
        return [
            line for i, pair in enumerate(zip(ours, plain, strict=True)) for line in differences(*pair, f"{place}/{i}")
        ]
    return [] if ours == plain else [f"{place}: {ours!r} for {plain!r}"]


def offloaded(made: Made, **options: Any) -> hydra_ext.offload:
    """Offloads with room for the activations and a part of the weights, and with poisoned hosts."""
    budget = 2**22 + parameter_bytes(made.model) // 2
    return hydra_ext.offload(made.model, made.optimizer, budget=budget, checks=Checks(poison_hosts=True), **options)


def manifest_of(checkpoint: Path) -> Any:
    import json

    return json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def backward(run: hydra_ext.Run) -> None:
    """Runs a backward of a :func:`small` model."""
    run.model(torch.randn(3, 2)).sum().backward()


class Small:
    """A run that depends only on its steps, so that a checkpoint's step determines its contents."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.offload = hydra_ext.offload(self.model, self.optimizer, budget=2**20)

    def __enter__(self) -> Small:
        self.run = self.offload.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self.offload.__exit__(*details)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.model(torch.zeros(2, 3))  # buffers count, too

    def state(self) -> list[Tensor]:
        momenta = [self.optimizer.state[p].get("momentum_buffer") for p in self.model.parameters()]
        return [
            *(t.detach().clone() for t in self.model.state_dict().values()),
            *(m.clone() for m in momenta if m is not None),
        ]


def small_states(steps: int) -> list[list[Tensor]]:
    """Returns the states of a :func:`small` training, by step."""
    with Small() as small:
        found = [small.state()]
        for _ in range(steps):
            small.step()
            found.append(small.state())
    return found
