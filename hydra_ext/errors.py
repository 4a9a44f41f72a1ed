"""The errors of hydra_ext: each says what was asked, what was there, and what to do.

One tree under :class:`HydraError`. Running out of device memory is not in it: it is ``torch.OutOfMemoryError``, as
with plain PyTorch, with our explanation appended.

That error and :class:`BudgetTooSmall` are RuntimeErrors with one argument that contains ``" out of memory."``: what
tools that look for a batch size that fits ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class HydraError(Exception):
    """Base of all errors of hydra_ext."""

    def __reduce__(self) -> tuple[Any, ...]:
        """What an error carries beside its message goes with it to other processes."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(cls: type[HydraError], args: tuple[Any, ...]) -> HydraError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class InvalidArgument(HydraError, TypeError, ValueError):
    """An argument of another type, or with another value, than can be used: whichever of the two Python would raise."""


class InvalidBudget(HydraError, ValueError):
    """A budget that is not a positive number of bytes, nor a text such as ``"8GiB"``."""


class InvalidDevice(HydraError, ValueError):
    """A device that is not there, or that this build of hydra_ext cannot use."""


class BudgetTooSmall(HydraError, ValueError, RuntimeError):
    """The budget cannot hold the largest block. Raised when wrapping, before anything is changed.

    Attributes:
        block: name of the largest block.
        block_bytes: device bytes it takes.
        needed: the smallest budget, in bytes, that can be entered at all; activations come on top.
        smallest_budget: the same.
    """

    def __init__(self, message: str, *, block: str, block_bytes: int, needed: int) -> None:
        super().__init__(f"the device would run out of memory. {message}")
        self.block = block
        self.block_bytes = block_bytes
        self.needed = needed

    @property
    def smallest_budget(self) -> int:
        return self.needed


class HostBudgetTooSmall(HydraError, ValueError):
    """What has to stay on the host takes more than ``host_budget``. Nothing was changed.

    Attributes:
        needed: the smallest one, in bytes, that would do.
        smallest_budget: the same.
    """

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed

    @property
    def smallest_budget(self) -> int:
        return self.needed


class UnsupportedModel(HydraError, ValueError):
    """A model, a parameter or a combination that cannot be offloaded or recomputed; the message names it, and what to
    do."""


class AlreadyOffloaded(HydraError, RuntimeError):
    """The model, or a part of it, is inside another offload context."""


class ModelChanged(HydraError, RuntimeError):
    """The model's parameters or modules are no longer what the context was entered with."""


class InvalidSchedule(HydraError, ValueError):
    """A pipeline schedule that cannot be made, read or run; the message names line and token, or rank and action."""


class UnsupportedOperation(HydraError, NotImplementedError):
    """An operation on a map that cannot be made in strips; nothing was computed. The message names it.

    Attributes:
        operation: its name in torch, such as ``aten.bmm.default``.
    """

    def __init__(self, message: str, *, operation: str) -> None:
        super().__init__(message)
        self.operation = operation


class StateError(HydraError, RuntimeError):
    """A call that the present state does not allow, for example after the context has ended."""


class TransferError(HydraError, RuntimeError):
    """A copy between device and host failed. The operation that needed it can be tried again."""


class SpillError(HydraError, OSError):
    """The disk could not keep, or give back, what the host has no room for. The message has the folder, how many bytes,
    the system's reason, and what to do."""


class PageFaultError(HydraError, RuntimeError):
    """An operation met an absent device parameter while the fault path is off."""


class BuildDiffers(HydraError, RuntimeError):
    """A model's constructor made something else than when it ran before."""


class WeightsError(HydraError, ValueError):
    """A file of weights is missing or damaged, or what is in it is not what the model has.

    Attributes:
        file: which.
        tensor: the tensor's name in it, where it is about one.
    """

    def __init__(self, message: str, *, file: Path, tensor: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class PlanError(HydraError, ValueError):
    """What was asked of a planner makes no sense, or has no solution; the message says why."""


class PlanDoesNotFit(PlanError):
    """No plan stays within the memory that was given.

    Attributes:
        stage: the one that lacks most where as little as possible is lacking.
        needed_bytes: that it takes.
        limit_bytes: that it may hold.
    """

    def __init__(self, message: str, *, stage: int, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class TraceFileError(HydraError, OSError):
    """The file of a trace or picture cannot be opened, or not be written."""


class MissingDependency(HydraError, ImportError):
    """Something needs a library that is not installed, or not in a version that can be used; the message says what
    installs it."""


class InvalidOptimizer(HydraError, ValueError):
    """An option, a parameter, a gradient or a saved state that an optimizer of hydra_ext cannot work with."""


class InvalidBound(HydraError, ValueError):
    """An error bound that is negative or not finite."""


class DamagedStream(HydraError, ValueError):
    """Bytes that are no whole stream of compressed numbers: cut off, inconsistent, or of another version."""


class NonFiniteNorm(HydraError, RuntimeError):
    """The norm of the gradients is infinite or NaN, and clipping was told not to go on then."""


class ReplicasDiffer(HydraError, ValueError):
    """The ranks that train together do not have the same model, or are not at the same place. Raised on all of them.

    Attributes:
        rank: the first that differs from rank 0, where that is known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailed(HydraError, RuntimeError):
    """Another rank has failed in a step that all of them make together.

    Attributes:
        rank: which; the last of them if several have.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class SplitError(HydraError, RuntimeError):
    """A model that cannot be cut into stages here, or that does not run as it did when it was rehearsed.

    The message gives the reason and the way out. Nothing was computed wrongly: no loss was returned, and no gradient.
    """


class CheckpointError(HydraError, RuntimeError):
    """A checkpoint that is not there, is damaged, or was not made by hydra_ext; nothing of it was taken.

    Attributes:
        file: which file, or folder.
        tensor: the tensor's name, where it is about one.
    """

    def __init__(self, message: str, *, file: Path, tensor: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class CheckpointUnavailable(CheckpointError):
    """Files of a checkpoint could not be opened, which tells nothing against what is in them."""


class CheckpointRemoved(CheckpointUnavailable):
    """A checkpoint was removed before all files of it were open that are needed."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} was removed while it was being opened, as saves with keep= remove older checkpoints: load again, "
            "or keep more of them",
            file=path,
        )


class TooManyFiles(CheckpointUnavailable):
    """The files of a checkpoint cannot all be open at once."""


class CheckpointMismatch(CheckpointError):
    """A whole checkpoint, of another model or another optimizer; nothing of it was taken.

    Attributes:
        differences: all of them, a line each.
    """

    def __init__(self, message: str, *, file: Path, differences: tuple[str, ...]) -> None:
        super().__init__(message, file=file)
        self.differences = differences


class UnsupportedState(HydraError, ValueError):
    """Something of a training that no checkpoint can hold, so that it would be lost; nothing was written."""


class SaveFailed(HydraError, RuntimeError):
    """A checkpoint could not be written. Those that were there before are as they were.

    Attributes:
        path: of the folder.
        needed_bytes, free_bytes: where there is not enough room; else None.
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
