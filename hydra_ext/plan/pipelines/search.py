"""The search: every choice is judged with its best cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hydra_ext.errors import PlanDoesNotFit, PlanError
from hydra_ext.plan.pipelines.chains import Chain, ChainAt
from hydra_ext.plan.pipelines.costs import Judge
from hydra_ext.plan.pipelines.forecast import PipelineAlternative, PipelinePlan
from hydra_ext.plan.pipelines.question import Cluster, Constraints


@dataclass(frozen=True)
class _Judged:
    judge: Judge
    cuts: tuple[int, ...]
    seconds: float
    rank_bytes: tuple[int, ...]

    @property
    def order(self) -> tuple[float, int]:
        return self.seconds, max(self.rank_bytes)


def search(chain_at: ChainAt, cluster: Cluster, constraints: Constraints) -> PipelinePlan:
    """Finds the fastest choice that fits.

    Among equally fast ones it takes the one with the fewest bytes, then the one that comes first.

    Args:
        chain_at: The chain for each size of microbatches.
        cluster: What the ranks run on.
        constraints: What is given.

    Raises:
        PlanDoesNotFit: No choice stays within the budget. The error has the bytes of the one that needs the least.
        PlanError: Nothing can be chosen, and the message says why.
    """
    sizes = constraints.sizes(cluster.devices)
    if not sizes:
        raise nothing_possible(constraints, cluster.devices)
    most = len(chain_at(sizes[0]).possible_cuts) + 1
    found = list(_judged(chain_at, cluster, constraints, most))
    if not found:
        raise nothing_possible(constraints, cluster.devices, most)
    fitting = [each for each in found if _fits(each, cluster)]
    if not fitting:
        raise _too_small(min(found, key=lambda each: max(each.rank_bytes)), cluster)
    best = min(fitting, key=lambda each: each.order)
    stages = best.judge.stages(best.cuts)
    return PipelinePlan(
        choice=best.judge.choice,
        seconds=best.seconds,
        stages=stages,
        rank_bytes=best.rank_bytes,
        budget=cluster.budget,
        lanes=best.judge.lanes(stages, best.seconds),
        alternatives=tuple(
            PipelineAlternative(
                choice=each.judge.choice,
                seconds=each.seconds,
                nbytes=max(each.rank_bytes),
                cuts=each.cuts,
                fits=_fits(each, cluster),
            )
            for each in sorted(found, key=lambda each: (not _fits(each, cluster), *each.order))
        ),
    )


def _fits(judged: _Judged, cluster: Cluster) -> bool:
    return cluster.budget is None or max(judged.rank_bytes) <= cluster.budget


def _judged(chain_at: ChainAt, cluster: Cluster, constraints: Constraints, most_stages: int) -> Iterator[_Judged]:
    chains: dict[int, Chain] = {}
    for choice in constraints.choices(cluster.devices, most_stages):
        if choice.samples not in chains:
            chains[choice.samples] = chain_at(choice.samples)
        judge = Judge(choice, chains[choice.samples], cluster)
        best = _best_cuts(judge, constraints.cuts, cluster) if judge.is_possible else None
        if best is not None:
            yield best


def _best_cuts(judge: Judge, given: tuple[int, ...] | None, cluster: Cluster) -> _Judged | None:
    """The fastest cuts that fit, or the ones with the fewest bytes; None if there are none."""
    best: _Judged | None = None
    leanest: tuple[int, tuple[int, ...]] | None = None
    for cuts in filter(judge.allows, judge.cuts() if given is None else [given]):
        stages = judge.stages(cuts)
        held = judge.rank_bytes(stages)
        if leanest is None or max(held) < leanest[0]:
            leanest = max(held), cuts
        if cluster.budget is not None and max(held) > cluster.budget:
            continue
        if best is not None and judge.least_seconds(stages) > best.seconds:
            continue
        judged = _Judged(judge, cuts, judge.seconds(stages), held)
        if best is None or judged.order < best.order:
            best = judged
    if best is None and leanest is not None:
        stages = judge.stages(leanest[1])
        best = _Judged(judge, leanest[1], judge.seconds(stages), judge.rank_bytes(stages))
    return best


def _too_small(least: _Judged, cluster: Cluster) -> PlanDoesNotFit:
    budget, needed = cluster.budget or 0, max(least.rank_bytes)
    rank = least.rank_bytes.index(needed)
    stage = next(number for number, each in enumerate(least.judge.stages(least.cuts)) if each.rank == rank)
    choice = least.judge.choice
    return PlanDoesNotFit(
        f"budget={budget} bytes: the leanest plan needs {needed} on rank {rank} ({choice.width} lines of "
        f"{choice.depth} ranks, {choice.schedule}, microbatches of {choice.samples}"
        f"{', recomputed' if choice.recompute else ''}): give that many, more devices, or a smaller batch",
        stage=stage,
        needed_bytes=needed,
        limit_bytes=budget,
    )


def nothing_possible(constraints: Constraints, devices: int, most_stages: int | None = None) -> PlanError:
    """The error for constraints that leave no choice.

    Args:
        constraints: What was given.
        devices: Number of devices.
        most_stages: That the model can be cut into; None if no number of lines and no size of microbatches is left.
    """
    given = ", ".join(
        f"{name}={value!r}"
        for name in ("width", "stages", "microbatches", "samples", "cuts")
        if (value := getattr(constraints, name)) is not None
    )
    asked = f"{devices} devices and a batch of {constraints.batch} samples{' with ' + given if given else ''}"
    if most_stages is None:
        return PlanError(
            f"{asked}: no number of lines and no size of microbatches divides them; give a batch that is a multiple "
            "of the devices, or leave something out"
        )
    return PlanError(
        f"{asked}: no schedule of {', '.join(constraints.schedules)} allows these numbers, for a model of at most "
        f"{most_stages} stages; give a batch that more lines divide, or leave something out"
    )
