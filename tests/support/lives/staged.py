"""Random programs of a pipeline: drawn from numbers, run by two ranks, compared with the recurrence in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks
from hydra_ext.errors import HydraError
from hydra_ext.pipeline import Pipeline
from hydra_ext.split.stage_program import event_seed
from support.lives.program import Op, op
from support.lives.sides import Randomness, same
from support.pipeline.pipelines import OPTIMIZERS, forward, loss_of, make_microbatch, make_stages

SEED = 5
STAGES = 2


@dataclass(frozen=True)
class StagedProgram:
    """A pipeline of two stages on two ranks, and the operations on it.

    Attributes:
        plain: The stages are cut out of one module, after a rehearsal.
        budget: The bytes of the device, if the stages' weights are on poisoned hosts.
        frozen: The layer whose norm is not trained.
    """

    schedule: str
    optimizer: str
    microbatches: int
    dropout: float
    checkpoints: bool
    recompute: bool
    plain: bool
    budget: int | None
    frozen: int | None
    ops: tuple[Op, ...]


class Whole(nn.Module):
    """All stages' layers, one after another."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for stage in stages for layer in stage.children())

    def forward(self, microbatch: dict[str, Tensor]) -> Tensor:
        value: Any = microbatch
        for layer in self.layers:
            value = layer(value)
        return value


def stages_of(program: StagedProgram) -> list[nn.Module]:
    stages = make_stages(STAGES, dropout=program.dropout, checkpoints=program.checkpoints)
    if program.frozen is not None:
        norms = [module for stage in stages for module in stage.modules() if isinstance(module, nn.LayerNorm)]
        norms[program.frozen % len(norms)].requires_grad_(False)
    return stages


def data_of(step: Op) -> list[dict[str, Tensor]]:
    data = [make_microbatch(step.arguments["data"], index) for index in range(step.arguments["microbatches"])]
    if step.arguments.get("spoiled"):
        data[-1]["scale"] = torch.tensor(float("nan"))
    return data


def seed_everything() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


# ---- a rank ---------------------------------------------------------------------------------------------------------
@dataclass
class Rank:
    """The state of one rank."""

    program: StagedProgram
    folder: Path
    pipe: Pipeline = field(init=False)
    modules: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        stages = stages_of(self.program)
        whole = Whole(stages) if self.program.plain else None
        self.modules = [whole] if whole is not None else stages
        cuts = [f"layers.{len(list(stages[0].children()))}"] if whole is not None else None
        self.pipe = Pipeline(
            whole,
            OPTIMIZERS[self.program.optimizer],
            stages=None if whole is not None else stages,
            cuts=cuts,
            schedule=self.program.schedule,
            microbatches=self.program.microbatches,
            recompute=self.program.recompute,
            budget=self.program.budget,
            checks=Checks(poison_hosts=True) if self.program.budget is not None else None,
            seed=SEED,
        )
        if whole is not None:
            self.pipe.prepare(make_microbatch(0, 0), self.fn)
        seed_everything()

    @property
    def fn(self) -> Any:
        whole = self.modules[0]
        return (lambda microbatch: loss_of(whole(microbatch), microbatch)) if self.program.plain else loss_of

    def own(self) -> list[nn.Parameter]:
        return [p for optimizer in self.pipe.optimizers for group in optimizer.param_groups for p in group["params"]]

    def step(self, step: Op) -> list[Any]:
        out = self.pipe.step(data_of(step), self.fn, max_norm=step.arguments["norm"], seeds=seeds_of(step))
        return [torch.stack(list(out.losses))]

    def evaluate(self, step: Op) -> list[Any]:
        for module in self.modules:
            module.eval()
        found = torch.stack(list(self.pipe.evaluate(data_of(step), self.fn).losses))
        for module in self.modules:
            module.train()
        return [found]

    def rate(self, step: Op) -> list[Any]:
        for optimizer in self.pipe.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= step.arguments["factor"]
        return []

    def write(self, step: Op) -> list[Any]:
        self.pipe.drain()
        with torch.no_grad():
            for parameter in self.own():
                parameter.mul_(step.arguments["factor"])
        self.pipe.refresh()
        return []

    def look(self, _step: Op) -> list[Any]:
        self.pipe.drain()
        found = []
        for optimizer in self.pipe.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                states = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
                found += [value.detach().clone() for value in (parameter, *states)]
        return found

    def save(self, _step: Op) -> list[Any]:
        self.pipe.save(self.folder)
        return []

    def load(self, _step: Op) -> list[Any]:
        self.pipe.load(self.folder)
        return []

    def drain(self, _step: Op) -> list[Any]:
        self.pipe.drain()
        return []

    def draw(self, _step: Op) -> list[Any]:
        return [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]


