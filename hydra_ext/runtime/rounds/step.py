"""A whole training step: rounds, clipping, the optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hydra_ext import _C, optim
from hydra_ext.blocks import Site
from hydra_ext.errors import StateError
from hydra_ext.runtime.averaging import Averaging
from hydra_ext.runtime.rounds.buffers import ModelBuffers
from hydra_ext.runtime.rounds.choice import Choice, Decision
from hydra_ext.runtime.rounds.executor import DrawnOutOfOrder, Refused, Round, RoundOwner
from hydra_ext.runtime.rounds.isolation import DrawOrder, Surroundings
from hydra_ext.runtime.rounds.recompute import Recomputation
from hydra_ext.runtime.updates import Updates
from hydra_ext.state.randomness import HostRandomness, generators

logger = logging.getLogger(__name__)

Microbatch = TypeVar("Microbatch")
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gives back.

    Attributes:
        loss: of the step: the mean of the microbatches' losses, or their sum.
        losses: what ``fn`` returned for each microbatch, without a graph.
        grad_norm: total norm of the gradients before clipping; None without ``max_norm``.
        metrics: what ``fn`` returned beside each loss, its tensors without a graph; None where it returned none.
        skipped: whether the optimizer was left out because ``grad_norm`` is not finite. Only optimizers of
            :mod:`hydra_ext.optim` are; torch's do what they do in a loop.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    metrics: tuple[Any, ...]
    skipped: bool = False


@dataclass
class Outcome:
    """What one microbatch's forward gave; ``root`` is where its backward starts, until it has run."""

    root: Tensor | None
    loss: Tensor
    metrics: Any


def split(output: Any) -> tuple[Tensor, Any]:
    """The loss, and what came with it: of a tensor, a pair, or a mapping with the key "loss".

    Raises:
        TypeError: there is no loss in it.
    """
    loss, metrics = output, None
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
        metrics = {key: value for key, value in output.items() if key != "loss"}
    elif isinstance(output, tuple) and len(output) == 2:
        loss, metrics = output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"fn returned a {type(output).__name__}: return the loss, (loss, metrics), or a mapping with the key 'loss'"
        )
    return loss, metrics


