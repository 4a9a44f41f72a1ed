"""Schedules and what one rank gets of them, step after step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydra_ext import _C
from hydra_ext._C import Action, Verification
from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule.simulation import Simulation, per_place

KINDS = ("gpipe", "1f1b", "interleaved", "2bw", "pipedream")
"""The built-in kinds; :func:`make` says what they are."""

Stream = _C.ScheduleStream
"""What one rank does, in order, with batches counted from the start of training.

``next_batch(microbatches)`` is the step of the next batch. ``drain()`` is what is left of the batches so far, updates
included; nothing where the schedule flushes. After a drain the next batch fills the pipeline anew, and uses the version
that it would use without it. ``batches`` is the number of the next batch. ``evaluation(batch, microbatches=...)`` is
the forwards alone of a batch that is not trained with, whose number is below 0; they use the newest version. Owned by
one thread.
"""


class Schedule:
    """What every rank does in one step; immutable. Made by :func:`make` or :meth:`parse`."""

    def __init__(self, core: _C.Schedule) -> None:
        self._core = core

    @staticmethod
    def parse(text: str) -> Schedule:
        """A user's own schedule, or one that was stored. ``Schedule.parse(schedule.text) == schedule``.

        The first line has the numbers and the version rule (:meth:`version_of`), then each rank has a line. An action
        is a letter, the stage, a point and the microbatch, and how many batches before that of the step, where it is
        not of that one. ``#`` begins a comment. ::

            hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=delay-1
            rank 0: U0-2 F0.0 B0.2-1 R0-1 F0.1 B0.0 F0.2 B0.1
            rank 1: U1-2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 R1

        ``F`` is a forward, ``B`` a backward, ``R`` says that a batch's gradients of the stage are complete and their
        sums over ranks begin, ``U`` waits for these and updates the stage. ``BU`` says from where on the update may be
        made behind other actions. ``SF`` and ``RF`` send and receive what the next stage's forward needs, ``SB`` and
        ``RB`` the gradients that come back, named after the stage that does it. Where there is no ``BU`` at all, or no
        send and receive, they are added. A stage lives on the rank whose line has its actions.

        Raises:
            InvalidSchedule: with line and word. Whether the schedule can run is what :meth:`verify` says.
        """
        return Schedule(_C.parse_schedule(text))

    @property
    def text(self) -> str:
        """As :meth:`parse` reads it; also ``str(schedule)``."""
        return self._core.text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        header = self.text.partition("\n")[0].removeprefix("hydra-schedule 1 ")
        return f"<Schedule {self.kind or 'of its own'} {header}>"

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
        return hash(self._core)

    # ---- what comes of it -------------------------------------------------------------------------------------------

    def with_communication(self) -> Schedule:
        """With sends and receives in the bodies, as a user's own schedule: for batches of one size. The begins of
        updates are written there too.

        A receive comes before the forward or backward that precedes the one that needs it, so that values travel
        while that one computes; the first of a body comes first of all. Each direction of each hop is a queue of its
        own, with one order on both its ends.
        """
        return Schedule(self._core.with_communication())

    def stream(self, rank: int, *, first_batch: int = 0) -> Stream:
        """What the rank does from the first batch on, begins of updates and communication included.

        Args:
            first_batch: its number, where a training goes on that has made the updates of all batches before it.

        Batches may be of any size under a built-in schedule that flushes, and under ``2bw`` with one stage a rank;
        ``next_batch`` of another size raises InvalidSchedule for all others.
        """
        return self._core.stream(rank, first_batch=first_batch)

    def unroll(self, batches: int) -> list[list[Action]]:
        """Of each rank: all it does in so many steps and a drain, begins of updates and communication included."""
        return self._core.unroll(batches)

    def verify(
        self, *, in_flight: int | None = None, versions: int | None = None, gradients: int | None = None
    ) -> Verification:
        """Runs through whole batches and a drain.

        Every forward and backward is there once, in an order that the stages allow; ranks do not block each other,
        also where updates wait for the reductions of all stages (a norm over the whole model); both ends of every hop
        name microbatches in the same order; the version that a microbatch uses is there for its forward and not
        written over before its backward; updates come in the order of batches, after their reductions, and begin where
        nothing uses the memory that they write to.

        Args:
            in_flight: microbatches that a stage may have between forward and backward at most; any number if None.
            versions: of a stage's weights that may be held at most, likewise.
            gradients: batches that a stage may have gradients of at most, likewise.

        Returns:
            The peaks of these, per stage and per rank.

        Raises:
            InvalidSchedule: what is wrong, where, why.
        """
        return self._core.verify(in_flight=in_flight, versions=versions, gradients=gradients)

    def verify_actions(self, ranks: Sequence[Sequence[Action]], *, microbatches: Sequence[int]) -> Verification:
        """As :meth:`verify`, of all that streams gave.

        Args:
            ranks: of each rank: what ``next_batch`` returned for each batch, and ``drain`` at the end.
            microbatches: of each batch.
        """
        return self._core.verify_actions([list(actions) for actions in ranks], microbatches=list(microbatches))

    def simulate(
        self,
        *,
        batches: int = 3,
        forward: float | Sequence[float] = 1.0,
        backward: float | Sequence[float] = 2.0,
        update: float | Sequence[float] = 0.0,
        reduce: float | Sequence[float] = 0.0,
        crossing_bytes: float | Sequence[float] = 0.0,
        bytes_per_second: float | Sequence[float] = math.inf,
        latency: float | Sequence[float] = 0.0,
        overlap: bool = True,
        global_norm: bool = False,
    ) -> Simulation:
        """When the actions of so many steps and a drain run. For a schedule that :meth:`verify` accepts.

        Args:
            forward, backward: seconds of one microbatch; one number, or one per stage.
            update: seconds of a stage's optimizer step.
            reduce: seconds that sums over ranks of a stage's gradients take, beside computes.
            crossing_bytes: of one microbatch from a stage to the next, and of the gradients back; one number, or one
                per hop (there are ``stages - 1``).
            bytes_per_second: that pass each direction of a hop.
            latency: seconds on top, in which the hop is free for the next value.
            overlap: sends and reductions run beside computes; else they hold up the rank that begins them.
            global_norm: updates wait for the reductions of all stages, as clipping by the norm of the whole model does.

        Raises:
            InvalidSchedule: costs that are negative, not finite, or of another number.
        """
        hops = self.stages - 1
        crossing = per_place("crossing_bytes", crossing_bytes, hops)
        speed = per_place("bytes_per_second", bytes_per_second, hops)
        for rate in speed:
            if not rate > 0:
                raise InvalidSchedule(f"bytes_per_second: {rate}; give more than 0")
        timeline = self._core.simulate(
            batches,
            forward=per_place("forward", forward, self.stages),
            backward=per_place("backward", backward, self.stages),
            update=per_place("update", update, self.stages),
            reduce=per_place("reduce", reduce, self.stages),
            transfer=[size / rate for size, rate in zip(crossing, speed, strict=True)],
            latency=per_place("latency", latency, hops),
            overlap=overlap,
            global_norm=global_norm,
        )
        return Simulation(self._core, timeline, batches)


def make(
    kind: str,
    *,
    stages: int,
    microbatches: int,
    ranks: int | None = None,
    vertical_sync: bool = False,
    ahead: int = 0,
) -> Schedule:
    """A built-in schedule. Stage s lives on rank s % ranks.

    - ``gpipe``: all forwards, then all backwards, then the update. With more stages than ranks, each rank runs one
      stage for all microbatches before its next (Harmony's wrapped pipeline), so that weights move twice a batch.
    - ``1f1b``: at most ``stages - s`` microbatches in flight at stage s; empties at the end of every batch
      (PipeDream-Flush). Same numbers and same time as ``gpipe``, less memory.
    - ``interleaved``: ``1f1b`` with several stages a rank and a shorter bubble (Narayanan et al., SC'21).
    - ``2bw``: never empties; batch t uses W(max(t - 1, 0)), two versions on every stage (PipeDream-2BW, ICML'21).
      Needs at least ``(ranks - 1) * (1 + ahead)`` microbatches a batch.
    - ``pipedream``: never empties; one microbatch is a batch and makes an update; stage s keeps ``stages - s`` versions
      (weight stashing, SOSP'19), or all ``stages`` with ``vertical_sync``.

    Args:
        microbatches: a batch.
        ranks: as many as stages unless given; a divisor of ``stages``.
        vertical_sync: ``pipedream`` only: every stage uses the version that stage 0 uses.
        ahead: ``1f1b`` and ``2bw`` with one stage a rank: stage s has up to ``ahead * (stages - 1 - s)`` microbatches
            more in flight. They hide what values take from stage to stage, up to ``ahead * (forward + backward) / 2``,
            and keep their activations. Same numbers.

    Raises:
        InvalidSchedule: unknown kind, or numbers that the kind cannot do.
    """
    core = _C.make_schedule(
        kind,
        stages=stages,
        ranks=stages if ranks is None else ranks,
        microbatches=microbatches,
        vertical_sync=vertical_sync,
        ahead=ahead,
    )
    return Schedule(core)
