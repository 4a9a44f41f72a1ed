"""Schedules and what one rank gets of them, step after step."""

from __future__ import annotations

from hydra_ext import _C
from hydra_ext._C import Action

KINDS = ("gpipe", "1f1b", "interleaved", "2bw", "pipedream")
"""The built-in kinds; :func:`make` says what they are."""

Stream = _C.ScheduleStream
"""What one rank does, in order, with batches counted from the start of training.

``next_batch(microbatches)`` is the step of the next batch. ``drain()`` is what is left of the batches so far, updates
included; nothing where the schedule flushes. After a drain the next batch fills the pipeline anew, and uses the version
that it would use without it. ``batches`` is the number of the next batch. Owned by one thread.
"""


class Schedule:
    """What every rank does in one step; immutable. Made by :func:`make`."""

    def __init__(self, core: _C.Schedule) -> None:
        self._core = core

    # ---- what it says -----------------------------------------------------------------------------------------------

    @property
    def stages(self) -> int:
        return self._core.stages

    @property
    def ranks(self) -> int:
        return self._core.ranks

    @property
    def microbatches(self) -> int:
        """Of the batch that the bodies are written for."""
        return self._core.microbatches

    @property
    def kind(self) -> str | None:
        """One of :data:`KINDS`; None for a user's own."""
        return self._core.recipe

    @property
    def version_rule(self) -> str:
        """``"flush"``, ``"delay-1"``, ``"stashing"`` or ``"vertical-sync"``: see :meth:`version_of`."""
        return self._core.rule

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each stage: versions of its weights that are held. The next update writes over the oldest."""
        return tuple(self._core.buffers(stage) for stage in range(self.stages))

    @property
    def flushes(self) -> bool:
        """Whether a step leaves nothing behind: no microbatch in flight, no update to come."""
        return self._core.flushes

    @property
    def communicates(self) -> bool:
        """Whether sends and receives are written in the bodies; else :meth:`stream` and :meth:`unroll` add them."""
        return self._core.communicates

    def body(self, rank: int) -> list[Action]:
        """The rank's actions in one step, with batches counted from that of the step: 0, -1, ..."""
        return self._core.body(rank)

    def stage_rank(self, stage: int) -> int:
        """Where the stage lives."""
        return self._core.rank_of(stage)

    def stages_of(self, rank: int) -> list[int]:
        """In the order of the model."""
        return self._core.stages_of(rank)

    def version_of(self, stage: int, batch: int) -> int:
        """The version that forward and backward of all the batch's microbatches use on the stage.

        Of batch t, on stage s of S: t under ``flush``, max(t - 1, 0) under ``delay-1``, max(t - (S - 1 - s), 0) under
        ``stashing``, max(t - (S - 1), 0) under ``vertical-sync``.
        """
        return self._core.version_of(stage, batch)

    def __eq__(self, other: object) -> bool:
        """By what the bodies say, however they were made."""
        return isinstance(other, Schedule) and self._core == other._core

    def __hash__(self) -> int:
        return hash((self.stages, self.ranks, self.microbatches, self.version_rule, tuple(self.body(0))))

    # ---- what comes of it -------------------------------------------------------------------------------------------

    def with_communication(self) -> Schedule:
        """With sends and receives in the bodies.

        A receive comes before the forward or backward that precedes the one that needs it, so that values travel
        while that one computes; the first of a body comes first of all. Each direction of each hop is a queue of its
        own, with one order on both its ends.
        """
        return Schedule(self._core.with_communication())

    def stream(self, rank: int) -> Stream:
        """What the rank does from the first batch on, communication included.

        Batches may be of any size under a built-in schedule that flushes, and under ``2bw`` with one stage a rank;
        ``next_batch`` of another size raises InvalidSchedule for all others.
        """
        return self._core.stream(rank)

    def unroll(self, batches: int) -> list[list[Action]]:
        """Of each rank: all it does in so many steps and a drain, communication included."""
        return self._core.unroll(batches)


def make(
    kind: str, *, stages: int, microbatches: int, ranks: int | None = None, vertical_sync: bool = False
) -> Schedule:
    """A built-in schedule. Stage s lives on rank s % ranks.

    - ``gpipe``: all forwards, then all backwards, then the update. With more stages than ranks, each rank runs one
      stage for all microbatches before its next (Harmony's wrapped pipeline), so that weights move twice a batch.
    - ``1f1b``: at most ``stages - s`` microbatches in flight at stage s; empties at the end of every batch
      (PipeDream-Flush). Same numbers and same time as ``gpipe``, less memory.
    - ``interleaved``: ``1f1b`` with several stages a rank and a shorter bubble (Narayanan et al., SC'21).
    - ``2bw``: never empties; batch t uses W(max(t - 1, 0)), two versions on every stage (PipeDream-2BW, ICML'21).
      Needs at least ``ranks - 1`` microbatches a batch.
    - ``pipedream``: never empties; one microbatch is a batch and makes an update; stage s keeps ``stages - s`` versions
      (weight stashing, SOSP'19), or all ``stages`` with ``vertical_sync``.

    Args:
        microbatches: a batch.
        ranks: as many as stages unless given; a divisor of ``stages``.
        vertical_sync: ``pipedream`` only: every stage uses the version that stage 0 uses.

    Raises:
        InvalidSchedule: unknown kind, or numbers that the kind cannot do.
    """
    core = _C.make_schedule(
        kind,
        stages=stages,
        ranks=stages if ranks is None else ranks,
        microbatches=microbatches,
        vertical_sync=vertical_sync,
    )
    return Schedule(core)
