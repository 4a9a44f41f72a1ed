"""Puts a rank's part of the pipeline together, and runs its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hydra_ext.errors import UnsupportedModel
from hydra_ext.pipeline.batch import Batch
from hydra_ext.pipeline.executor import Executor
from hydra_ext.pipeline.microbatches import OwnStage
from hydra_ext.pipeline.ranks.gradients import Holder, Partners, Reducer, SharedWeight
from hydra_ext.pipeline.ranks.links import Inbox, Links, Outbox
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.alike import begin_alike
from hydra_ext.pipeline.stages.modes import Modes
from hydra_ext.pipeline.stages.parts import Part, Parts
from hydra_ext.pipeline.stages.recompute import RecomputedStage
from hydra_ext.pipeline.stages.remembered import RememberingStage
from hydra_ext.pipeline.stages.tier import Tier, TierOptions
from hydra_ext.pipeline.stages.trained import Trained
from hydra_ext.pipeline.stages.update import settings_of
from hydra_ext.pipeline.stages.versions import StageWeights
from hydra_ext.pipeline.trace import Activity
from hydra_ext.pipeline.updates import Update
from hydra_ext.schedule import Schedule
from hydra_ext.split.stage_program import StageProgram, microbatch_seed
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.split.stages.state_dicts import refuse_while_under_way
from hydra_ext.split.state.listed import refuse_in_tuples

logger = logging.getLogger(__name__)

TO_END = 1.0  # seconds that threads have to end after a failure, when nothing should keep them

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

_Count = tuple[int, int, list[int]]
"""A stage, how many parameters it trains, and the places among them of those that an earlier stage trains too."""


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        batches: that have been admitted; all their updates have been made.
        evaluations: likewise, each of which has random numbers of its own.
        seed: of all random numbers.
        updates: that no step has told of yet.
    """

    batches: int
    evaluations: int
    seed: int
    updates: list[Update]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "updates": [vars(update) for update in self.updates]}