class Work(Generic[Microbatch]):
    """One microbatch's forward up to what its backward starts from."""

    def __init__(
        self, fn: Callable[[Microbatch], Any], microbatch: Microbatch, divisor: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._fn = fn
        self._microbatch = microbatch
        self._divisor = divisor
        self._scaler = scaler

    def __call__(self) -> Outcome:
        loss, metrics = split(self._fn(self._microbatch))
        if not loss.requires_grad or loss.numel() != 1:
            raise ValueError(
                f"fn returned a loss of shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " that depends on no trainable parameter")
                + ": return a scalar to run backward from"
            )
        root = loss / self._divisor if self._divisor != 1 else loss
        if self._scaler is not None:
            root = self._scaler.scale(root)
        metrics = tree_map_only(Tensor, Tensor.detach, metrics)
        return Outcome(root, loss.detach(), metrics)


@dataclass(frozen=True)
class LastGradients:
    """Who waits for what the last backwards of a step bring; nobody does in those before.

    Attributes:
        sums: takes their squares as they arrive.
        averaging: takes their mean over the ranks.
    """

    sums: Updates | None = None
    averaging: Averaging | None = None

    def begin(self) -> None:
        """The last backward is about to run."""
        if self.sums is not None:
            self.sums.expect_last_gradients()


class StepOwner(RoundOwner, Protocol):
    """The run whose model is trained."""

    optimizer: torch.optim.Optimizer | None
    updates: Updates | None

    def activation_bytes(self) -> int: ...


class Stepper:
    """The training steps of one run.

    Attributes:
        rounds: how many there were.
        refusals: rounds whose microbatches could not be run together.
        fallbacks: microbatches that were run one at a time instead.
    """

    def __init__(self, owner: StepOwner, sites: Sequence[Site], choice: Choice) -> None:
        self._owner_reference = weakref.ref(owner)  # which has this, and would be kept by it
        self._choice = choice
        self._recomputation = Recomputation(sites, owner.device)
        self._buffers = ModelBuffers(owner.model)
        self._looped = False  # without rounds from now on
        self._alone = False  # in rounds of one microbatch from now on
        self.rounds = 0
        self.refusals = 0
        self.fallbacks = 0

    @property
    def _owner(self) -> StepOwner:
        """Itself, and no proxy: it is compared with the engine's participants."""
        owner = self._owner_reference()
        if owner is None:
            raise StateError("the run whose steps these are is no more")
        return owner

    def step(
        self,
        works: Sequence[Work[Any]],
        seeds: Sequence[int],
        *,
        max_norm: float | None,
        round_size: int | None,
        recompute: bool | None,
        reduction: Reduction,
        scaler: torch.amp.GradScaler | None,
        averaging: Averaging | None,
    ) -> StepOutput:
        optimizer = self._owner.optimizer
        if optimizer is None:
            raise StateError("run.step needs the optimizer: offload(model, optimizer, budget=...)")
        outcomes: list[Outcome] = []
        updates = self._owner.updates if scaler is None else None  # else the scaler writes the gradients once more
        sums = updates if max_norm is not None else None
        try:
            while len(outcomes) < len(works):
                first = len(outcomes)
                decision = self._choice.next(
                    len(works) - first, size=1 if self._alone else round_size, recompute=recompute
                )
                last = first + decision.size
                complete = LastGradients(sums, averaging) if last == len(works) else LastGradients()
                outcomes += self._run(works[first:last], seeds[first:last], decision, complete)
            if averaging is not None:
                averaging.complete()
            norm, skipped = self._update(optimizer, max_norm, scaler)
        finally:
            if updates is not None:
                updates.step_ended()
        losses = torch.stack([outcome.loss for outcome in outcomes])
        return StepOutput(
            loss=losses.mean() if reduction == "mean" else losses.sum(),
            losses=losses.unbind(),
            grad_norm=norm,
            metrics=tuple(outcome.metrics for outcome in outcomes),
            skipped=skipped,
        )

    def _run(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome]:
        if self._looped:
            return self._one_at_a_time(works, seeds, last)
        self._buffers.note()
        host = HostRandomness()
        try:
            outcomes = self._round(works, seeds, decision, last)
            while outcomes is None:  # some activations are to be kept
                self._buffers.restore()
                host.restore()
                outcomes = self._round(works, seeds, decision, last)
            return outcomes
        except Refused as refused:
            self.refusals += 1
            logger.warning("run.step runs one microbatch at a time from now on: %s", refused)
            self._buffers.restore()
            host.restore()
            self._alone = isinstance(refused, DrawnOutOfOrder)
            self._looped = not self._alone
        return self._one_at_a_time(works, seeds, last) if self._looped else self._each(works, seeds, decision, last)

    def _each(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome]:
        """Each microbatch in a round of its own: as the loop, in no more memory than a round."""
        outcomes: list[Outcome] = []
        for work, seed in zip(works, seeds, strict=True):
            complete = last if len(outcomes) == len(works) - 1 else LastGradients()
            outcomes += self._run([work], [seed], replace(decision, size=1), complete)
        return outcomes

    def _round(
        self, works: Sequence[Work[Any]], seeds: Sequence[int], decision: Decision, last: LastGradients
    ) -> list[Outcome] | None:
        """None if blocks that were recomputed gave something else."""
        owner = self._owner
        this = Round(owner, works, seeds, _take_root, self._recomputation if decision.recompute else None)
        before = owner.activation_bytes()
        try:
            outcomes = this.forward()
            held = owner.activation_bytes() - before
            if not this.repeats():
                return None
            last.begin()
            this.backward(last.averaging)
        finally:
            owner.core.drop_early()
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
        peak = max((size for kind in kinds for _, size in owner.core.recorded(kind)), default=0)
        self._choice.learn(decision, held=held, peak=peak)
        self.rounds += 1
        self._learn_order(this.draws, alone=decision.size == 1)
        return outcomes

    def _learn_order(self, draws: DrawOrder, *, alone: bool) -> None:
        """After a round: whether larger ones draw their random numbers in another order than a loop."""
        if self._alone:
            self.fallbacks += 1
        if draws.conflict:  # in the backward, where it was too late
            logger.warning(
                "the backward of this step has drawn from Python's or numpy's random numbers, in another order than a "
                "loop would have; run.step runs one microbatch at a time from now on"
            )
        self._alone = self._alone or draws.conflict or (alone and draws.turns > 1)

    def _one_at_a_time(self, works: Sequence[Work[Any]], seeds: Sequence[int], last: LastGradients) -> list[Outcome]:
        outcomes: list[Outcome] = []
        caller = Surroundings(self._owner.device)
        cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            for work, seed in zip(works, seeds, strict=True):
                for generator in generators(self._owner.device):
                    generator.manual_seed(seed)
                outcomes.append(work())
                if len(outcomes) == len(works):
                    last.begin()
                _take_root(outcomes[-1]).backward()  # type: ignore[no-untyped-call]
                self.fallbacks += 1
        finally:
            torch.set_autocast_cache_enabled(cached)
            caller.restore()
        return outcomes

    def _update(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, scaler: torch.amp.GradScaler | None
    ) -> tuple[Tensor | None, bool]:
        parameters = list(self._owner.model.parameters())
        updates = self._owner.updates
        norm, skipped = None, False
        if scaler is None and updates is not None:
            norm, skipped = updates.step(parameters, max_norm)
            optimizer.zero_grad()
            return norm, skipped
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            clip = torch.nn.utils.clip_grad_norm_ if updates is None else optim.clip_grad_norm_
            norm = clip(parameters, max_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        return norm, skipped


def _take_root(outcome: Outcome) -> Tensor:
    """What the backward starts from. Nothing else refers to the graph any more."""
    root, outcome.root = outcome.root, None
    if root is None:
        raise StateError("the backward of this microbatch has run")
    return root


def draw_seeds(count: int) -> list[int]:
    """One per microbatch, from the caller's random state."""
    drawn: list[int] = torch.randint(2**62, (count,), generator=torch.default_generator, device="cpu").tolist()
    return drawn


def checked_seeds(seeds: Sequence[int] | None, count: int, round_size: int | None, reduction: str) -> list[int]:
    """Of so many microbatches, which are checked with the rest of what run.step was given."""
    if not count or (round_size is not None and round_size < 1) or reduction not in ("mean", "sum"):
        raise ValueError(
            f"run.step was given {count} microbatches, round_size={round_size}, reduction={reduction!r}: "
            "give at least one microbatch, a positive size, 'mean' or 'sum'"
        )
    seeds = draw_seeds(count) if seeds is None else list(seeds)
    if len(seeds) != count:
        raise ValueError(f"run.step was given {len(seeds)} seeds for {count} microbatches")
    return seeds
