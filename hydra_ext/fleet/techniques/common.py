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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_ext import _C
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
from hydra_ext.runtime.run import Run


class CommonBase(Offloading):
    """``hydra_ext.offload`` of several jobs' models at once, of which the frozen weights are the same."""

    name = "common base"
    tenants = 8

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        model = build_model(job)
        base = base_of(job, model)
        _expect_places(model, devices[0].budget)
        return {**super().search(job, devices), **base}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        """A job alone, as in trials: what it does is what it would do beside others."""
        with Common(gang) as common:
            member = common.admit(job)
            common.share(member)
            common.joined(member)  # what this takes is a part of the opening
            yield member


def base_of(job: Job, model: nn.Module) -> dict[str, Any]:
    """What tells whether jobs have one base: the digest of the frozen weights, and whether they are drawn by the seed.

    Args:
        model: The job's.

    Raises:
        WontDo: No weights are frozen, or they are on meta.
    """
    digest = _digest(model)
    return {"base": digest, "seeded": _digest(build_model(replace(job, seed=job.seed + 1))) != digest}


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


def _expect_places(model: nn.Module, budget: int) -> None:
    """
    Raises:
        WontDo: Jobs could not share the blocks of such a model.
    """
    if next(model.parameters(recurse=False), None) is not None:
        raise WontDo("the model itself has weights beside those of its modules: its blocks cannot be shared")
    total = sum(each.nbytes for each in model.parameters())
    for name in _places(model, block_limit(total, budget)):
        size = sum(each.nbytes for each in model.get_submodule(name).parameters())
        if size > budget // 2:
            raise WontDo(f"'{name}' has weights beside those of its modules, and {size} bytes would move as one block")


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
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        model, number = self._common.joined(self)
        found = evaluated(self.model, lambda each: model(number, each), microbatches)
        self._common.expect_same_base()
        return found

    def save(self, folder: Path, extra: Any) -> None:
        self._common.expect_same_base()  # with all numbers at home
        super().save(folder, extra)

    def load(self, folder: Path) -> tuple[int, Any] | None:
        self._common.leave()
        return super().load(folder)

    def trained_parameters(self) -> list[Tensor]:
        """
        Raises:
            WontDo: The optimizer does not have them all.
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


class Beside(Exception):
    """Another job has failed in a common step. This one is not to blame, and goes on from its newest checkpoint."""


class _Base:
    """The frozen weights, which all jobs have. None of them may change one."""

    def __init__(self, members: Sequence[Member]) -> None:
        frozen = [each for member in members for each in member.model.parameters() if not each.requires_grad]
        self._versions = {each: each._version for each in frozen}
        self._digests = {each: _digest_of(each) for each in self._versions if each.numel()}

    def expect_same(self, *, numbers: bool = False) -> None:
        """
        Args:
            numbers: Whether all numbers are compared. Otherwise a write through ``.data`` is not seen.

        Raises:
            WontDo: One was changed, or is trained now.
        """
        if any(each._version != version for each, version in self._versions.items()) or (
            numbers and any(not digest.equals(_digest_of(each)) for each, digest in self._digests.items())
        ):
            raise WontDo("a job writes to frozen weights, which other jobs have too")
        if any(each.requires_grad or each.grad is not None for each in self._versions):
            raise WontDo("a job trains weights that were frozen when it began, which other jobs have too")


def _digest_of(tensor: Tensor) -> _C.SavedDigest:
    digest = _C.SavedDigest([])
    digest.add(tensor.detach().unsqueeze(0))
    return digest


class _Updates(Optimizer):
    """Updates and schedules of those jobs that make the step. An error in one does not keep the others from theirs.

    Attributes:
        errors: Of the last step.
    """

    def __init__(self, members: Sequence[Member], base: _Base) -> None:
        super().__init__([{"params": member.trained_parameters()} for member in members], {})
        self._members: Sequence[Member] = ()
        self._base = base
        self._drawn: Any = None
        self.errors: dict[Member, BaseException] = {}

    def begin(self, members: Sequence[Member]) -> None:
        """A step of these begins."""
        self._members = members
        self._drawn = _host_states()
        self.errors = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base.expect_same()
        if _host_states() != self._drawn:
            raise WontDo(
                "a loss draws from the random numbers of Python or numpy, which jobs that make their steps together "
                "would take from each other"
            )
        before = _all_states()
        for member in self._members:
            try:
                member.update()
            except Exception as error:  # noqa: BLE001 - told as this job's failure
                self.errors[member] = error
        if _all_states() != before:
            raise WontDo("an optimizer or a schedule draws random numbers, which jobs would take from each other")
        self._base.expect_same()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: each job's own optimizer has done it."""


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
        self.base = _Base(self.members)
        self._updates = _Updates(self.members, self.base)
        self._blamed: int | None = None  # number of the job whose loss has raised
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
        """Each one's loss, or why it was not updated. After any other error no job can go on from here."""
        numbers = {member: number for number, member in enumerate(self.members)}
        self._blamed = None
        self._updates.begin([each.member for each in asked])
        output = self.run.step(
            [(numbers[each.member], one, len(each.microbatches)) for each in asked for one in each.microbatches],
            self._loss,
            reduction="sum",
            seeds=[seed for each in asked for seed in each.seeds],
        )
        losses = iter(output.metrics)
        found: dict[Member, float | BaseException] = {}
        for each in asked:
            own = torch.stack([next(losses) for _ in each.microbatches])
            found[each.member] = self._updates.errors.get(each.member) or float(own.mean())
        return found

    def _loss(self, given: tuple[int, Any, int]) -> tuple[Tensor, Tensor]:
        number, microbatch, count = given
        try:
            loss: Tensor = self.joined(number, microbatch)
            return (loss / count).reshape(()), loss
        except Exception:
            self._blamed = number
            raise
        except SystemExit as error:  # of a job, and not of the process
            self._blamed = number
            raise RuntimeError(f"the loss has raised SystemExit({error.code!r})") from error

    def outcome(self, member: Member, error: BaseException) -> BaseException:
        """What a job is told after a step that has failed. If no loss is to blame, all jobs are."""
        if self._blamed is None or self.members[self._blamed] is member:
            return error
        return Beside(f"a job with the same base has failed: {type(error).__name__}: {error}")