class Engine:
    """One rank's part, from its first step to its end. All ranks make one at the same time.

    Attributes:
        stages: on this rank.
        tier: the device under a budget, if there is one.
        batches: how many have been admitted.
    """

    def __init__(
        self,
        parts: Parts,
        make_optimizer: MakeOptimizer,
        schedule: Schedule,
        topology: Topology,
        watch: Watch,
        device: torch.device,
        *,
        seed: int,
        recompute: bool,
        tier: TierOptions | None = None,
    ) -> None:
        self.batches = 0
        self._evaluations = 0
        self._parts = parts
        self._schedule = schedule
        self._topology = topology
        self._watch = watch
        self._device = device
        self._seed = seed
        self._links = Links(topology.rank, device, watch)
        self.tier: Tier | None = None
        try:
            self._stream = schedule.stream(topology.place)
            self.stages = [self._own_stage(part, make_optimizer, recompute, tier is not None) for part in parts.own]
            self._trained = Trained(parts.own, schedule)
            if tier is not None:
                self.tier = self._make_tier(tier)
            counts = watch.meet("before the ranks connect", self._counts())
            self._connect()
            self.announcements, self._announcers = self._connect_announcements()
            self._partners = self._meet(counts)
        except BaseException as error:  # re-raised: no close() is called after this
            watch.fail_with(error)  # before the others miss this rank's connections
            self._links.close(TO_END)
            if self.tier is not None:
                self.tier.close()
            raise
        self._reducer = Reducer(self._partners, watch, topology.rank)
        self._executor = Executor(schedule, self.stages, self._reducer, watch, device, self.tier)
        self._on_model: RemovableHandle | None = None
        if parts.model is not None:
            self._on_model = refuse_while_under_way(parts.model, self._executor.check_idle)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(
        self,
        microbatches: Sequence[Any],
        fn: Callable[..., Any],
        *,
        max_norm: float | None,
        seeds: Sequence[int] | None,
    ) -> tuple[Batch, list[Update]]:
        """All of this rank's actions of one step."""
        number = self.batches
        if seeds is None:
            seeds = [self.seed_of(number, microbatch) for microbatch in range(len(microbatches))]
        settings = {s.index: settings_of(s.optimizer) for s in self.stages if s.optimizer is not None}
        batch = Batch(number, microbatches, fn, seeds, len(microbatches), max_norm, settings)
        self._trained.check()
        for stage in self.stages:
            stage.weights.check_own()
        actions = self._stream.next_batch(len(microbatches))
        self.batches += 1
        self._executor.admit(batch)
        self._executor.run(actions)
        for stage in self.stages:
            if stage.optimizer is not None:
                # The update of this step may come in a later one; schedulers would warn that there was none before
                # their first step.
                stage.optimizer._opt_called = True  # type: ignore[attr-defined]
        return batch, self._executor.updates.take()

    def evaluate(self, microbatches: Sequence[Any], fn: Callable[..., Any]) -> Batch:
        """All of this rank's forwards, after a drain, with the newest weights."""
        self.drain()
        self._evaluations += 1
        number = -1 - self._evaluations
        seeds = [self.seed_of(number, microbatch) for microbatch in range(len(microbatches))]
        batch = Batch(number, microbatches, fn, seeds, 1, None, {})
        self._executor.evaluate(batch, self._stream.evaluation(number, microbatches=len(microbatches)))
        return batch

    def drain(self) -> None:
        """What is under way is finished: the modules' parameters are the newest weights. The next step tells of the
        updates."""
        with torch.inference_mode(False), torch.enable_grad():  # what began with gradients, whatever the caller is in
            self._executor.run(self._stream.drain())

    def refresh(self) -> None:
        """The parameters as they are now are all versions.

        Raises:
            StateError: microbatches or updates are under way.
        """
        self._executor.check_idle("refresh()")
        for stage in self.stages:
            stage.weights.refresh()

    @property
    def progress(self) -> Progress:
        """What the next step depends on beside weights and optimizers; nothing may be under way."""
        return Progress(self.batches, self._evaluations, self._seed, list(self._executor.updates.made))

    def delay_of(self, stage: int, batch: int) -> int:
        """How many versions before the newest one that it could use a batch uses."""
        return batch - self._schedule.version_of(stage, batch)

    def resume(self, progress: Progress) -> None:
        """The next step is the one after these batches. Nothing may be under way."""
        self.batches, self._evaluations, self._seed = progress.batches, progress.evaluations, progress.seed
        self._executor.updates.made = list(progress.updates)
        self._stream = self._schedule.stream(self._topology.place, first_batch=progress.batches)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages, by name; of explicit stages behind their numbers."""
        state: dict[str, Tensor] = {}
        for part in self._parts.own:
            state.update((name, parameter.detach()) for name, parameter in part.parameters)
            for module in part.modules:
                prefix = "" if self._parts.rehearsal is not None else f"{part.stage}."
                buffers = module.named_buffers()
                state.update((prefix + name, buffer) for name, buffer in buffers if not is_absent(buffer))
        return {name: tensor for name, tensor in state.items() if name not in self._parts.elsewhere}

    def seed_of(self, batch: int, microbatch: int) -> int:
        """What the random numbers of a microbatch come from."""
        return microbatch_seed(self._seed, self._topology.replica, batch, microbatch)

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def activity(self) -> Activity:
        """What this rank has done, as far back as it is kept."""
        return Activity(
            list(self._executor.timings),
            list(self._links.transfers),
            list(self._reducer.reductions),
            list(self._executor.updates.behind),
        )

    @property
    def parts(self) -> Parts:
        return self._parts

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def device(self) -> torch.device:
        return self._device

    def flush(self) -> None:
        """Returns when everything has left that this rank has for the others.

        Raises:
            RankFailed: a rank has failed.
        """
        self._links.flush()

    def close(self, timeout: float) -> None:
        """All ranks have to. Ends all of it, whatever fails on the way."""
        with ExitStack() as stack:  # the last one first
            if self._on_model is not None:
                stack.callback(self._on_model.remove)
            if self.tier is not None:
                stack.callback(self.tier.close)
            # After the links: what it waits for after a failure ends with their groups.
            stack.callback(self._reducer.close, timeout)
            stack.callback(self._links.close, timeout)

    # ---- putting it together ----------------------------------------------------------------------------------------

    def _make_tier(self, options: TierOptions) -> Tier:
        modules = [module for part in self._parts.own for module in part.modules]
        tier = Tier(modules, [stage.weights for stage in self.stages], options)
        for stage in self.stages:
            stage.weights.on_show = tier.show
        return tier

    def _own_stage(self, part: Part, make_optimizer: MakeOptimizer, recompute: bool, offloaded: bool) -> OwnStage:
        alive = self._schedule.versions[part.stage]
        if alive > 1:
            refuse_in_tuples(part.modules, part.trained)
        optimizer = make_optimizer([parameter for _, parameter in part.parameters]) if part.trained else None
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedModel(
                f"the optimizer's factory returned a {type(optimizer).__name__}: return a torch.optim.Optimizer"
            )
        weights = StageWeights(part.trained, part.modules, alive=alive, at_once=offloaded)
        program: StageProgram = RememberingStage(part.program, part.modules)
        if recompute:
            program = RecomputedStage(program, part.modules)
        if part.around is not None:
            program = part.around(program)
        return OwnStage(part.stage, program, weights, Modes(part.modules), optimizer)

    def _connect(self) -> None:
        """One link for each direction of each hop between ranks, in every line."""
        by_index = {stage.index: stage for stage in self.stages}
        for replica in range(self._topology.replicas):
            for stage in range(self._schedule.stages - 1):
                here = self._topology.rank_of(self._schedule.stage_rank(stage), replica)
                there = self._topology.rank_of(self._schedule.stage_rank(stage + 1), replica)
                if here == there:
                    continue
                forward = self._links.connect(here, there, f"activations of stage {stage}")
                back = self._links.connect(there, here, f"gradients for stage {stage}")
                if isinstance(forward, Outbox) and isinstance(back, Inbox):
                    links = by_index[stage].links
                    links.outbox, links.gradient_inbox = forward, back
                elif isinstance(forward, Inbox) and isinstance(back, Outbox):
                    links = by_index[stage + 1].links
                    links.inbox, links.gradient_outbox = forward, back

    def _connect_announcements(self) -> tuple[Inbox | None, list[Outbox]]:
        """From the rank of each line that computes the losses to the others of the line."""
        inbox, outboxes = None, []
        place = self._schedule.stage_rank(self._schedule.stages - 1)
        for replica in range(self._topology.replicas):
            source = self._topology.rank_of(place, replica)
            for target in self._topology.line(replica):
                end = None if target == source else self._links.connect(source, target, "losses")
                if isinstance(end, Outbox):
                    outboxes.append(end)
                elif end is not None:
                    inbox = end
        return inbox, outboxes

    @property
    def computes_losses(self) -> bool:
        return self._topology.place == self._schedule.stage_rank(self._schedule.stages - 1)

    @property
    def announcers(self) -> list[Outbox]:
        return self._announcers

    def _meet(self, counts: Sequence[Sequence[_Count]]) -> Partners:
        topology = self._topology
        line, copies = None, None
        if topology.places > 1:
            lines = [self._links.groups.make(topology.line(replica), "gloo") for replica in range(topology.replicas)]
            line = lines[topology.replica]
        if topology.replicas > 1:
            groups = [self._links.groups.make(topology.copies(place), None) for place in range(topology.places)]
            copies = groups[topology.place]
        if topology.world > 1:
            begin_alike(self._parts, self._schedule, topology, line, copies, self._links.groups)
            for stage in self.stages:
                stage.weights.refresh()
        return Partners(copies, line, self._orders(counts), self._shared_weights())

    def _counts(self) -> list[_Count]:
        """Of the own stages."""
        counts = []
        for part in self._parts.own:
            weights = [weight for weight in self._parts.shared if part.stage in weight and part.stage != min(weight)]
            again = [index for weight in weights if (index := weight[part.stage]) is not None]
            counts.append((part.stage, len(part.trained), again))
        return counts

    def _orders(self, counts: Sequence[Sequence[_Count]]) -> tuple[tuple[int, ...], ...]:
        """By place in the line, the model's numbers of its stages' trained parameters: stage after stage, but for
        those that an earlier stage has. ``counts`` are all ranks'."""
        known = self._parts.orders
        if known is None:
            known, first = {}, 0
            line = counts[:: self._topology.replicas]
            for stage, count, again in sorted(each for of_rank in line for each in of_rank):
                known[stage] = tuple(-1 if index in again else first + index for index in range(count))
                first += count
        places = range(self._topology.places)
        return tuple(tuple(n for s in self._schedule.stages_of(p) for n in known[s]) for p in places)

    def _shared_weights(self) -> tuple[SharedWeight, ...]:
        weights = []
        own = {part.stage for part in self._parts.own}
        made: dict[tuple[int, ...], list[dist.ProcessGroup | None]] = {}
        for weight in self._parts.shared:
            places = tuple(sorted({self._schedule.stage_rank(stage) for stage in weight}))
            if len(places) > 1 and places not in made:
                ranks = [[self._topology.rank_of(place, r) for place in places] for r in range(self._topology.replicas)]
                made[places] = [self._links.groups.make(each, None) for each in ranks]
            if self._topology.place not in places:
                continue
            group = made[places][self._topology.replica] if len(places) > 1 else None
            holders = tuple(
                Holder(stage, places.index(self._schedule.stage_rank(stage)), weight[stage] if stage in own else None)
                for stage in sorted(weight, reverse=True)
            )
            weights.append(SharedWeight(group, holders))
        return tuple(weights)


def common_seed(seed: int | None, watch: Watch) -> int:
    """The first rank's."""
    own = torch.initial_seed() if seed is None else seed
    return int(watch.meet("at the start", int(own))[0]) & (2**63 - 1)
