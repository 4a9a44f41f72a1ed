"""Jobs that train adapters of one frozen base make their steps together: a block of the base is fetched once for all.

Each job has a model, an optimizer and a schedule of its own. Frozen weights whose bytes are the same are one parameter
for all. Blocks at the same place of the models are *branches* of one block. So a step is one ``run.step`` over the
microbatches of all jobs: while a block is on the device, all of them use it.

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

from hydra_ext.blocks import StandIn, discover
from hydra_ext.checkpoint.format.tensors import bytes_of
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques.building import build_model
from hydra_ext.fleet.techniques.interface import Configuration, Gang, WontDo
from hydra_ext.fleet.techniques.offloading import Offloading
from hydra_ext.fleet.techniques.plain import LocalSession, evaluated
from hydra_ext.offload import offload
from hydra_ext.runtime.run import Run

_BLOCKS_PER_MODEL = 16
_BLOCKS_PER_BUDGET = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)


class CommonBase(Offloading):
    """``hydra_ext.offload`` of several jobs' models at once, of which the frozen weights are the same."""

    name = "common base"
    tenants = 8

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        return {**super().search(job, devices), **base_of(job)}


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


class _Branches(nn.Module):
    """Blocks at one place of several models, which are one block. A call names the model."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.of = nn.ModuleList(blocks)

    def forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        return self.of[number](*args, **kwargs)


class _Branch(StandIn):
    """Stands in a model for one of its blocks. Attributes are the block's."""

    def __init__(self, block: nn.Module, branches: _Branches, number: int) -> None:
        super().__init__()
        self._modules["block"] = block
        self.__dict__["call"] = lambda *args, **kwargs: branches(number, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._modules["block"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        block = self.__dict__.get("_modules", {}).get("block")
        if block is None or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(block, name, value)


class _Joined(nn.Module):
    """Models that share blocks. :meth:`parted` gives the models as they were.

    Args:
        sessions: Of the models.
        largest_bytes: Most bytes of a block, where modules allow it.
    """

    def __init__(self, sessions: Sequence[Member], *, largest_bytes: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList()  # before the models, whose modules lie in there
        self.models = nn.ModuleList([each.model for each in sessions])
        self.__dict__["sessions"] = sessions
        self.__dict__["places"] = []
        for path in _places(sessions[0].model, largest_bytes):
            self._join(path)

    def _join(self, path: str) -> None:
        blocks = [model.get_submodule(path) for model in self.models]
        own = list(dict.fromkeys(blocks))  # jobs whose models are made of the same modules share them already
        if len(own) == 1 < len(blocks):
            return
        branches = _Branches(own)
        stands = {block: _Branch(block, branches, number) for number, block in enumerate(own)}
        self.branches.append(branches)
        for model in self.models:
            for parent in list(model.modules()):
                for name, child in parent._modules.items():
                    if child in stands and not isinstance(parent, StandIn):
                        self.__dict__["places"].append((parent, name, child, stands[child]))
                        parent._modules[name] = stands[child]

    def forward(self, number: int, microbatch: Any) -> Tensor:
        loss: Tensor = self.__dict__["sessions"][number].loss(self.models[number], microbatch)
        return loss

    @contextmanager
    def parted(self) -> Iterator[None]:
        """While it lasts, the models have their own blocks. They cannot be called."""
        self.part()
        try:
            yield
        finally:
            for parent, name, _, stand in self.__dict__["places"]:
                parent._modules[name] = stand

    def part(self) -> None:
        for parent, name, block, _ in self.__dict__["places"]:
            parent._modules[name] = block


def _places(model: nn.Module, largest_bytes: int) -> list[str]:
    """The modules that are blocks with all that they contain: not those with parameters beside their children's."""
    sites = [site.name for site in discover(model, largest_bytes=largest_bytes).sites]
    return [name for name in sites if name and not any(each.startswith(f"{name}.") for each in sites)]


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
        with self._common.parted():
            super().save(folder, extra)

    def trained_parameters(self) -> list[Tensor]:
        """The optimizer's, without those that never get a gradient."""
        given = [each for group in self.optimizer.param_groups for each in group["params"]]
        return [each for each in given if each.requires_grad]


@dataclass(frozen=True)
class Asked:
    """A step that a job asks for."""

    member: Member
    microbatches: Sequence[Any]
    seeds: Sequence[int]


class _Updates(Optimizer):
    """Updates of those jobs that make the step. An error in one does not keep the others from theirs.

    Attributes:
        errors: Of updates of the last step.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__([{"params": member.trained_parameters()} for member in members], {})
        self._members: Sequence[Member] = ()
        self._drawn: Any = None
        self.errors: dict[Member, BaseException] = {}

    def begin(self, members: Sequence[Member]) -> None:
        """A step of these begins."""
        self._members = members
        self._drawn = _host_states()
        self.errors = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if _host_states() != self._drawn:
            raise WontDo(
                "the loss draws from the random numbers of Python or numpy, which jobs that make their steps together "
                "would take from each other"
            )
        for member in self._members:
            try:
                member.update()
            except Exception as error:  # noqa: BLE001 - told as this job's failure
                self.errors[member] = error


def _host_states() -> tuple[Any, bytes]:
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return (random.getstate(), kind, *rest), numpy.asarray(keys).tobytes()


class _Undo:
    """What a step that was not made has changed in modules: their buffers, and attributes that are plain values."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._constant: set[Tensor] = set()  # buffers that no step has changed
        self._buffers: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = []
        self._attributes: list[dict[str, Any]] = []

    def begin(self) -> None:
        self._buffers = [
            (module, name, buffer, buffer._version, None if buffer in self._constant else buffer.clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._attributes = [_plain_attributes(module) for module in self._modules]

    def end(self) -> None:
        """The step was made."""
        for module, name, buffer, version, _ in self._buffers:
            if module._buffers.get(name) is buffer and buffer._version == version:
                self._constant.add(buffer)

    @torch.no_grad()
    def put_back(self) -> bool:
        """Returns False if something cannot be put back."""
        for module, name, buffer, version, copy in self._buffers:
            if buffer._version != version:
                if copy is None:
                    return False
                buffer.copy_(copy)
            module._buffers[name] = buffer
        for module, before in zip(self._modules, self._attributes, strict=True):
            for name in _plain_attributes(module).keys() - before.keys():
                del module.__dict__[name]
            module.__dict__.update(before)
        return True


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if isinstance(value, _PLAIN)}


class _Training:
    """Some members' models on the device, from one joining or leaving to the next. Closed by :meth:`close`.

    Attributes:
        members: In the order of their numbers.
        joined: Their models.
        run: What trains them.
    """

    def __init__(self, members: Sequence[Member], device: Device) -> None:
        self.members = list(members)
        total = sum(each.nbytes for each in members[0].model.parameters())
        largest = min(total // _BLOCKS_PER_MODEL, device.budget // _BLOCKS_PER_BUDGET)
        self.joined = _Joined(self.members, largest_bytes=largest)
        self._updates = _Updates(self.members)
        self._undo = _Undo(self.joined)
        self._blamed: list[tuple[BaseException, Member]] = []  # whose loss has raised an error
        self._stack = ExitStack()
        self._stack.callback(self.joined.part)
        try:
            context = offload(
                self.joined,
                self._updates,
                budget=device.budget,
                device=device.given,
                blocks=list(self.joined.branches),
            )
            self.run: Run = self._stack.enter_context(context)
        except BaseException:  # re-raised: the models have no other owner yet
            self._stack.close()
            raise
        frozen = [each for each in members[0].model.parameters() if not each.requires_grad]
        self._base = {each: each._version for each in frozen}

    def close(self) -> None:
        self._stack.close()

    def step(self, asked: Sequence[Asked]) -> dict[Member, float | BaseException]:
        """Each one's loss, or why it was not updated. What else it raises may be undone by :meth:`forget`."""
        numbers = {member: number for number, member in enumerate(self.members)}
        self._blamed = []
        self._undo.begin()
        self._updates.begin([each.member for each in asked])
        output = self.run.step(
            [(numbers[each.member], one, len(each.microbatches)) for each in asked for one in each.microbatches],
            self._loss,
            reduction="sum",
            seeds=[seed for each in asked for seed in each.seeds],
        )
        self._undo.end()
        if any(each._version != version for each, version in self._base.items()):
            raise WontDo("a job writes to frozen weights, which other jobs have too")
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
        except BaseException as error:
            self._blamed.append((error, self.members[number]))
            raise

    def forget(self, error: BaseException | None) -> Member | None:
        """Undoes a step that has failed, if one job's loss is to blame: the others may make it again.

        Returns:
            The job; None if none is to blame alone, or if the step cannot be undone.
        """
        guilty = None
        while error is not None and guilty is None:
            guilty = next((member for known, member in self._blamed if known is error), None)
            error = error.__cause__ or error.__context__
        self.run.sync()
        self._updates.zero_grad()
        return guilty if self._undo.put_back() else None


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
        """Makes a job take part. Its weights have their numbers. Returns the bytes that it shares with the others.

        Raises:
            WontDo: It trains weights of another job.
        """
        self._leave()
        others = {each for other in self._members for each in other.model.parameters() if each.requires_grad}
        if others & set(member.model.parameters()):
            raise WontDo("its model has weights that another job trains: let each job build weights of its own")
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

        Others make theirs if one job's loss or update raises. Any other error is all jobs' error. So is that of a loss
        after modules have changed in a way that cannot be undone.
        """
        outcomes: dict[Member, float | BaseException] = {}
        left = list(asked)
        while left:
            training: _Training | None = None
            try:
                training = self._entered()
                outcomes |= training.step(left)
                break
            except Exception as error:  # noqa: BLE001 - told as the failure of jobs
                guilty = None if training is None else training.forget(error)
                failed = [each.member for each in left if guilty in (None, each.member)]
                outcomes |= dict.fromkeys(failed, error)
                left = [each for each in left if each.member not in failed]
        return [outcomes[each.member] for each in asked]

    def joined(self, member: Member) -> tuple[nn.Module, int]:
        """The model of all jobs on the device, and a job's number in it."""
        training = self._entered()
        return training.joined, training.members.index(member)

    @contextmanager
    def parted(self) -> Iterator[None]:
        """While it lasts, the jobs' models are as they were built, with all numbers on the host."""
        if self._training is None:
            yield
            return
        self._training.run.sync()
        with self._training.joined.parted():
            yield

    def _entered(self) -> _Training:
        if self._training is None:
            self._training = _Training(self._members, self._gang.device)
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
