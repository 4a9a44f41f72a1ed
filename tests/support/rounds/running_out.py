"""A training whose device runs out of memory at a chosen block, and the same one undisturbed in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Checks, optim

WIDTH, LAYERS, MICROBATCHES, STEPS = 64, 4, 4, 6
DISTURBED = 4  # the step that fails: by then the engine has recorded its order, and blocks are in their homes
BUDGET = 2**21
Batch = tuple[Tensor, Tensor]
Trip = Callable[[], None]


class Layer(nn.Module):
    """Keeps all kinds of state that a module can have beside parameters."""

    def __init__(self, *, recorded: bool) -> None:
        super().__init__()
        self.recorded = recorded
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.seen: list[float] = []
        self.notes: dict[str, list[int]] = {"sizes": []}
        self.mean = torch.zeros(WIDTH)  # not a buffer
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(functional.gelu(self.norm(self.linear(x))))
        if not self.recorded:
            return x + y
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.seen.append(float(len(self.seen)))
        self.notes["sizes"].append(len(x))
        self.latest = y.detach()
        return x + y


class Net(nn.Module):
    def __init__(self, *, recorded: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(recorded=recorded) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A training, and the place where it runs out of memory.

    Attributes:
        where: "forward" or "backward" of the block.
        block: Number of the block; :data:`LAYERS` is the head.
        at: Calls of the block in the step at which memory runs out, counted on while rounds are tried again.
        optimizer: "ours" or "torch".
        scaler: Whether losses are scaled.
        clip: Whether gradients are clipped.
        before: Whether gradients were accumulated before the step.
        home: Home of the blocks at that time: "host", "device" or "disk". On the device an error is scripted. Otherwise
            the budget drops to nothing, which would also make blocks leave the device.
        recorded: Whether layers keep notes of their calls; such calls must not be repeated in backward.
        activations: As for ``offload``.
    """

    where: str = "forward"
    block: int = 0
    at: tuple[int, ...] = (2,)
    optimizer: str = "ours"
    scaler: bool = False
    clip: bool = True
    before: bool = False
    home: str = "host"
    recorded: bool = True
    activations: Literal["auto"] | None = "auto"

    def make(self) -> tuple[Net, nn.Parameter, torch.optim.Optimizer]:
        """Makes the model, and a second module that is trained but is not part of it."""
        torch.manual_seed(0)
        model, temperature = Net(recorded=self.recorded), nn.Parameter(torch.ones(()))
        parameters = [*model.parameters()]
        kind = optim.AdamW if self.optimizer == "ours" else torch.optim.AdamW
        return model, temperature, kind(parameters, lr=1e-2)

    def make_scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if self.scaler else None


def batches() -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        return torch.randn(16, WIDTH, generator=generator), torch.randint(0, 8, (16,), generator=generator)

    return [[batch() for _ in range(MICROBATCHES)] for _ in range(STEPS + 1)]


def loss_of(model: Net, temperature: nn.Parameter, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]) * temperature, batch[1])


@dataclass
class Left:
    """The final state of a training."""

    losses: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: list[Any] = field(default_factory=list)

    def note(self, model: Net, temperature: nn.Parameter, scaler: torch.amp.GradScaler | None) -> None:
        self.tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for index, layer in enumerate(model.layers):
            self.tensors[f"mean {index}"] = layer.mean.clone()
            self.tensors[f"latest {index}"] = layer.mean.clone() if layer.latest is None else layer.latest.clone()
            self.plain += [list(layer.seen), list(layer.notes["sizes"])]
        self.tensors["beside"] = torch.zeros(()) if temperature.grad is None else temperature.grad.clone()
        self.plain += [torch.get_rng_state().tolist(), random.getstate(), scaler and scaler.state_dict()]

    def differences(self, other: Left) -> list[str]:
        found = [f"loss {i}" for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)) if a != b]
        found += [name for name, value in self.tensors.items() if not torch.equal(value, other.tensors[name])]
        return found + [f"value {i}" for i, (a, b) in enumerate(zip(self.plain, other.plain, strict=True)) if a != b]


