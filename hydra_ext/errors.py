"""The errors of hydra_ext. Each message says what was asked, what was there, and what to do.

All of them derive from :class:`HydraError`, except running out of device memory. That is ``torch.OutOfMemoryError``,
as in plain PyTorch, with our explanation appended.

``torch.OutOfMemoryError`` and :class:`BudgetTooSmall` are RuntimeErrors with one argument that contains
``" out of memory."``. Tools that search for a batch size that fits look for such errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class HydraError(Exception):
    """Base of all errors of hydra_ext."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error's attributes along with its message, so that they reach other processes."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(cls: type[HydraError], args: tuple[Any, ...]) -> HydraError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class InvalidArgument(HydraError, TypeError, ValueError):
    """An argument has the wrong type or value. It is both a TypeError and a ValueError, as Python would raise."""


class InvalidBudget(HydraError, ValueError):
    """A budget is neither a positive number of bytes nor a text such as ``"8GiB"``."""


class InvalidDevice(HydraError, ValueError):
    """A device does not exist, or this build of hydra_ext cannot use it."""


class BudgetTooSmall(HydraError, ValueError, RuntimeError):
    """The budget cannot hold the largest block, or what a step needs at its neediest moment.

    ``offload(...)`` raises it before anything is changed, and ``plan.fit(...)`` before anything runs.

    Attributes:
        block: Name of the largest block, or of the module that needs the most.
        block_bytes: Device bytes that the block takes.
        needed: Smallest budget, in bytes, that can be entered at all. From ``offload``, activations come on top.
        smallest_budget: The same.
        moment: When it is needed, such as ``backward of layers.3``; None from ``offload``.
        terms: Bytes of each part of ``needed``; empty from ``offload``.
        ideal: Budget, in bytes, with which all activations and weights stay; None if it is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        block: str,
        block_bytes: int,
        needed: int,
        moment: str | None = None,
        terms: Mapping[str, int] | None = None,
        ideal: int | None = None,
    ) -> None:
        super().__init__(f"the device would run out of memory. {message}")
        self.block = block
        self.block_bytes = block_bytes
        self.needed = needed
        self.moment = moment
        self.terms = {} if terms is None else dict(terms)
        self.ideal = ideal

    @property
    def smallest_budget(self) -> int:
        return self.needed


class HostBudgetTooSmall(HydraError, ValueError):
    """The bytes that have to stay on the host are more than ``host_budget``. Nothing was changed.

    Attributes:
        needed: Smallest host budget, in bytes, that can be entered.
        smallest_budget: The same.
    """

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed

    @property
    def smallest_budget(self) -> int:
        return self.needed


class UnsupportedModel(HydraError, ValueError):
    """A model, a parameter or a combination cannot be offloaded or recomputed. The message names it and the remedy."""


class AlreadyOffloaded(HydraError, RuntimeError):
    """The model, or a part of it, is inside another offload context."""


class ModelChanged(HydraError, RuntimeError):
    """The model's parameters or modules are no longer those that the context was entered with."""


class InvalidSchedule(HydraError, ValueError):
    """A pipeline schedule cannot be made, read or run. The message names line and token, or rank and action."""


class UnsupportedOperation(HydraError, NotImplementedError):
    """An operation on a map cannot be computed in strips. Nothing was computed; the message names the operation.

    Attributes:
        operation: The operation's name in torch, such as ``aten.bmm.default``.
    """

    def __init__(self, message: str, *, operation: str) -> None:
        super().__init__(message)
        self.operation = operation


class StateError(HydraError, RuntimeError):
    """The present state does not allow a call, for example after the context has ended."""


