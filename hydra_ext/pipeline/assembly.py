"""Puts a rank's part of the pipeline together: its stages, and their connections with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hydra_ext.errors import UnsupportedModel
from hydra_ext.pipeline.microbatches import OwnStage
from hydra_ext.pipeline.ranks.gradients import Holder, Partners, SharedWeight
from hydra_ext.pipeline.ranks.links import Inbox, Links, Outbox
from hydra_ext.pipeline.ranks.queues import warn_if_few
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.alike import begin_alike
from hydra_ext.pipeline.stages.modes import Modes
from hydra_ext.pipeline.stages.parts import Part, Parts
from hydra_ext.pipeline.stages.recompute import RecomputedStage
from hydra_ext.pipeline.stages.remembered import RememberingStage
from hydra_ext.pipeline.stages.tier import Tier, TierOptions
from hydra_ext.pipeline.stages.trained import Trained
from hydra_ext.pipeline.stages.versions import StageWeights
from hydra_ext.schedule import Schedule
from hydra_ext.split.stage_program import StageProgram
from hydra_ext.split.state.listed import refuse_in_tuples

TO_END = 1.0  # seconds that threads have to end after a failure; by then nothing should keep them waiting

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

_Count = tuple[int, int, list[int]]
"""A stage, the number of its trained parameters, and the indices of those that an earlier stage trains too."""


@dataclass(frozen=True)
class Assembly:
    """One rank's stages and connections, from its first step to its end.

    Attributes:
        stages: The stages on this rank, in the order of ``parts.own``.
        trained: The parameters that the rank trains.
        tier: The device under a budget; None without a budget.
        partners: The ranks that this one reduces gradients with.
        losses: The link on which the last stage's losses arrive; None on the rank that computes them.
        loss_listeners: The links on which that rank sends them; empty on the others.
    """

    parts: Parts
    stages: list[OwnStage]
    trained: Trained
    tier: Tier | None
    links: Links
    partners: Partners
    losses: Inbox | None
    loss_listeners: list[Outbox]


def assemble(
    parts: Parts,
    make_optimizer: MakeOptimizer,
    schedule: Schedule,
    topology: Topology,
    watch: Watch,
    device: torch.device,
    *,
    recompute: bool,
    budget: TierOptions | None,
) -> Assembly:
    """Makes the stages and connects the ranks. All ranks have to call it at the same time.

    Raises:
        RankFailed: Another rank has failed.
        UnsupportedModel: The schedule cannot train a stage, or ``make_optimizer`` returns no optimizer.
    """
    links = Links(topology.rank, device, watch)
    tier: Tier | None = None
    try:
        offloaded = budget is not None
        stages = [_own_stage(part, make_optimizer, schedule, recompute, offloaded) for part in parts.own]
        trained = Trained(parts.own, schedule)
        if budget is not None:
            tier = _make_tier(parts, stages, budget)
        counts = watch.meet("before the ranks connect", _counts(parts))
        connections = _Connections(parts, stages, schedule, topology, links)
        connections.connect_stages()
        losses, listeners = connections.connect_losses()
        # Beside its links: the computation, two lanes of a device under a budget, and the mean over the replicas.
        warn_if_few(links.direct, 1 + 2 * offloaded + (topology.replicas > 1))
        partners = connections.meet(counts)
    except BaseException as error:  # re-raised: no close() is called after this
        watch.fail_with(error)  # first, so that the others learn of the error and not of a lost connection
        links.close(TO_END)
        if tier is not None:
            tier.close()
        raise
    return Assembly(parts, stages, trained, tier, links, partners, losses, listeners)


# ---- stages ---------------------------------------------------------------------------------------------------------


def _own_stage(
    part: Part, make_optimizer: MakeOptimizer, schedule: Schedule, recompute: bool, offloaded: bool
) -> OwnStage:
    alive = schedule.versions[part.stage]
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


def _make_tier(parts: Parts, stages: Sequence[OwnStage], options: TierOptions) -> Tier:
    modules = [module for part in parts.own for module in part.modules]
    tier = Tier(modules, [stage.weights for stage in stages], options)
    for stage in stages:
        stage.weights.on_show = tier.show
    return tier


def _counts(parts: Parts) -> list[_Count]:
    """The counts of this rank's stages."""
    counts = []
    for part in parts.own:
        weights = [weight for weight in parts.shared if part.stage in weight and part.stage != min(weight)]
        again = [index for weight in weights if (index := weight[part.stage]) is not None]
        counts.append((part.stage, len(part.trained), again))
    return counts


