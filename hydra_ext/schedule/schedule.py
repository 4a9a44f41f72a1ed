"""Schedules, and the stream of actions that a rank takes from one, step after step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydra_ext import _C
from hydra_ext._C import Action, Verification
from hydra_ext.errors import InvalidSchedule
from hydra_ext.schedule.simulation import Simulation, per_place

KINDS = ("gpipe", "1f1b", "interleaved", "2bw", "pipedream")
"""The built-in kinds, described in :func:`make`."""

Stream = _C.ScheduleStream
"""One rank's actions in order, with batches counted from the start of training. Used by one thread.

``next_batch(microbatches)`` returns the actions of the next batch's step. ``drain()`` returns the remaining actions of
the batches so far, including updates; a schedule that flushes has none. After a drain the next batch fills the pipeline
anew. It uses the same version of the weights as without the drain. ``batches`` is the number of the next batch.
``evaluation(batch, microbatches=...)`` returns only the forwards of a batch that is not trained with. Its number is
below 0, and the forwards use the newest version.
"""


class Schedule:
    """The actions of every rank in one step. Immutable; made by :func:`make` or :meth:`parse`."""

    def __init__(self, core: _C.Schedule) -> None:
        self._core = core

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads a user's own schedule, or one that was stored. ``Schedule.parse(schedule.text) == schedule``.

        The first line has the numbers and the version rule (:meth:`version_of`); then each rank has a line. An action
        is a letter, the stage, a point and the microbatch. If the action belongs to an earlier batch than the step, a
        minus and the number of batches in between follow. ``#`` begins a comment. ::

            hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=delay-1
            rank 0: U0-2 F0.0 B0.2-1 R0-1 F0.1 B0.0 F0.2 B0.1
            rank 1: U1-2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 R1

        ``F`` is a forward, ``B`` a backward. ``R`` begins the sums over ranks of a batch's gradients, which are
        complete on the stage by then. ``U`` waits for these sums and updates the stage. From ``BU`` on, the update may
        be made behind other actions. ``SF`` and ``RF`` send and receive the values that the next stage's forward needs;
        ``SB`` and ``RB`` do the same for their gradients. Each is named after the stage that sends or receives. If a
        text has no ``BU``, or no sends and receives, they are added. A stage lives on the rank whose line has its
        actions.

        Raises:
            InvalidSchedule: The text cannot be read; the message has line and word. :meth:`verify` checks whether the
                schedule can run.
        """
        return Schedule(_C.parse_schedule(text))

    @property
    def text(self) -> str:
        """The text that :meth:`parse` reads; also ``str(schedule)``."""
        return self._core.text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        header = self.text.partition("\n")[0].removeprefix("hydra-schedule 1 ")
        return f"<Schedule {self.kind or 'of its own'} {header}>"

    # ---- properties -------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> int:
        return self._core.stages

    @property
    def ranks(self) -> int:
        return self._core.ranks

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the batch that the bodies are written for."""
        return self._core.microbatches

    @property
    def kind(self) -> str | None:
        """One of :data:`KINDS`; None for a user's own schedule."""
        return self._core.recipe

    @property
    def version_rule(self) -> str:
        """``"flush"``, ``"delay-1"``, ``"stashing"`` or ``"vertical-sync"``: see :meth:`version_of`."""
        return self._core.rule

    @property
    def versions(self) -> tuple[int, ...]:
        """Number of versions of its weights that each stage holds. The next update overwrites the oldest."""
        return tuple(self._core.buffers(stage) for stage in range(self.stages))

    @property
    def flushes(self) -> bool:
        """Whether every step ends without a microbatch in flight and without an update to come."""
        return self._core.flushes

    @property
    def communicates(self) -> bool:
        """Whether the bodies have sends and receives. If not, :meth:`stream` and :meth:`unroll` add them."""
        return self._core.communicates

    def body(self, rank: int) -> list[Action]:
        """The rank's actions in one step, with batches counted from that of the step: 0, -1, ..."""
        return self._core.body(rank)

    def stage_rank(self, stage: int) -> int:
        """The rank that the stage lives on."""
        return self._core.rank_of(stage)

    def stages_of(self, rank: int) -> list[int]:
        """The rank's stages, in the order of the model."""
        return self._core.stages_of(rank)

    def version_of(self, stage: int, batch: int) -> int:
        """The version that forward and backward of all the batch's microbatches use on the stage.

        For batch t and stage s of S it is t under ``flush``, max(t - 1, 0) under ``delay-1``, max(t - (S - 1 - s), 0)
        under ``stashing``, and max(t - (S - 1), 0) under ``vertical-sync``.
        """
        return self._core.version_of(stage, batch)

    def __eq__(self, other: object) -> bool:
        """Compares the bodies, however the schedules were made."""
        return isinstance(other, Schedule) and self._core == other._core

    def __hash__(self) -> int:
        return hash(self._core)

    # ---- streams, checks and simulation -----------------------------------------------------------------------------

    def with_communication(self) -> Schedule:
        """This schedule with sends and receives in the bodies, as a user's own, for batches of one size. The begins of
        updates are written there too.

        A receive is placed one forward or backward before the one that needs it, so that values travel while that one
        computes. A body's first receive is its first action. Each direction of each hop is a queue of its own, with the
        same order at both ends.
        """
        return Schedule(self._core.with_communication())

    def stream(self, rank: int, *, first_batch: int = 0) -> Stream:
        """The rank's actions from the first batch on, including begins of updates and communication.

        Batches may have any size under a built-in schedule that flushes, and under ``2bw`` with one stage a rank. Under
        all others ``next_batch`` of another size raises InvalidSchedule.

        Args:
            rank: Number of the rank.
            first_batch: Number of the first batch, for a training that has made the updates of all batches before it.
        """
        return self._core.stream(rank, first_batch=first_batch)

    def unroll(self, batches: int) -> list[list[Action]]:
        """All actions of each rank in this number of steps and a drain, including begins of updates and
        communication."""
        return self._core.unroll(batches)

    def verify(
        self, *, in_flight: int | None = None, versions: int | None = None, gradients: int | None = None
    ) -> Verification:
        """Checks the schedule over whole batches and a drain.

        - Every forward and backward happens once, in an order that the stages allow.
        - Ranks do not block each other, even if updates wait for the reductions of all stages (a norm over the whole
          model).
        - Both ends of every hop name microbatches in the same order.
        - The version that a microbatch uses exists at its forward, and is not overwritten before its backward.
        - Updates come in the order of batches, after their reductions. They begin where nothing uses the memory
          that they write to.

        Args:
            in_flight: Most microbatches that a stage may have between forward and backward; None for any number.
            versions: Most versions of its weights that a stage may hold; None for any number.
            gradients: Most batches that a stage may have gradients of; None for any number.

        Returns:
            The peaks of these three, per stage and per rank.

        Raises:
            InvalidSchedule: A check failed. The message has the action, the rank and the reason.
        """
        return self._core.verify(in_flight=in_flight, versions=versions, gradients=gradients)

    def verify_actions(self, ranks: Sequence[Sequence[Action]], *, microbatches: Sequence[int]) -> Verification:
        """Checks the actions that streams returned, as :meth:`verify` does.

        Args:
            ranks: Actions of each rank: those of ``next_batch`` for each batch, then those of ``drain``.
            microbatches: Number of microbatches in each batch.
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
        """Computes when the actions of some steps and a drain run. :meth:`verify` has to accept the schedule.

        Args:
            batches: Number of steps.
            forward, backward: Seconds of one microbatch; one number, or one per stage.
            update: Seconds of a stage's optimizer step.
            reduce: Seconds of the sums over ranks of a stage's gradients, which run beside computes.
            crossing_bytes: Bytes of one microbatch from a stage to the next, and of the gradients back; one number, or
                one per hop (there are ``stages - 1``).
            bytes_per_second: Speed of each direction of a hop.
            latency: Additional seconds, in which the hop is free for the next value.
            overlap: Whether sends and reductions run beside computes. If not, they occupy the rank that begins them.
            global_norm: Whether updates wait for the reductions of all stages, as for clipping by the whole model's
                norm.

        Raises:
            InvalidSchedule: Costs are negative or not finite, or there are too few or too many of them.
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
    """Makes a built-in schedule. Stage s lives on rank s % ranks.

    - ``gpipe``: all forwards, then all backwards, then the update. With more stages than ranks, each rank runs one
      stage for all microbatches before its next (Harmony's wrapped pipeline), so that weights move twice a batch.
    - ``1f1b``: at most ``stages - s`` microbatches are in flight at stage s. The pipeline empties at the end of every
      batch (PipeDream-Flush). It has the numbers and the time of ``gpipe``, and takes less memory.
    - ``interleaved``: ``1f1b`` with several stages a rank and a shorter bubble (Narayanan et al., SC'21).
    - ``2bw``: the pipeline never empties. Batch t uses W(max(t - 1, 0)), and every stage keeps two versions
      (PipeDream-2BW, ICML'21). Needs at least ``(ranks - 1) * (1 + ahead)`` microbatches a batch.
    - ``pipedream``: the pipeline never empties. Each microbatch is a batch and makes an update. Stage s keeps
      ``stages - s`` versions (weight stashing, SOSP'19), or all ``stages`` with ``vertical_sync``.

    Args:
        kind: One of :data:`KINDS`.
        stages: Number of stages.
        microbatches: Number of microbatches in a batch.
        ranks: Number of ranks, a divisor of ``stages``; by default one for each stage.
        vertical_sync: Whether every stage uses the version that stage 0 uses. For ``pipedream`` only.
        ahead: Additional microbatches in flight, for ``1f1b`` and ``2bw`` with one stage a rank: up to
            ``ahead * (stages - 1 - s)`` at stage s. They hide the time of values between stages, up to
            ``ahead * (forward + backward) / 2``, and keep their activations. The numbers are the same.

    Raises:
        InvalidSchedule: The kind is unknown, or does not allow these numbers.
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