class TenantsFailed(HydraError, RuntimeError):
    """Several functions that shared a device have raised.

    Attributes:
        errors: Their errors, by the function's place in the call.
    """

    def __init__(self, message: str, *, errors: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


class TransferError(HydraError, RuntimeError):
    """A copy between device and host failed. The operation that needed it can be tried again."""


class SpillError(HydraError, OSError):
    """The disk could not store or return bytes that do not fit on the host.

    The message has the folder, the number of bytes, the system's reason, and what to do.
    """


class PageFaultError(HydraError, RuntimeError):
    """An operation met an absent device parameter while the fault path is off."""


class BuildDiffers(HydraError, RuntimeError):
    """A model's constructor made another model than in its previous run."""


class WeightsError(HydraError, ValueError):
    """A file of weights is missing or damaged, or its tensors are not the model's.

    Attributes:
        file: Path of the file.
        tensor: Name of the tensor in the file. None if the error is not about one tensor.
    """

    def __init__(self, message: str, *, file: Path, tensor: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class PlanError(HydraError, ValueError):
    """A planner's arguments do not fit together, or have no solution. The message says why."""


class PlanDoesNotFit(PlanError):
    """No plan stays within the memory that was given.

    Attributes:
        stage: Stage that lacks the most memory in the plan that lacks the least.
        needed_bytes: Bytes that the stage takes there.
        limit_bytes: Bytes that the stage may hold.
    """

    def __init__(self, message: str, *, stage: int, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class NotOnFakeTensors(HydraError, RuntimeError):
    """A function cannot run on fake tensors, which have no numbers. Nothing was changed; the message says why.

    Attributes:
        reason: What asked for numbers, and the line of the user's code.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TraceFileError(HydraError, OSError):
    """The file of a trace or picture cannot be opened or written."""


class MissingDependency(HydraError, ImportError):
    """A library is not installed, or its version cannot be used. The message has the command that installs it."""


class InvalidOptimizer(HydraError, ValueError):
    """An optimizer of hydra_ext cannot work with an option, a parameter, a gradient or a saved state."""


class InvalidBound(HydraError, ValueError):
    """An error bound is negative or not finite."""


class DamagedStream(HydraError, ValueError):
    """A stream of compressed numbers is cut off, inconsistent, or of another version."""


class NonFiniteNorm(HydraError, RuntimeError):
    """The norm of the gradients is infinite or NaN, and ``error_if_nonfinite=True`` was given."""


class ReplicasDiffer(HydraError, ValueError):
    """Ranks that train together have different models, or have taken different steps. All ranks raise it.

    Attributes:
        rank: First rank that differs from rank 0. None if it is unknown.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailed(HydraError, RuntimeError):
    """Another rank has failed in a step that all ranks make together.

    Attributes:
        rank: Number of that rank; the last one if several have failed.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class SplitError(HydraError, RuntimeError):
    """A model cannot be cut into stages here, or does not run as it did in the rehearsal.

    The message gives the reason and the remedy. Nothing was computed wrongly: no loss and no gradient was returned.
    """


class CheckpointError(HydraError, RuntimeError):
    """A checkpoint is missing, damaged, or not made by hydra_ext. Nothing was loaded from it.

    Attributes:
        file: Path of the file or folder.
        tensor: Name of the tensor. None if the error is not about one tensor.
    """

    def __init__(self, message: str, *, file: Path, tensor: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class CheckpointUnavailable(CheckpointError):
    """Files of a checkpoint could not be opened. Their contents may still be good."""


class CheckpointRemoved(CheckpointUnavailable):
    """A checkpoint was removed before all the files that are needed from it were open."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} was removed while it was being opened, as saves with keep= remove older checkpoints: load again, "
            "or keep more of them",
            file=path,
        )


class TooManyFiles(CheckpointUnavailable):
    """The files of a checkpoint cannot all be open at once."""


class CheckpointMismatch(CheckpointError):
    """A whole checkpoint is of another model or another optimizer. Nothing was loaded from it.

    Attributes:
        differences: All differences, one line each.
    """

    def __init__(self, message: str, *, file: Path, differences: tuple[str, ...]) -> None:
        super().__init__(message, file=file)
        self.differences = differences


class UnsupportedState(HydraError, ValueError):
    """A checkpoint cannot hold a part of the training's state, which would be lost. Nothing was written."""


class SaveFailed(HydraError, RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged.

    Attributes:
        path: Folder of the checkpoints.
        needed_bytes: Bytes that the checkpoint takes, if the disk has too little room; otherwise None.
        free_bytes: Bytes that are free, if the disk has too little room; otherwise None.
    """

    def __init__(
        self, message: str, *, path: Path, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class CheckpointsInUse(SaveFailed):
    """Another process is saving into the same folder at this moment."""


class InvalidJob(HydraError, TypeError, ValueError):
    """A job of a fleet has an argument that is not as it should be, or a function that workers cannot find by name."""


class JobDoesNotFit(HydraError, ValueError):
    """No technique can train a job of a fleet on its devices. Nothing has run.

    Attributes:
        job: Name of the job.
        smallest_budget: Smallest budget of a device, in bytes, that would do; None if no budget would.
        reasons: Why not, by technique and number of devices.
    """

    def __init__(self, message: str, *, job: str, smallest_budget: int | None, reasons: Mapping[str, str]) -> None:
        super().__init__(message)
        self.job = job
        self.smallest_budget = smallest_budget
        self.reasons = dict(reasons)


class FleetInUse(HydraError, RuntimeError):
    """Another process runs a fleet in this folder, or its workers have not ended yet."""


class JournalError(HydraError, RuntimeError):
    """The journal of a fleet is missing, damaged, or of another fleet. Nothing was changed.

    Attributes:
        file: Path of the journal.
    """

    def __init__(self, message: str, *, file: Path) -> None:
        super().__init__(message)
        self.file = file


class JobFailed(HydraError, RuntimeError):
    """Jobs of a fleet were set aside. The others have ended, and their results are there.

    Attributes:
        failures: The last error of each such job, by its name.
    """

    def __init__(self, message: str, *, failures: Mapping[str, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class InvalidStage(HydraError, ValueError):
    """A stage of a data pipeline cannot run: other processes cannot load its function."""


class SampleTooLarge(HydraError, MemoryError):
    """A stage has made a sample that never has room in the memory that its workers share.

    Attributes:
        stage: Name of the stage.
        needed: Bytes of the sample.
        limit: Bytes that the workers share.
    """

    def __init__(self, message: str, *, stage: str, needed: int, limit: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.needed = needed
        self.limit = limit


class MemoryLimitTooSmall(HydraError, MemoryError):
    """The worker processes of a tuned pipeline take more than they may, with one worker for each stage.

    Attributes:
        needed: Bytes that they take, with room for two results.
        limit: Bytes that they may take.
    """

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class StageFailed(HydraError, RuntimeError):
    """The function of a stage has raised.

    The error of the function is its ``__cause__``, if it can be sent from one process to another.

    Attributes:
        stage: Name of the stage.
        number: The sample, as the stage counts them.
    """

    def __init__(self, message: str, *, stage: str, number: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.number = number


class WorkersDied(StageFailed):
    """Several workers of a stage have died of one sample."""