# ---- ranks ----------------------------------------------------------------------------------------------------------


class _Connections:
    """Connects this rank's stages with those of other ranks. All ranks make the same calls in the same order."""

    def __init__(
        self, parts: Parts, stages: Sequence[OwnStage], schedule: Schedule, topology: Topology, links: Links
    ) -> None:
        self._parts = parts
        self._stages = stages
        self._schedule = schedule
        self._topology = topology
        self._links = links

    def connect_stages(self) -> None:
        """Makes one link for each direction of each hop between ranks, in every line."""
        by_index = {stage.index: stage for stage in self._stages}
        for replica in range(self._topology.replicas):
            for stage in range(self._schedule.stages - 1):
                here = self._topology.rank_of(self._schedule.stage_rank(stage), replica)
                there = self._topology.rank_of(self._schedule.stage_rank(stage + 1), replica)
                if here == there:
                    continue
                forward = self._links.connect(here, there, f"activations of stage {stage}")
                back = self._links.connect(there, here, f"gradients for stage {stage}")
                if isinstance(forward, Outbox) and isinstance(back, Inbox):
                    ends = by_index[stage].links
                    ends.outbox, ends.gradient_inbox = forward, back
                elif isinstance(forward, Inbox) and isinstance(back, Outbox):
                    ends = by_index[stage + 1].links
                    ends.inbox, ends.gradient_outbox = forward, back

    def connect_losses(self) -> tuple[Inbox | None, list[Outbox]]:
        """Makes links from the rank that computes a line's losses to the line's other ranks."""
        inbox, outboxes = None, []
        place = self._schedule.stage_rank(self._schedule.stages - 1)
        for replica in range(self._topology.replicas):
            source = self._topology.rank_of(place, replica)
            for target in self._topology.line(replica):
                if target == source:
                    continue
                end = self._links.connect(source, target, "losses", through_host=True)
                if isinstance(end, Outbox):
                    outboxes.append(end)
                elif end is not None:
                    inbox = end
        return inbox, outboxes

    def meet(self, counts: Sequence[Sequence[_Count]]) -> Partners:
        """Makes the process groups, and gives tensors that several stages or replicas hold the same values.

        Args:
            counts: The counts of all ranks.
        """
        topology = self._topology
        line, copies = None, None
        if topology.places > 1:
            lines = [self._links.groups.make(topology.line(replica), "gloo") for replica in range(topology.replicas)]
            line = lines[topology.replica]
        if topology.replicas > 1:
            kind = self._links.groups.for_gradients
            groups = [self._links.groups.make(topology.copies(place), kind) for place in range(topology.places)]
            copies = groups[topology.place]
        if topology.world > 1:
            begin_alike(self._parts, self._schedule, topology, line, copies, self._links.groups)
            for stage in self._stages:
                stage.weights.refresh()
        return Partners(copies, line, self._orders(counts), self._shared_weights())

    def _orders(self, counts: Sequence[Sequence[_Count]]) -> tuple[tuple[int, ...], ...]:
        """For each place in the line, the model's numbers of its trained parameters, stage after stage.

        -1 stands for a parameter that an earlier stage trains too.

        Args:
            counts: The counts of all ranks.
        """
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
                kind = self._links.groups.for_gradients
                made[places] = [self._links.groups.make(each, kind) for each in ranks]
            if self._topology.place not in places:
                continue
            group = made[places][self._topology.replica] if len(places) > 1 else None
            holders = tuple(
                Holder(stage, places.index(self._schedule.stage_rank(stage)), weight[stage] if stage in own else None)
                for stage in sorted(weight, reverse=True)
            )
            weights.append(SharedWeight(group, holders))
        return tuple(weights)
