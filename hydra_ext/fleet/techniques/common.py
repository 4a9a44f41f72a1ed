"""Jobs that train adapters of one frozen base make their steps together: a block of the base is fetched once for all.

Each job has a model, an optimizer and a schedule of its own. Frozen weights whose bytes are the same are one parameter
for all. Modules at the same place of the models move as one block. So a step is one ``run.step`` over the microbatches
of all jobs: while a block is on the device, all of them use it.

Numbers are those of each job alone. Gradients, clipping, updates and checkpoints are each job's own.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_ext.blocks import block_limit, discover
from hydra_ext.checkpoint.format.tensors import bytes_of
from hydra_ext.errors import BudgetTooSmall
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques.building import build_model
from hydra_ext.fleet.techniques.interface import Configuration, Gang, Session, WontDo
from hydra_ext.fleet.techniques.offloading import Offloading
from hydra_ext.fleet.techniques.plain import LocalSession, evaluated
from hydra_ext.offload import offload
from hydra_ext.runtime.rounds.undoing.buffers import ModelBuffers, restore
from hydra_ext.runtime.rounds.undoing.module_contents import Copies, ModuleContents
from hydra_ext.runtime.run import Run


class CommonBase(Offloading):
    """``hydra_ext.offload`` of several jobs' models at once, of which the frozen weights are the same."""

    name = "common base"
    tenants = 8

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        return {**super().search(job, devices), **base_of(job)}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        """A job alone, as in trials: what it does is what it would do beside others."""
        with Common(gang) as common:
            member = common.admit(job)
            common.share(member)
            yield member


def base_of(job: Job) -> dict[str, Any]:
    """What tells whether jobs have one base: the digest of the frozen weights, and whether they are drawn by the seed.

    Raises:
        WontDo: No weights are frozen, or they are on meta.
    """
    digest, other = (_digest(build_model(each)) for each in (job, replace(job, seed=job.seed + 1)))
    return {"base": digest, "seeded": other != digest}


def _digest(model: nn.Module) -> str:
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad and each.numel()]
    if not frozen:
        raise WontDo("no weights are frozen: there is no base to share")
    if any(each.is_meta for _, each in frozen):
        raise WontDo("its weights have no numbers before the context: they cannot be compared with other jobs' weights")
    found = hashlib.sha256()
    for name, each in frozen:
        found.update(f"{name} {each.dtype} {tuple(each.shape)} ".encode())
        found.update(bytes_of(each))
    return found.hexdigest()


# ---- the joined model -----------------------------------------------------------------------------------------------


class _Joined(nn.Module):
    """Models of which modules at the same place move as one block.

    Attributes:
        places: These modules. They come before the models, so that a round has all microbatches at one place before
            any of them goes on to the next.
    """

    def __init__(self, members: Sequence[Member], *, largest_bytes: int) -> None:
        super().__init__()
        models = [each.model for each in members]
        at = [dict(model.named_modules()) for model in models]
        places = [name for name in _places(models[0], largest_bytes) if all(name in modules for modules in at)]
        # Jobs whose models are made of the same modules share them already.
        self.places = nn.ModuleList(nn.ModuleList(dict.fromkeys(modules[name] for modules in at)) for name in places)
        self.models = nn.ModuleList(models)
        self.__dict__["members"] = list(members)

    def forward(self, number: int, microbatch: Any) -> Tensor:
        loss: Tensor = self.__dict__["members"][number].loss(self.models[number], microbatch)
        return loss


def _places(model: nn.Module, largest_bytes: int) -> list[str]:
    """Blocks, and modules with parameters of their own beside their children's, with all that they contain.

    All parameters lie in one of them, but for the model's own.
    """
    found: list[str] = []
    for site in discover(model, largest_bytes=largest_bytes).sites:
        if site.name and not any(site.name.startswith(f"{each}.") for each in found):
            found.append(site.name)
    return found


# ---- jobs -----------------------------------------------------------------------------------------------------------


