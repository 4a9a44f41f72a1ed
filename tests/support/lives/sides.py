"""The two trainings that a program runs on: plain PyTorch, and the same inside and outside of ``offload``."""

from __future__ import annotations

import copy
import random
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ext
from support.lives.program import Program
from support.lives.subjects import MODELS, NARROW, OPTIMIZERS, WIDE, batch, loss_of


@dataclass
class Randomness:
    """The random states of torch, Python and numpy."""

    torch: Tensor
    python: object
    numpy: Any

    @staticmethod
    def now() -> Randomness:
        return Randomness(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)  # type: ignore[arg-type]
        np.random.set_state(self.numpy)

    def differences(self, other: Randomness) -> list[str]:
        same_numpy = all(np.array_equal(one, two) for one, two in zip(self.numpy, other.numpy, strict=True))
        found = {
            "torch": torch.equal(self.torch, other.torch),
            "Python": self.python == other.python,
            "numpy": same_numpy,
        }
        return [f"random state of {name}" for name, same in found.items() if not same]


@dataclass
class Side:
    """One training: its model and optimizer, and objects that operations keep for later ones.

    Attributes:
        structure: Counts changes of names, groups or shared memory, after which earlier saved states no longer fit.
        kept: Objects that operations keep, by name: averages, copies of states, schedules.
        removals: Functions to call at the end of the program.
    """

    program: Program
    ours: bool
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    randomness: Randomness = field(init=False)
    threads: set[threading.Thread] = field(init=False)
    run: hydra_ext.Run | None = None
    inside: bool = False  # whether this side, or the other one, is in a context
    stash: hydra_ext.stash | None = None
    structure: int = 0
    schedules: list[Any] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    rest: list[nn.Parameter] = field(default_factory=list)
    removals: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        torch.manual_seed(self.program.seed)
        random.seed(self.program.seed)
        np.random.seed(self.program.seed)
        model = MODELS[self.program.model].make(WIDE if self.program.wide else NARROW)
        self.model = model.bfloat16() if self.program.bf16 else model
        self.make_optimizer(half=self.program.half)
        self.threads = set(threading.enumerate())
        self.randomness = Randomness.now()

    def make_optimizer(self, *, half: bool = False) -> None:
        parameters = list(self.model.parameters())
        if half:
            parameters, self.rest = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        self.optimizer = OPTIMIZERS[self.program.optimizer](parameters)

    @contextmanager
    def alone(self) -> Any:
        """Runs with the side's own random states."""
        self.randomness.put_back()
        try:
            yield
        finally:
            self.randomness = Randomness.now()

    def saving(self) -> AbstractContextManager[Any]:
        """Surrounds a forward whose graph gets a backward."""
        return nullcontext() if self.stash is None else self.stash

    def loss(self, data: int) -> Tensor:
        with self.saving():
            return loss_of(self.model, batch(self.program.model, data))

    # ---- choices of operations --------------------------------------------------------------------------------------

    def leaves(self) -> list[nn.Module]:
        """Returns modules with their own parameters."""
        return [module for module in self.model.modules() if module._parameters and hasattr(module, "forward")]

    def leaf(self, which: int) -> nn.Module:
        leaves = self.leaves()
        return leaves[which % len(leaves)]

    def parameter(self, which: int) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return parameters[which % len(parameters)]

    @property
    def spills(self) -> bool:
        return self.run is not None and self.run._spilling is not None

    # ---- compared state ---------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Tensor]:
        """Returns the complete state, by names. Each read waits for its update."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[f"weight {name}"] = parameter
            found[f"gradient of {name}"] = parameter.grad
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        found |= {f"buffer {name}": buffer for name, buffer in self.model.named_buffers()}
        found |= {f"average of {name}": value for name, value in self.kept.get("average", {}).items()}
        averaged = self.kept.get("averaged")
        if averaged is not None:
            found |= {f"averaged {name}": value for name, value in averaged.state_dict().items()}
        for number, group in enumerate(self.optimizer.param_groups):
            found[f"rate of group {number}"] = torch.tensor(float(group["lr"]))
        return {name: value for name, value in found.items() if value is not None}

    def frozen(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]

    # ---- saving and going back, for the side that has no run ---------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "model": copy.deepcopy({**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "schedules": [copy.deepcopy(schedule.state_dict()) for schedule in self.schedules],
            "random": Randomness.now(),
        }

    def go_back(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}.items():
                value.copy_(saved["model"][name])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        for schedule, state in zip(self.schedules, saved["schedules"], strict=True):
            schedule.load_state_dict(copy.deepcopy(state))
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            parameter.grad = None
        saved["random"].put_back()

    def folder(self) -> Path:
        if "folder" not in self.kept:
            self.kept["folder"] = self.removals.enter_context(tempfile.TemporaryDirectory())
        return Path(self.kept["folder"])

    def end(self) -> None:
        self.removals.close()


Make = Callable[..., list[Any] | None]


def same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def differences(ours: Side, plain: Side) -> list[str]:
    """Names the entries that are not equal to the last bit."""
    found, wanted = ours.entries(), plain.entries()
    names = [f"{name} is there" for name in found.keys() - wanted.keys()]
    names += [f"{name} is not there" for name in wanted.keys() - found.keys()]
    names += [name for name in wanted.keys() & found.keys() if not same(found[name].detach(), wanted[name].detach())]
    return sorted(names) + (["frozen"] if ours.frozen() != plain.frozen() else [])
