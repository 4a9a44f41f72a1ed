"""Work that all ranks of a pipeline do together between two steps; each learns of the others' errors.

Unlike an error in a step, an error here does not end the pipeline: no microbatch or update is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from hydra_ext.errors import RankFailed
from hydra_ext.pipeline.ranks.watch import Watch, describe_error

Result = TypeVar("Result")


class Together:
    """Runs such work. All ranks have to call the same methods in the same order."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._count = 0
        self._left: list[str] = []  # meetings whose values the store may still have

    @property
    def rank(self) -> int:
        return self._watch.rank

    @property
    def all_live(self) -> bool:
        """Whether no rank is known to have failed or fallen silent."""
        return self._watch.failure is None

    def do(self, what: str, work: Callable[[], Result]) -> list[Result]:
        """Runs ``work`` on each rank; returns all ranks' results, by rank, as JSON gives them back.

        Args:
            what: The purpose, for messages: "to save a checkpoint".
            work: The function. It must not wait for other ranks.

        Raises:
            RankFailed: Another rank has failed. An error of this rank's own work is raised as it is.
        """
        try:
            result = work()
        except BaseException as error:  # re-raised, once the others know
            with suppress(RankFailed):
                self._meet(what, {"error": describe_error(error)})
            raise
        answers = self._meet(what, {"result": result})
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankFailed(
                    f"rank {rank} has failed {what}, and so this one has, too: {answer['error']}", rank=rank
                )
        return [answer["result"] for answer in answers]

    def first_does(self, what: str, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on the first rank only; returns its result on all ranks."""
        found: Any = self.do(what, work if self.rank == 0 else lambda: None)
        result: Result = found[0]
        return result

    def collect(self, what: str, says: Any) -> list[Any]:
        """Returns what every rank says on the first rank, and an empty list on the others."""
        return self._meet(what, says, only_first_hears=True)

    def _meet(self, what: str, says: Any, *, only_first_hears: bool = False) -> list[Any]:
        self._count += 1
        where = f"{what} ({self._count})"
        try:
            answers = self._watch.meet(where, says, only_first_hears=only_first_hears)
        except BaseException as error:  # re-raised: the others cannot be sure to meet this rank again
            self._watch.told = True
            self._watch.fail_with(error)
            raise
        for each in self._left:  # all ranks have come to this meeting, and so have left those
            self._watch.forget(each)
        self._left = [where]
        return answers
