"""Jobs of one process that make their steps together: those of :mod:`hydra_ext.fleet.techniques.common`.

Their loops take turns in one thread. Each has the random states and switches of the process to itself, as it left them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hydra_ext.fleet.cluster.training import Loop, Request, Steps, go_on
from hydra_ext.fleet.techniques import Gang
from hydra_ext.fleet.techniques.common import Asked, Common, Member
from hydra_ext.runtime.rounds.isolation import Surroundings

_Result = TypeVar("_Result")


class _Participant:
    """One job's loop.

    Attributes:
        member: Its model and optimizer; None before they are built.
        request: The step that it asks for; None if it has ended.
        error: Why it has ended; None if it made all its steps or was to stop.
    """

    def __init__(self, loop: Loop, device: torch.device) -> None:
        self.loop = loop
        self.member: Member | None = None
        self.request: Request | None = None
        self.error: BaseException | None = None
        self._steps: Steps | None = None
        self._surroundings = Surroundings(device, host=True)

    def begin(self, common: Common, begun: float) -> None:
        self.member = self._alone(lambda: common.admit(self.loop.job))
        if self.member is None:
            return
        member = self.member
        step = self._alone(lambda: self.loop.open(member, "common base", begun))
        if step is None or self._alone(lambda: common.share(member)) is None:
            return
        self._steps = self.loop.steps(member, step)

    def ask(self) -> None:
        """Goes on to the first step that it asks for."""
        steps = self._steps
        self.request = None if steps is None else self._alone(lambda: next(steps, None))

    def go_on(self, outcome: float | BaseException) -> None:
        steps = self._steps
        if isinstance(outcome, BaseException) or steps is None:
            self.error, self.request = outcome if isinstance(outcome, BaseException) else None, None
            return
        self.request = self._alone(lambda: go_on(steps, outcome))

    def _alone(self, function: Callable[[], _Result]) -> _Result | None:
        """Calls a function with this job's random states and switches. What it raises is this job's failure alone."""
        self._surroundings.restore()
        try:
            return function()
        except BaseException as error:  # noqa: BLE001 - told as this job's failure
            self.error = error
            return None
        finally:
            self._surroundings.note()


def run_together(
    loops: Sequence[Loop], gang: Gang, *, begun: float, ended: Callable[[int, BaseException | None], None]
) -> None:
    """Trains several jobs. Each has its own steps, checkpoints, evaluation and end.

    Args:
        begun: When the process has begun, by ``time.monotonic()``.
        ended: Called with a job's number, and with its error, when it has ended and the others go on.
    """
    every = [_Participant(loop, gang.device.torch_device) for loop in loops]
    with Common(gang) as common:
        for each in every:
            each.begin(common, begun)
        for each in every:
            each.ask()
        going = _without_ended(every, every, common, ended)
        while going:
            asked = [
                Asked(each.member, *each.request)
                for each in going
                if each.member is not None and each.request is not None
            ]
            for each, outcome in zip(going, common.step(asked), strict=True):
                each.go_on(outcome)
            going = _without_ended(every, going, common, ended)


def _without_ended(
    every: Sequence[_Participant],
    going: Sequence[_Participant],
    common: Common,
    ended: Callable[[int, BaseException | None], None],
) -> list[_Participant]:
    gone = [each for each in going if each.request is None]
    common.dismiss([each.member for each in gone if each.member is not None])
    for each in gone:
        each.loop.close()
        ended(every.index(each), each.error)
        each.error = None
    return [each for each in going if each.request is not None]