def seeds_of(step: Op) -> list[int] | None:
    seed = step.arguments["seed"]
    return None if seed is None else [seed + index for index in range(step.arguments["microbatches"])]


def live_all(rank: int, programs: Sequence[StagedProgram], folder: Path) -> list[list[Any]]:
    """Returns the results of each program's operations. A refusal gives its text and ends the program."""
    results = []
    for number, program in enumerate(programs):
        seen: list[Any] = []
        here: Rank | None = None
        try:
            here = Rank(program, folder / str(number))
            for step in program.ops:
                seen.append(getattr(here, step.name)(step))
        except (HydraError, torch.OutOfMemoryError) as error:
            seen.append(f"{type(error).__name__}: {error}")
        finally:
            if here is not None:
                here.pipe.close()
        results.append(seen)
    return results


# ---- the recurrence -------------------------------------------------------------------------------------------------
class Recurrence:
    """W(t+1) = W(t) - v * grad f(W(t - delay)), in one process."""

    def __init__(self, program: StagedProgram) -> None:
        self.program = program
        self.newest = nn.ModuleList(stages_of(program))
        self.before = copy.deepcopy(self.newest)
        self.optimizers = [OPTIMIZERS[program.optimizer](list(stage.parameters())) for stage in self.newest]
        self.steps = 0
        self.saved: Any = None
        seed_everything()

    def step(self, step: Op) -> list[Any]:
        random_states = Randomness.now()
        used = self.before if self.program.schedule == "2bw" else copy.deepcopy(self.newest)
        used.zero_grad()
        data = data_of(step)
        own = event_seed(event_seed(SEED, 0), self.steps)
        of_each = seeds_of(step) or [event_seed(own, index) for index in range(len(data))]
        losses = []
        for microbatch, seed in zip(data, of_each, strict=True):
            loss = forward(used, microbatch, seed)
            (loss / len(data)).backward()
            losses.append(loss.detach())
        self.before = copy.deepcopy(self.newest)
        trained = [p for p in self.newest.parameters() if p.requires_grad]
        for parameter, other in zip(trained, (p for p in used.parameters() if p.requires_grad), strict=True):
            parameter.grad = other.grad
        norm = step.arguments["norm"]
        if norm is None or hydra_ext.optim.clip_grad_norm_(trained, norm).isfinite():
            for optimizer in self.optimizers:
                optimizer.step()
        self.newest.zero_grad()
        self.steps += 1
        random_states.put_back()
        return [torch.stack(losses)]

    def evaluate(self, step: Op) -> list[Any]:
        random_states = Randomness.now()
        self.newest.eval()
        with torch.no_grad():
            found = torch.stack([forward(self.newest, microbatch, 0) for microbatch in data_of(step)])
        self.newest.train()
        random_states.put_back()
        return [found]

    def rate(self, step: Op) -> list[Any]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= step.arguments["factor"]
        return []

    def write(self, step: Op) -> list[Any]:
        with torch.no_grad():
            for parameter in self.newest.parameters():
                parameter.mul_(step.arguments["factor"])
        self.before = copy.deepcopy(self.newest)
        return []

    def look(self, _step: Op) -> list[Any]:
        """Returns the weights and state of each stage."""
        found = []
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            states = [optimizer.state.get(parameter, {}).values() for parameter in parameters]
            found.append(
                [
                    value.detach().clone()
                    for parameter, state in zip(parameters, states, strict=True)
                    for value in (parameter, *(each for each in state if isinstance(each, Tensor)))
                ]
            )
        return found

    def save(self, _step: Op) -> list[Any]:
        states = [copy.deepcopy(each.state_dict()) for each in (self.newest, self.before, *self.optimizers)]
        self.saved = (states, self.steps, Randomness.now())
        return []

    def load(self, _step: Op) -> list[Any]:
        if self.saved is not None:
            states, self.steps, random_states = self.saved
            for each, state in zip((self.newest, self.before, *self.optimizers), states, strict=True):
                each.load_state_dict(copy.deepcopy(state))
            random_states.put_back()
        return []

    def drain(self, _step: Op) -> list[Any]:
        return []

    def draw(self, _step: Op) -> list[Any]:
        return [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]