class Common:
    """Jobs in one process on one device that have one base. Closed by leaving its context.

    The jobs' models, optimizers and schedules are plain objects on the host. The first step or evaluation offloads the
    models that are there. When a job comes or leaves, they are on the host again.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._members: list[Member] = []
        self._training: _Training | None = None
        self._spoiled: WontDo | None = None  # why no job can go on

    def __enter__(self) -> Common:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def run(self) -> Run | None:
        """What trains the models now; None between two sets of jobs."""
        return None if self._training is None else self._training.run

    def admit(self, job: Job) -> Member:
        """Builds a job's model, optimizer and schedule. :meth:`share` makes it take part."""
        self.leave()
        return Member(job, self._gang.device, self)

    def share(self, member: Member) -> int:
        """Makes a job take part. Returns the bytes that it shares with the others.

        Raises:
            WontDo: It has modules or weights that another job changes, or more than its optimizer trains.
        """
        self.leave()
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
            self.leave()
        self._members = [each for each in self._members if each not in members]

    # ---- while they train -------------------------------------------------------------------------------------------

    def step(self, asked: Sequence[Asked]) -> list[float | BaseException]:
        """Makes a step of several jobs. Returns each one's loss, or why it ends.

        An update or a schedule that raises is its own job's failure. Any other error ends all jobs: what the step has
        changed in modules cannot be undone for certain.
        """
        training: _Training | None = None
        try:
            training = self._entered()
            found = training.step(asked)
        except Exception as error:  # noqa: BLE001 - told as the failure of jobs
            return [error if training is None else training.outcome(each.member, error) for each in asked]
        return [found[each.member] for each in asked]

    def expect_same_base(self) -> None:
        """Brings all numbers home, and compares those that all jobs have.

        Raises:
            WontDo: A job has written to frozen weights.
        """
        if self._training is not None and self._spoiled is None:
            self._training.run.sync()
            try:
                self._training.base.expect_same(numbers=True)
            except WontDo as error:
                self._spoiled = error
        if self._spoiled is not None:
            raise self._spoiled

    def joined(self, member: Member) -> tuple[nn.Module, int]:
        """The model of all jobs on the device, and a job's number in it."""
        training = self._entered()
        return training.joined, training.members.index(member)

    def _entered(self) -> _Training:
        if self._spoiled is not None:
            raise self._spoiled
        if self._training is None:
            self._training = _Training(self._members, self._gang)
        return self._training

    def leave(self) -> None:
        """Has the models on the host again, until the next step or evaluation."""
        with suppress(WontDo):  # it is kept, and raised where a job goes on
            self.expect_same_base()
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