class Member(LocalSession):
    """One job among those that share a base."""

    def __init__(self, job: Job, device: Device, common: Common) -> None:
        super().__init__(job, device, torch.device("cpu"))
        self._common = common

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        (outcome,) = self._common.step([Asked(self, microbatches, seeds)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def update(self) -> None:
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ended(self, losses: Sequence[Tensor]) -> float | BaseException:
        """A step was made, with these losses. Returns their mean, or why the schedule was not."""
        try:
            if self.schedule is not None:
                self.schedule.step()
        except Exception as error:  # noqa: BLE001 - told as this job's failure
            return error
        self.steps += 1
        return float(torch.stack(list(losses)).mean())

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        model, number = self._common.joined(self)
        return evaluated(self.model, lambda each: model(number, each), microbatches)

    def save(self, folder: Path, extra: Any) -> None:
        if self._common.run is not None:
            self._common.run.sync()
        super().save(folder, extra)

    def trained_parameters(self) -> list[Tensor]:
        """
        Raises:
            WontDo: The optimizer does not have them all: their gradients would add up over undone steps.
        """
        given = {each for group in self.optimizer.param_groups for each in group["params"]}
        trained = [each for each in self.model.parameters() if each.requires_grad]
        if not given.issuperset(trained):
            raise WontDo("its model has trained weights that its optimizer does not have")
        return list(trained)


@dataclass(frozen=True)
class Asked:
    """A step that a job asks for."""

    member: Member
    microbatches: Sequence[Any]
    seeds: Sequence[int]


class _Spoiled(WontDo):
    """What all jobs share was changed: none of them can go on."""


class _Updates(Optimizer):
    """Updates of those jobs that make the step. An error in one does not keep the others from theirs.

    Attributes:
        errors: Of updates of the last step.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__([{"params": member.trained_parameters()} for member in members], {})
        self._members: Sequence[Member] = ()
        self._base = {each: each._version for each in members[0].model.parameters() if not each.requires_grad}
        self._drawn: Any = None
        self.errors: dict[Member, BaseException] = {}

    def begin(self, members: Sequence[Member]) -> None:
        """A step of these begins."""
        self._members = members
        self._drawn = _host_states()
        self.errors = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(each._version != version for each, version in self._base.items()):
            raise _Spoiled("a loss writes to frozen weights, which other jobs have too")
        if _host_states() != self._drawn:
            raise WontDo(
                "the loss draws from the random numbers of Python or numpy, which jobs that make their steps together "
                "would take from each other"
            )
        before = _all_states()
        for member in self._members:
            try:
                member.update()
            except Exception as error:  # noqa: BLE001 - told as this job's failure
                self.errors[member] = error
        if _all_states() != before:
            raise _Spoiled("an optimizer draws random numbers, which jobs would take from each other")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Behind a step each job's own optimizer has done it. This drops what is left of a step that has failed."""
        for member in self._members:
            for parameter in member.trained_parameters() if member in self.errors else ():
                parameter.grad = None

    def forget(self) -> None:
        """Drops the gradients of a step that was not made."""
        super().zero_grad()


def _host_states() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), kind, *rest, numpy.asarray(keys).tobytes()


def _all_states() -> tuple[Any, ...]:
    return *_host_states(), torch.get_rng_state().numpy().tobytes()


class _Training:
    """Some members' models on the device, from one joining or leaving to the next.

    Attributes:
        members: In the order of their numbers.
        joined: Their models.
        run: What trains them.
    """

    def __init__(self, members: Sequence[Member], gang: Gang) -> None:
        self.members = list(members)
        budget = gang.device.budget
        total = sum(each.nbytes for each in members[0].model.parameters())
        self.joined = _Joined(self.members, largest_bytes=block_limit(total, budget))
        self._updates = _Updates(self.members)
        self._copies = Copies()
        self._model_buffers = ModelBuffers()
        self._stack = ExitStack()
        try:
            context = offload(
                self.joined,
                self._updates,
                budget=budget,
                device=gang.device.given if gang.shared is None else gang.shared,
                blocks=list(self.joined.places),
            )
            self.run: Run = self._stack.enter_context(context)
        except BudgetTooSmall as error:
            raise WontDo(f"{len(members)} jobs together: {error}") from error

    def close(self) -> None:
        self._stack.close()

    def step(self, asked: Sequence[Asked]) -> dict[Member, float | BaseException]:
        """Each one's loss, or why it was not updated. After any other error the step was not made, and may be again.

        Raises:
            _Spoiled: It cannot be made again.
        """
        numbers = {member: number for number, member in enumerate(self.members)}
        buffers = self._model_buffers.note([self.joined])
        contents = ModuleContents.of([self.joined], self._copies)
        self._updates.begin([each.member for each in asked])
        try:
            output = self.run.step(
                [(numbers[each.member], one, len(each.microbatches)) for each in asked for one in each.microbatches],
                self._loss,
                reduction="sum",
                seeds=[seed for each in asked for seed in each.seeds],
            )
        except _Spoiled:
            raise
        except Exception as error:
            self._updates.forget()
            obstacle = contents.obstacle()
            if obstacle:
                raise _Spoiled(
                    f"a job has failed beside this one, and what the step has changed stays: {obstacle}"
                ) from error
            restore(buffers)
            contents.restore()
            raise
        losses = iter(output.metrics)
        found: dict[Member, float | BaseException] = {}
        for each in asked:
            own = [next(losses) for _ in each.microbatches]
            found[each.member] = self._updates.errors.get(each.member) or each.member.ended(own)
        return found

    def _loss(self, given: tuple[int, Any, int]) -> tuple[Tensor, Tensor]:
        number, microbatch, count = given
        try:
            loss: Tensor = self.joined(number, microbatch)
            return loss / count, loss
        except SystemExit as error:  # of a job, and not of the process
            raise RuntimeError(f"the loss has raised SystemExit({error.code!r})") from error


class Common:
    """Jobs in one process on one device that have one base. Closed by leaving its context.

    The jobs' models, optimizers and schedules are plain objects on the host. The first step or evaluation offloads the
    models that are there. When a job comes or leaves, they are on the host again.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._members: list[Member] = []
        self._training: _Training | None = None

    def __enter__(self) -> Common:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    @property
    def run(self) -> Run | None:
        """What trains the models now; None between two sets of jobs."""
        return None if self._training is None else self._training.run

    def admit(self, job: Job) -> Member:
        """Builds a job's model, optimizer and schedule. :meth:`share` makes it take part."""
        self._leave()
        return Member(job, self._gang.device, self)

    def share(self, member: Member) -> int:
        """Makes a job take part. Returns the bytes that it shares with the others.

        Raises:
            WontDo: It has modules or weights that another job changes, or more than its optimizer trains.
        """
        self._leave()
        member.trained_parameters()
        theirs = {each for other in self._members for each in other.model.parameters() if each.requires_grad}
        if theirs & set(member.model.parameters()):
            raise WontDo("its model has weights that another job trains: let each job build weights of its own")
        modules = {each for other in self._members for each in other.model.modules()}
        if any(module in modules and module._buffers for module in member.model.modules()):
            raise WontDo("its model has a module with buffers that another job has too: let each job build its own")
        shared = _share(self._members[0], member) if self._members else 0
        self._members.append(member)
        return shared

    def dismiss(self, members: Sequence[Member]) -> None:
        """Jobs that go on no more leave."""
        if members:
            self._leave()
        self._members = [each for each in self._members if each not in members]

    # ---- while they train -------------------------------------------------------------------------------------------

    def step(self, asked: Sequence[Asked]) -> list[float | BaseException]:
        """Makes a step of several jobs. Returns each one's loss, or why its step was not made.

        If it raises, each makes its step alone this time: one that raises again has failed, and the others have not.
        """
        outcomes = self._tried(asked)
        if len(asked) > 1 and outcomes is None:
            outcomes = {}
            for each in asked:
                outcomes |= self._tried([each], last=True) or {}
        return [(outcomes or {})[each.member] for each in asked]

    def _tried(self, asked: Sequence[Asked], *, last: bool = False) -> dict[Member, float | BaseException] | None:
        """None if the step was not made, and may be made job by job."""
        try:
            return self._entered().step(asked)
        except _Spoiled as error:
            return dict.fromkeys((each.member for each in asked), error)
        except Exception as error:  # noqa: BLE001 - told as the failure of jobs
            alone = last or len(asked) == 1 or self._training is None
            return dict.fromkeys((each.member for each in asked), error) if alone else None

    def joined(self, member: Member) -> tuple[nn.Module, int]:
        """The model of all jobs on the device, and a job's number in it."""
        training = self._entered()
        return training.joined, training.members.index(member)

    def _entered(self) -> _Training:
        if self._training is None:
            self._training = _Training(self._members, self._gang)
        return self._training

    def _leave(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.close()


def _share(first: Member, member: Member) -> int:
    """Gives a job the first one's parameters in the place of frozen ones with the same name and bytes."""
    names: Mapping[str, nn.Parameter] = dict(first.model.named_parameters())
    found: dict[Tensor, nn.Parameter] = {}
    for name, own in member.model.named_parameters():
        other = names.get(name)
        if other is not None and own is not other and not member.optimizer.state.get(own) and _are_same(own, other):
            found[own] = other
    for module in member.model.modules():
        for key, parameter in module._parameters.items():
            if parameter in found:
                module._parameters[key] = found[parameter]
    for group in member.optimizer.param_groups:
        group["params"] = [found.get(each, each) for each in group["params"]]
    return sum(each.nbytes for each in found.values())


def _are_same(one: nn.Parameter, other: nn.Parameter) -> bool:
    is_frozen = not one.requires_grad and not other.requires_grad
    is_alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return is_frozen and is_alike and bytes_of(one) == bytes_of(other)