def expected_of(program: StagedProgram) -> list[list[Any]]:
    recurrence = Recurrence(program)
    return [getattr(recurrence, step.name)(step) for step in program.ops]


def wrong(program: StagedProgram, expected: list[list[Any]], ranks: Sequence[list[Any]]) -> list[str]:
    """Lists differences with their ranks."""
    found = []
    for rank, seen in enumerate(ranks):
        for number, (step, one, wanted) in enumerate(zip(program.ops, seen, expected, strict=False)):
            if isinstance(one, str):
                break
            values = wanted[rank] if step.name == "look" else wanted
            equal = len(one) == len(values) and all(same(a, b) for a, b in zip(one, values, strict=True))
            if not equal:
                found.append(f"rank {rank}, operation {number}, {step}")
                break
    return found


# ---- drawing --------------------------------------------------------------------------------------------------------
def staged_program_of(seed: int) -> StagedProgram:
    r = random.Random(seed)
    schedule = r.choice(["2bw", "2bw", "1f1b", "gpipe"])
    microbatches = r.choice([1, 2, 3, 4])
    plain = r.random() < 0.25
    ops: list[Op] = []
    names = ["step"] * 8 + ["evaluate", "rate", "write", "look", "look", "save", "load", "drain", "draw"]
    for name in r.choices(names, k=r.randint(5, 12)):
        if name == "step":
            count = microbatches if r.random() < 0.8 else r.randint(1, 4)
            norm = r.choice([None, None, 0.1, 10.0])
            spoiled = norm is not None and r.random() < 0.15
            seed_given = r.choice([None, None, 11])
            data = r.randrange(100)
            ops.append(op("step", data=data, microbatches=count, norm=norm, seed=seed_given, spoiled=spoiled))
        elif name == "evaluate":
            ops.append(op("evaluate", data=r.randrange(100), microbatches=r.randint(1, 3)))
        elif name in ("rate", "write"):
            ops.append(op(name, factor=r.choice([0.5, 0.9])))
        else:
            ops.append(op(name))
    if any(step.name == "save" for step in ops):
        ops.append(op("load"))
    ops = [step for at, step in enumerate(ops) if step.name != "load" or any(s.name == "save" for s in ops[:at])]
    return StagedProgram(
        schedule=schedule,
        optimizer=r.choice([*OPTIMIZERS]),
        microbatches=microbatches,
        dropout=0.0 if plain else r.choice([0.0, 0.2]),
        checkpoints=r.random() < 0.2,
        recompute=r.random() < 0.3,
        plain=plain,
        budget=r.choice([None, None, 2**17, 2**22]),
        frozen=r.choice([None, None, 0, 3]),
        ops=(*ops, op("step", data=7, microbatches=microbatches, norm=None, seed=None, spoiled=False), op("look")),
    )