def _seeds(step: int) -> list[int]:
    return [100 * step + index for index in range(MICROBATCHES)]


def _accumulate(model: Net, temperature: nn.Parameter, batch: Batch) -> None:
    torch.manual_seed(7)
    loss_of(model, temperature, batch).backward()


def train_plain(case: Case) -> Left:
    model, temperature, optimizer = case.make()
    scaler, left, data = case.make_scaler(), Left(), batches()
    torch.manual_seed(5)
    for step in range(STEPS):
        if case.before and step == DISTURBED:
            _accumulate(model, temperature, data[STEPS][0])
        state = torch.get_rng_state()
        for seed, batch in zip(_seeds(step), data[step], strict=True):
            torch.manual_seed(seed)
            loss = loss_of(model, temperature, batch)
            scaled = loss / MICROBATCHES
            (scaled if scaler is None else scaler.scale(scaled)).backward()
            left.losses.append(loss.detach())
        torch.set_rng_state(state)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if case.clip:
            clip = optim.clip_grad_norm_ if case.optimizer == "ours" else torch.nn.utils.clip_grad_norm_
            clip(model.parameters(), 0.5)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    left.note(model, temperature, scaler)
    return left


class Device:
    """Runs out of memory at a chosen block."""

    def __init__(self, run: hydra_ext.Run, case: Case) -> None:
        self._run = run
        self._case = case
        self._calls = 0
        self.armed = False
        self.failed = 0
        layers: list[nn.Module] = [*run.model.layers, run.model.head]
        layers[case.block].register_forward_hook(self._called)

    def _called(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        if self._case.where == "forward":
            self._count()
        elif output.requires_grad:
            output.register_hook(lambda _gradient: self._count())

    def _count(self) -> None:
        if not self.armed:
            return
        self._calls += 1
        if self._calls in self._case.at:
            self.failed += 1
            if self._case.home == "device":  # without a budget the blocks would leave the device
                raise torch.OutOfMemoryError("scripted: the device is out of memory.")
            self._run.core.memory.ledger.set_limit(1)  # the next allocation is refused, even after evictions

    def recovered(self) -> None:
        self._run.core.memory.ledger.set_limit(self._run.budget)


@contextmanager
def _offloaded(case: Case, model: Net, optimizer: torch.optim.Optimizer, folder: Path) -> Iterator[hydra_ext.Run]:
    disk: dict[str, Any] = {}
    if case.home == "disk":
        disk = {"host_budget": 260 * 1024, "spill_dir": folder}
    blocks = [*model.layers, model.head]
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(
        model, optimizer, budget=BUDGET, blocks=blocks, checks=checks, activations=case.activations, **disk
    ) as run:
        yield run


def train_disturbed(case: Case, folder: Path) -> tuple[Left, hydra_ext.Report]:
    """Returns the final state and report. Asserts that the report has one retry for each failure of the device."""
    model, temperature, optimizer = case.make()
    scaler, left, data = case.make_scaler(), Left(), batches()
    torch.manual_seed(5)
    with _offloaded(case, model, optimizer, folder) as run:
        device = Device(run, case)

        def fn(batch: Batch) -> Tensor:
            device.recovered()
            return loss_of(model, temperature, batch)

        for step in range(STEPS):
            if case.before and step == DISTURBED:
                _accumulate(model, temperature, data[STEPS][0])
            if step == DISTURBED:
                assert run.core.homes.on_device or case.home != "device"
                assert run.report().disk_bytes or case.home != "disk"
            device.armed = step == DISTURBED
            max_norm = 0.5 if case.clip else None
            recompute = False if case.recorded else None
            out = run.step(data[step], fn, seeds=_seeds(step), max_norm=max_norm, scaler=scaler, recompute=recompute)
            left.losses += list(out.losses)
        report = run.report()
        assert device.failed > 0
        assert report.retries == device.failed
        assert report.windows > 0
    left.note(model, temperature, scaler)
    return left, report


def differences(case: Case, folder: Path) -> list[str]:
    left, _ = train_disturbed(case, folder)
    return left.differences(train_plain(case))


def cases(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[Case]:
    return [Case(**{name: row[name] for name in names}) for row in rows]
