"""Jobs of one process that make their steps together: those of :mod:`hydra_ext.fleet.techniques.common`.

Their loops take turns in one thread. What a job does outside of steps finds the random states and switches of the
process as the job left them. Switches have to be alike in all jobs, since steps are common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hydra_ext.fleet.cluster.training import Loop, Request, Steps, go_on
from hydra_ext.fleet.techniques import Gang, WontDo
from hydra_ext.fleet.techniques.common import Asked, Common, Member
from hydra_ext.runtime.rounds.isolation import Surroundings

_Result = TypeVar("_Result")


class _Participant:
    """One job's loop.

    Args:
        number: Of the job.
        make: Makes the loop.

    Attributes:
        number: Of the job.
        member: Its model and optimizer; None before they are built, and when it has ended.
        request: The step that it asks for; None if it has ended.
        error: Why it has ended; None if it made all its steps or was to stop.
        surroundings: Random states and switches of the process, as it left them.
    """

    def __init__(self, number: int, make: Callable[[], Loop], device: torch.device) -> None:
        self.number = number
        self.member: Member | None = None
        self.request: Request | None = None
        self.error: BaseException | None = None
        self.surroundings = Surroundings(device, host=True)
        self._make = make
        self._loop: Loop | None = None
        self._steps: Steps | None = None

    def open(self, common: Common, begun: float) -> None:
        self._steps = self._alone(lambda: self._opened(common, begun))

    def _opened(self, common: Common, begun: float) -> Steps:
        self._loop = loop = self._make()
        member = common.admit(loop.job)
        step = loop.open(member, "common base", begun)
        common.share(member)
        self.member = member
        return loop.steps(member, step)

    def ask(self) -> None:
        """Goes on to the first step that it asks for."""
        steps = self._steps
        self.request = None if steps is None else self._alone(lambda: next(steps, None))

    def go_on(self, outcome: float | BaseException) -> None:
        steps, self.request = self._steps, None
        if isinstance(outcome, BaseException):
            self.error = outcome
        elif steps is not None:
            self.request = self._alone(lambda: go_on(steps, outcome))

    def leave(self, common: Common) -> BaseException | None:
        """Keeps nothing alive. Returns why it has ended."""
        if self.member is not None:
            common.dismiss([self.member])
        if self._steps is not None:
            self._steps.close()
        if self._loop is not None:
            self._loop.close()
        error = self.error
        self.member = self.error = self._loop = self._steps = None
        return error

    def _alone(self, function: Callable[[], _Result]) -> _Result | None:
        """Calls a function with this job's random states and switches. What it raises is this job's failure alone."""
        self.surroundings.restore()
        try:
            return function()
        except BaseException as error:  # noqa: BLE001 - told as this job's failure
            self.error = error
            return None
        finally:
            self.surroundings.note()


def run_together(
    loops: Sequence[Callable[[], Loop]],
    gang: Gang,
    *,
    begun: float,
    ended: Callable[[int, BaseException | None], None],
) -> None:
    """Trains several jobs. Each has its own steps, checkpoints, evaluation and end.

    Args:
        loops: Each makes the loop of a job.
        begun: When the process has begun, by ``time.monotonic()``.
        ended: Called with a job's number, and with its error, when it has ended and the others go on.
    """
    going, flags = [_Participant(number, make, gang.device.torch_device) for number, make in enumerate(loops)], _flags()
    with Common(gang) as common:
        for each in going:
            each.open(common, begun)
        for each in going:
            each.ask()
        going = _without_ended(going, common, ended)
        while going:
            asked = [
                Asked(each.member, *each.request)
                for each in going
                if each.member is not None and each.request is not None
            ]
            are_like = _are_like(going) and _flags() == flags
            for each, outcome in zip(going, common.step(asked) if are_like else [_differ()] * len(asked), strict=True):
                each.go_on(outcome)
            going = _without_ended(going, common, ended)


def _are_like(going: Sequence[_Participant]) -> bool:
    """Whether losses find the switches of the process as their own job has left them."""
    return all(each.surroundings.has_switches_of(going[0].surroundings) for each in going)


def _flags() -> tuple[Any, ...]:
    """Switches that are not exchanged with the turns of the loops."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
    )


def _differ() -> BaseException:
    return WontDo(
        "its model or data set switches of the process, such as torch's default dtype, in another way than those of "
        "jobs with the same base"
    )


def _without_ended(
    going: Sequence[_Participant], common: Common, ended: Callable[[int, BaseException | None], None]
) -> list[_Participant]:
    for each in going:
        if each.request is None:
            ended(each.number, each.leave(common))
    return [each for each in going if each.request is not None]
